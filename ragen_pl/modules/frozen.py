"""Checkpoints without the weights that no step changes.

Weights under LoRA adapters, frozen encoders and frozen references come from the model's own files, or from the run's
initial weights. A checkpoint holds fingerprints of them and is refused where they have changed. An encoder that a warm
start has trained is in the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from ragen_pl.base.distributed import any_over_ranks, gather_over_ranks, own_part, whole
from ragen_pl.base.finite import NonFiniteError, first_non_finite
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.reference import AveragedPolicy

FINGERPRINTS = "frozen"
"""Entry of a checkpoint: fingerprints by the module's name, such as `policy`."""

# matrices whose contents are compared, and values of each
_MATRICES, _VALUES = 32, 16_384
# of a config, which change without the weights
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")

Fingerprint = dict[str, str]


def frozen_names(module: nn.Module) -> set[str]:
    """Return the names of the weights in `module.state_dict()` that no step has changed."""
    frozen = {
        name
        for name, weight in module.named_parameters(remove_duplicate=False)
        if not weight.requires_grad
    }
    for prefix, part in module.named_modules():
        if isinstance(part, PolicyModule):
            changed = part.averaged if isinstance(part, AveragedPolicy) else part.frozen_later
            frozen -= {f"{prefix}.{name}".removeprefix(".") for name in changed}
    return frozen


def without_frozen(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a module's state that a checkpoint holds."""
    frozen = frozen_names(module)
    return {name: value for name, value in state.items() if name not in frozen}


def with_frozen(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's state completed by the module's frozen weights."""
    frozen = frozen_names(module)
    own = {name: value for name, value in module.state_dict().items() if name in frozen}
    return own | dict(state)


def fingerprint(module: nn.Module) -> Fingerprint:
    """Return digests of a model's config and of the frozen weights that checkpoints leave out, empty where it has none.

    Some values of some matrices are compared, as bfloat16: a model loaded in another type is the same.

    Args:
        module: Model, or the policy's or critic's module that has it.
    """
    held = module.frozen_later if isinstance(module, PolicyModule) else ()
    model = module.model if isinstance(module, PolicyModule | CriticModule) else module
    if model is None:
        return {}
    frozen = {
        name: weight
        for name, weight in model.named_parameters()
        if not weight.requires_grad and f"model.{name}" not in held
    }
    if not frozen:
        return {}
    shapes = {name: list(weight.shape) for name, weight in frozen.items()}
    config: Any = model.config
    digests = {
        "config": _digest(json.dumps(_stable(config.to_dict()), sort_keys=True, default=str))
    }
    digests["shapes"] = _digest(json.dumps(shapes, sort_keys=True))
    # in an order that mixes layers and kinds
    matrices = sorted((name for name in frozen if frozen[name].ndim > 1), key=_digest)
    digests["weights"] = _digest(*(_values(frozen[name]) for name in matrices[:_MATRICES]))
    return digests


def _stable(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _stable(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _VOLATILE
    }


def _values(weight: Tensor) -> bytes:
    values = whole(weight.detach()).flatten()[:_VALUES].to(torch.bfloat16).cpu()
    return values.view(torch.int16).numpy().tobytes()


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def fingerprints(module: nn.Module) -> dict[str, Fingerprint]:
    """Return the fingerprints of a training module's models by the name of their module."""
    digests: dict[str, Fingerprint] = {}
    for name, part in module.named_children():
        if isinstance(part, PolicyModule | CriticModule) and not isinstance(part, AveragedPolicy):
            digests[name] = fingerprint(part)
    return {name: values for name, values in digests.items() if values}


def frozen_problem(
    saved: Mapping[str, Fingerprint], present: Mapping[str, Fingerprint]
) -> str | None:
    """Return one line on frozen weights that differ from a checkpoint's, None where all agree.

    Args:
        saved: Fingerprints of a checkpoint.
        present: Fingerprints of the module that it is loaded into.
    """
    for name, digests in saved.items():
        own = present.get(name, {})
        changed = next((key for key, digest in digests.items() if own.get(key) != digest), None)
        if own and changed is not None:
            return (
                f"the {name}'s frozen weights are not those of the checkpoint: their {changed} changed; give "
                + (
                    "the run's warm_start.pt, model.build.path and algorithm.loss.kl.reference.path as they were"
                    if name == "reference"
                    else "model.build.path as it was"
                )
            )
    return None


class SavesTrainedWeights(pl.LightningModule):
    """A module whose checkpoints leave out frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self._fingerprints: dict[str, Fingerprint] | None = None

    @property
    def fingerprints(self) -> dict[str, Fingerprint]:
        """Fingerprints of the weights that checkpoints leave out; cached, since these weights do not change."""
        if self._fingerprints is None:
            self._fingerprints = fingerprints(self)
        return self._fingerprints

    def setup(self, stage: str) -> None:
        """Take the fingerprints, for weights may be sharded or rounded later."""
        _ = self.fingerprints

    def check_weights(self) -> None:
        """Check that the trained weights are finite. All ranks must call it.

        Raises:
            NonFiniteError: One is not, on any rank.
        """
        frozen = frozen_names(self)
        found = first_non_finite(
            {
                name: own_part(weight.detach())
                for name, weight in self.named_parameters()
                if name not in frozen
            }
        )
        if any_over_ranks(found is not None):
            name = next(name for name in gather_over_ranks(found) if name is not None)
            raise NonFiniteError(
                f"the weights are not finite, first {name}: they are not saved, and what was saved before stays; "
                "resume from there with a lower learning rate, or with trainer.gradient_clip_val"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out frozen weights.

        Raises:
            NonFiniteError: A weight is not finite, and nothing is to be written.
        """
        self.check_weights()
        checkpoint["state_dict"] = without_frozen(self, checkpoint["state_dict"])
        checkpoint[FINGERPRINTS] = self.fingerprints

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Complete the checkpoint's state by the module's frozen weights.

        Raises:
            ValueError: They are not those of the checkpoint.
        """
        problem = frozen_problem(checkpoint.get(FINGERPRINTS, {}), self.fingerprints)
        if problem is not None:
            raise ValueError(problem)
        checkpoint["state_dict"] = with_frozen(self, checkpoint["state_dict"])
