"""Callbacks of a run. Each works in any Trainer; those about rollouts act where a loop tells of rollouts.

The rollout/update loop calls three hooks that Lightning does not know on every callback that has them:
`on_rollout_start(trainer, pl_module)`, `on_rollout_progress(trainer, pl_module, done, total)` and
`on_rollout_end(trainer, pl_module, trajectories)`.
"""
