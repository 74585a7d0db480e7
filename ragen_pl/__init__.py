"""ragen_pl: multi-turn reinforcement learning of language and vision-language agents on PyTorch Lightning.

Importing the package is cheap: torch, transformers and lightning are loaded by the modules that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragen_pl.base import former_names

if TYPE_CHECKING:
    from ragen_pl.api import train

__all__ = ["train"]
__version__ = "0.1.0"
former_names.install()


def __getattr__(name: str) -> Any:
    if name in __all__:
        from ragen_pl import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
