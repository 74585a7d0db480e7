"""Dropout and noise of a pretrained model, which are off in RL.

The ratio of an update compares log-probs of the train mode with those of the rollout, the old log-probs and the
reference, which are computed in eval mode. A model's own dropout would move it away from 1 at unchanged weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ragen_pl.base.instances import instances

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# such as attention_dropout, resid_pdrop, layerdrop, drop_path_rate, router_jitter_noise
_RANDOM = re.compile(r"dropout|pdrop|layer_?drop|drop_(path|prob)|jitter|noise")
# heads that no language model has
_UNUSED = re.compile(r"classif|summary")


def switch_dropout_off(config: PretrainedConfig) -> dict[str, float]:
    """Set dropout and noise of a config and of its parts to 0, and return the values that they had by key."""
    found: dict[str, float] = {}
    for prefix, part in _parts(config):
        for name, value in list(vars(part).items()):
            if _is_on(name, value):
                setattr(part, name, 0.0)
                found[prefix + name] = value
    return found


def switch_modules_off(model: nn.Module) -> dict[str, float]:
    """Set dropout and noise that no config names to 0 in a model's modules, and return their values by class."""
    found: dict[str, float] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            rate = name == "p" and isinstance(module, _DropoutNd)
            if _is_on("dropout" if rate else name, value):
                setattr(module, name, 0.0)
                found[f"{type(module).__name__}.{name}"] = value
    return found


def has_dropout(model: nn.Module) -> bool:
    """Return whether a model with a config computes something random in train mode."""
    config: Any = model.config
    settings = [item for _, part in _parts(config) for item in vars(part).items()]
    rates = [module.p for module in instances(model.modules(), _DropoutNd)]
    return any(rate > 0 for rate in rates) or any(_is_on(name, value) for name, value in settings)


def _parts(config: PretrainedConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a config and the configs in it, each with the prefix of its keys."""
    from transformers import PretrainedConfig

    yield prefix, config
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from _parts(value, f"{prefix}{name}.")


def _is_on(name: str, value: object) -> bool:
    return (
        isinstance(value, float | int)
        and not isinstance(value, bool)
        and value > 0
        and _RANDOM.search(name) is not None
        and _UNUSED.search(name) is None
    )
