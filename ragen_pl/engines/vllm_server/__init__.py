"""The rollout engine on vLLM servers, on this machine or on others.

A server gets token ids and images, and returns sampled ids with their log-probs. It labels each token with the version
of the weights that sampled it. New weights are written to a folder, from which each server reloads them in place, or
downloads them first. A server that fails gets no requests until it answers again with the present weights.
"""
