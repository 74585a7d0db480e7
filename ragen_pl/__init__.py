"""ragen_pl: multi-turn reinforcement learning of language and vision-language agents on PyTorch Lightning.

Importing the package is cheap: torch, transformers and lightning are loaded by the modules that need them.
"""

__version__ = "0.1.0"
