"""Loading a checkpoint's weights into the model that its run's settings describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from ragen_pl.config.errors import ConfigError
from ragen_pl.run.build import build_bundle

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

_POLICY = "policy.model."


def load_bundle(cfg: DictConfig) -> ModelBundle:
    """Return model, tokenizer and processor with the weights that `cfg.source` names, in eval mode.

    Args:
        cfg: settings as `ragen_pl.evaluation.settings.settle` makes them.

    Raises:
        ConfigError: the weights can't be read, or are another model's.
    """
    bundle = build_bundle(cfg)
    source = cfg.source.checkpoint
    if source is not None and Path(source).is_file():
        load_weights(bundle, Path(source))
    bundle.model.eval()
    return bundle


def load_weights(bundle: ModelBundle, file: Path) -> None:
    """Load the policy's weights out of a Lightning checkpoint or a run's `warm_start.pt`.

    Raises:
        ConfigError: the file is no such checkpoint, or holds another model's weights.
    """
    weights = policy_weights(file)
    own = bundle.model.state_dict()
    wrong = [
        f"{name} {tuple(weights[name].shape) if name in weights else 'missing'}, expected {tuple(value.shape)}"
        for name, value in own.items()
        if name not in weights or weights[name].shape != value.shape
    ]
    wrong += [f"{name} is not in the model" for name in weights if name not in own]
    if wrong:
        raise ConfigError(
            f"{file} holds the weights of another model ({len(wrong)} of {len(own)} differ: {wrong[0]}); "
            "leave model settings to the checkpoint's run, or give those that it was trained with"
        )
    bundle.model.load_state_dict(weights)


def policy_weights(file: Path) -> dict[str, Tensor]:
    """Return the policy's weights in a checkpoint, under the model's own names.

    Raises:
        ConfigError: the file can't be read, or holds no policy.
    """
    try:
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        state = found.get("state_dict", found.get("module", {}))
        weights = {
            name.removeprefix(_POLICY): value
            for name, value in state.items()
            if name.startswith(_POLICY)
        }
    except Exception as error:  # torch and pickle raise what they like on a file that is not theirs
        raise ConfigError(
            f"{file} can't be read as a checkpoint ({str(error).splitlines()[0]}); it is damaged or of another kind"
        ) from error
    if not weights:
        raise ConfigError(
            f"{file} holds no policy of ragen_pl; give a checkpoint that a run has written"
        )
    return weights
