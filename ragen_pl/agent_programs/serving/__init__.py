"""OpenAI-compatible endpoint of the policy: requests, responses and sessions."""
