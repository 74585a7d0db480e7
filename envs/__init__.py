"""Text environments. Importing this package registers them with gymnasium under `ragen/`.

The environments are plain `gymnasium.Env` classes and do not depend on the trainer. The trainer parses
responses, applies several actions per turn, enforces the turn limit and adds the format penalty.
Image environments are in `visual_envs`.
"""

from gymnasium.envs.registration import register

ENVIRONMENT_IDS = (
    "ragen/FrozenLake-v0",
    "ragen/FrozenLakeSlippery-v0",
    "ragen/Sokoban-v0",
    "ragen/Bandit-v0",
    "ragen/BanditMemory-v0",
    "ragen/SupportDesk-v0",
    "ragen/KnowledgeBase-v0",
    "ragen/Code-v0",
    "ragen/Game2048-v0",
    "ragen/Blackjack-v0",
    "ragen/PocketCube-v0",
    "ragen/Invoice-v0",
    "ragen/WebShop-v0",
)

register(id="ragen/FrozenLake-v0", entry_point="envs.frozen_lake:FrozenLake")
register(
    id="ragen/FrozenLakeSlippery-v0",
    entry_point="envs.frozen_lake:FrozenLake",
    kwargs={"slip_probability": 2 / 3},
)
register(id="ragen/Sokoban-v0", entry_point="envs.sokoban:Sokoban")
register(id="ragen/Bandit-v0", entry_point="envs.bandit:Bandit")
register(id="ragen/BanditMemory-v0", entry_point="envs.bandit_memory:BanditMemory")
register(id="ragen/SupportDesk-v0", entry_point="envs.support_desk:SupportDesk")
register(id="ragen/KnowledgeBase-v0", entry_point="envs.knowledge_base:KnowledgeBase")
register(id="ragen/Code-v0", entry_point="envs.code:Code")
register(id="ragen/Game2048-v0", entry_point="envs.game_2048:Game2048")
register(id="ragen/Blackjack-v0", entry_point="envs.blackjack:Blackjack")
register(id="ragen/PocketCube-v0", entry_point="envs.pocket_cube:PocketCube")
register(id="ragen/Invoice-v0", entry_point="envs.invoice:Invoice")
register(id="ragen/WebShop-v0", entry_point="envs.web_shop:WebShop")
