"""Image environments. Importing this package registers them with gymnasium under `ragen/`.

Each class shows the state of an environment in `envs` as an RGB image, composed of tiles. The rules are in
`envs`.
"""

from gymnasium.envs.registration import register

ENVIRONMENT_IDS = ("ragen/FrozenLakeVisual-v0", "ragen/SokobanVisual-v0")

register(id="ragen/FrozenLakeVisual-v0", entry_point="visual_envs.frozen_lake:FrozenLakeVisual")
register(id="ragen/SokobanVisual-v0", entry_point="visual_envs.sokoban:SokobanVisual")
