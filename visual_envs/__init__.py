"""Environments seen as images, registered with gymnasium under `ragen/`.

Each is an environment of `envs` whose state is shown only as an RGB image, laid out from tiles that
`visual_envs.tiles` draws. Rules live in `envs`.
"""

from gymnasium.envs.registration import register

ENVIRONMENT_IDS = ("ragen/FrozenLakeVisual-v0", "ragen/SokobanVisual-v0")

register(id="ragen/FrozenLakeVisual-v0", entry_point="visual_envs.frozen_lake:FrozenLakeVisual")
register(id="ragen/SokobanVisual-v0", entry_point="visual_envs.sokoban:SokobanVisual")
