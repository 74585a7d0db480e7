"""Callbacks of a run. Each works in any Trainer; those for rollouts need a loop that reports rollouts.

Callbacks that derive from `ragen_pl.loops.hooks.RolloutCallback` have three hooks more than Lightning's:
`on_rollout_start`, `on_rollout_progress` and `on_rollout_end`.
"""
