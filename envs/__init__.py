"""Text environments. Importing this package registers them with gymnasium under `ragen/`.

The environments are plain `gymnasium.Env` classes and do not depend on the trainer. The trainer parses
responses, applies several actions per turn, enforces the turn limit and adds the format penalty.
Image environments are in `visual_envs`. Imports are relative: the packages are installed as `ragen_pl.envs` and
`ragen_pl.visual_envs`.
"""

import sys
from importlib import import_module
from typing import Any

from gymnasium.envs.registration import register

# module and class of each id, and arguments that differ from its defaults
_ENVIRONMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ragen/FrozenLake-v0": ("frozen_lake:FrozenLake", {}),
    "ragen/FrozenLakeSlippery-v0": ("frozen_lake:FrozenLake", {"slip_probability": 2 / 3}),
    "ragen/Sokoban-v0": ("sokoban:Sokoban", {}),
    "ragen/Bandit-v0": ("bandit:Bandit", {}),
    "ragen/BanditMemory-v0": ("bandit_memory:BanditMemory", {}),
    "ragen/SupportDesk-v0": ("support_desk:SupportDesk", {}),
    "ragen/KnowledgeBase-v0": ("knowledge_base:KnowledgeBase", {}),
    "ragen/Code-v0": ("code:Code", {}),
    "ragen/Game2048-v0": ("game_2048:Game2048", {}),
    "ragen/Blackjack-v0": ("blackjack:Blackjack", {}),
    "ragen/PocketCube-v0": ("pocket_cube:PocketCube", {}),
    "ragen/Invoice-v0": ("invoice:Invoice", {}),
    "ragen/WebShop-v0": ("web_shop:WebShop", {}),
}
ENVIRONMENT_IDS = tuple(_ENVIRONMENTS)
"""Ids of the text environments."""

if __name__ == "envs":
    # the folder of the checkout by its former name: the same modules
    _package = import_module("ragen_pl.envs")
    sys.modules[__name__] = _package
else:
    for _id, (_class, _arguments) in _ENVIRONMENTS.items():
        register(id=_id, entry_point=f"{__name__}.{_class}", kwargs=_arguments)
