"""Masks, advantages, filters and losses: pure functions of tensors, one idea a file.

This layer imports torch and `ragen_pl.trajectory`. It uses two layouts. *Credit layout*
`[trajectories, tokens]`: a row is one trajectory's sampled tokens in order, padding allowed, with
the turn's index per token (-1 off the mask). *Sample layout* `[batch, time]`: a row is what the
policy reads in one forward pass.
"""
