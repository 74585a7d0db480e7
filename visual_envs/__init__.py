"""Image environments. Importing this package registers them with gymnasium under `ragen/`.

Each class shows the state of an environment in `envs` as an RGB image, composed of tiles. The rules are in
`envs`.
"""

from gymnasium.envs.registration import register

# class of each id
_ENVIRONMENTS = {
    "ragen/FrozenLakeVisual-v0": "visual_envs.frozen_lake:FrozenLakeVisual",
    "ragen/SokobanVisual-v0": "visual_envs.sokoban:SokobanVisual",
}
ENVIRONMENT_IDS = tuple(_ENVIRONMENTS)
"""Ids of the image environments."""

for _id, _entry_point in _ENVIRONMENTS.items():
    register(id=_id, entry_point=_entry_point)
