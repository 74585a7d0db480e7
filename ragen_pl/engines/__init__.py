"""Rollout engines: they sample responses of the policy in this process, in vLLM, or on vLLM servers."""
