"""The rollout: policies answer turns of many environments at once, until each episode has ended."""
