"""Image environments. Importing this package registers them with gymnasium under `ragen/`.

Each class shows the state of an environment in `envs` as an RGB image, composed of tiles. The rules are in
`envs`.
"""

import sys
from importlib import import_module

from gymnasium.envs.registration import register

# module and class of each id
_ENVIRONMENTS = {
    "ragen/FrozenLakeVisual-v0": "frozen_lake:FrozenLakeVisual",
    "ragen/SokobanVisual-v0": "sokoban:SokobanVisual",
}
ENVIRONMENT_IDS = tuple(_ENVIRONMENTS)
"""Ids of the image environments."""

if __name__ == "visual_envs":
    # the folder of the checkout by its former name: the same modules
    _package = import_module("ragen_pl.visual_envs")
    sys.modules[__name__] = _package
else:
    for _id, _class in _ENVIRONMENTS.items():
        register(id=_id, entry_point=f"{__name__}.{_class}")
