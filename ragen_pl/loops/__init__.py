"""The custom Lightning loop that alternates a rollout phase and an update phase."""
