"""Text environments. Importing this package registers them with gymnasium under `ragen/`.

The environments are plain `gymnasium.Env` classes and do not depend on the trainer. The trainer parses
responses, applies several actions per turn, enforces the turn limit and adds the format penalty.
Image environments are in `visual_envs`.
"""

from typing import Any

from gymnasium.envs.registration import register

# class of each id, and arguments that differ from its defaults
_ENVIRONMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ragen/FrozenLake-v0": ("envs.frozen_lake:FrozenLake", {}),
    "ragen/FrozenLakeSlippery-v0": ("envs.frozen_lake:FrozenLake", {"slip_probability": 2 / 3}),
    "ragen/Sokoban-v0": ("envs.sokoban:Sokoban", {}),
    "ragen/Bandit-v0": ("envs.bandit:Bandit", {}),
    "ragen/BanditMemory-v0": ("envs.bandit_memory:BanditMemory", {}),
    "ragen/SupportDesk-v0": ("envs.support_desk:SupportDesk", {}),
    "ragen/KnowledgeBase-v0": ("envs.knowledge_base:KnowledgeBase", {}),
    "ragen/Code-v0": ("envs.code:Code", {}),
    "ragen/Game2048-v0": ("envs.game_2048:Game2048", {}),
    "ragen/Blackjack-v0": ("envs.blackjack:Blackjack", {}),
    "ragen/PocketCube-v0": ("envs.pocket_cube:PocketCube", {}),
    "ragen/Invoice-v0": ("envs.invoice:Invoice", {}),
    "ragen/WebShop-v0": ("envs.web_shop:WebShop", {}),
}
ENVIRONMENT_IDS = tuple(_ENVIRONMENTS)
"""Ids of the text environments."""

for _id, (_entry_point, _arguments) in _ENVIRONMENTS.items():
    register(id=_id, entry_point=_entry_point, kwargs=_arguments)
