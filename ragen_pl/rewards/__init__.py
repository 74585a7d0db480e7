"""Reward terms of turns: shaping and the world-model reward."""
