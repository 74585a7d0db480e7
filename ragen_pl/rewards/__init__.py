"""Reward functions: callables that add terms to the rewards of turns, or change them."""
