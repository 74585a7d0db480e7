"""Environments of other libraries behind the protocol of `envs.base`, each with an extra of its own.

They are used by class path (`envs.adapters.reasoning_gym.ReasoningGym`). A library is imported in the constructor.
"""
