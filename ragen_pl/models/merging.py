"""Adapters of peft merged into the layers under them, by peft's own code, in float32; and a check of the merge.

Each kind of adapter has a merge of its own in peft. A kind that can't be merged into exactly what its layers compute is
refused before training: an engine with a copy of the weights, and an export, would have another policy.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ragen_pl.base.instances import instances

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
# of a layer's output, the part by which a merged layer may differ: float32 rounds sums of a million terms to less
_TOLERANCE = 1e-3
_PROBES = 4


@runtime_checkable
class Unloads(Protocol):
    """Layer of peft with its own way to be merged and removed."""

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Return the layer under it."""


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether the model has adapters."""
    return bool(model._hf_peft_config_loaded)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the outermost layers of peft in a model by their names; a layer that stands twice has two."""
    # a model has none where nothing has imported it
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers: dict[str, Any] = {}
    for name, part in model.named_modules(remove_duplicate=False):
        wraps = isinstance(part, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if wraps and layer_around(name, layers) is None:
            layers[name] = part
    return layers


def layer_around(name: str, layers: Mapping[str, Any]) -> str | None:
    """Return the name of the layer that the weight or module `name` belongs to; None if it is in none of them."""
    parts = name.split(".")
    return next(
        (layer for end in range(1, len(parts)) if (layer := ".".join(parts[:end])) in layers),
        None,
    )


def plain_names(model: nn.Module) -> set[str]:
    """Return the names of a model's weights without its adapters."""
    layers = adapted_layers(model)
    names = {name for name in model.state_dict() if layer_around(name, layers) is None}
    for name, layer in layers.items():
        names |= {f"{name}.{end}" for end in _weights_under(layer)}
    return names


@torch.no_grad()
def merged_layer(
    layer: Any, name: str = "", *, value: Callable[[str], Tensor] | None = None
) -> nn.Module:
    """Return a copy of a layer without its adapters, merged into its weights.

    Merged in float32, weights are rounded once to the type of those under the adapters.

    Args:
        layer: One of `adapted_layers`, left as it is.
        name: Its name in the model.
        value: Returns the weight of a name in the model's state, for a layer whose own weights have no data; called
            once for each.
    """
    under = _weights_under(layer)
    merged = _merge(_in_float32(layer, name, value))
    for end, weight in (*merged.named_parameters(), *merged.named_buffers()):
        if end in under and under[end].dtype != weight.dtype:
            weight.data = weight.data.to(under[end].dtype)
            _log_rounding(under[end].dtype)
    return merged


@cache
def _log_rounding(dtype: torch.dtype) -> None:
    """Log once in a run that merged adapters are rounded."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        name, part = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps / 2
        log.info(
            f"adapters are merged in float32, and the sum is rounded to {name}: a change of a weight by less than "
            f"{part:.2%} of it may be lost there; rollout.engine.transfer=adapters and adapters=true of an export hand "
            "over adapters as they are, and model.build.dtype=float32 rounds nothing"
        )


def _weights_under(layer: Any) -> dict[str, Tensor]:
    """Return the weights under the adapters of a layer, by their names in the layer without adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer.original_module
    return dict(base.state_dict())


def _in_float32(
    layer: Any, name: str = "", value: Callable[[str], Tensor] | None = None
) -> nn.Module:
    """Return a copy of a layer with its floating-point weights in float32; see `merged_layer` for the arguments."""
    saved = layer.state_dict().keys()
    weights: Iterable[tuple[str, Tensor]] = (*layer.named_parameters(), *layer.named_buffers())
    copies: dict[int, Any] = {}
    for end, weight in weights:
        if end not in saved:
            continue
        present = weight.detach() if value is None else value(f"{name}.{end}")
        dtype = torch.float32 if present.is_floating_point() else present.dtype
        own = present.to(dtype, copy=True)
        is_parameter = isinstance(weight, nn.Parameter)
        copies[id(weight)] = (
            nn.Parameter(own, requires_grad=weight.requires_grad) if is_parameter else own
        )
    copied: nn.Module = copy.deepcopy(layer, memo=copies)
    return copied


def _merge(layer: Any) -> nn.Module:
    """Merge a layer's adapters into its weights, in place, and return what is under them."""
    if isinstance(layer, Unloads):
        plain = layer.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    else:
        layer.merge()
        plain = layer.get_base_layer()
    return plain.requires_grad_(False)


@torch.no_grad()
def check_merging(model: PreTrainedModel, *, place: str = "model.build") -> None:
    """Check that every trained weight is part of what an engine or an export gets.

    One layer of each kind is merged with random adapters: the merged layer has to compute what the layer computes, and
    each trained weight has to change it.

    Args:
        model: Model; nothing is checked where its weights have no data.
        place: First part of the errors.

    Raises:
        ValueError: A trained weight changes nothing there, or adapters can't be merged.
    """
    layers = adapted_layers(model)
    state = model.state_dict().keys()
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.requires_grad:
            names.setdefault(id(weight), []).append(name)
    for own in names.values():
        if not any(name in state or layer_around(name, layers) is not None for name in own):
            raise ValueError(
                f"{place}: {own[0]} is trained, but is no weight of a checkpoint; an engine with a copy of the "
                "weights, and an export, would lack it"
            )
    for name, layer in _one_of_each_kind(layers):
        problem = _problem(layer)
        if problem is not None:
            raise ValueError(
                f"{place}: {type(layer).__name__} on {name} {problem}; an engine with a copy of the weights, and an "
                "export, would have another policy; choose another kind of adapter"
            )


def _one_of_each_kind(layers: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the smallest layer of each kind: of equal types and names of weights."""
    kinds: dict[tuple[Any, ...], tuple[int, str, Any]] = {}
    for name, layer in layers.items():
        weights = dict(layer.named_parameters())
        if any(weight.is_meta for weight in weights.values()):
            continue
        kind = (
            tuple(type(part) for part in layer.modules()),
            tuple((end, weight.requires_grad) for end, weight in weights.items()),
        )
        size = sum(weight.numel() for weight in weights.values())
        if kind not in kinds or size < kinds[kind][0]:
            kinds[kind] = (size, name, layer)
    for _, name, layer in kinds.values():
        yield name, layer


def _problem(layer: Any) -> str | None:
    """Return how the merge of a layer fails, None where it doesn't."""
    layer = _in_float32(layer)
    # adapters that start at 0 would hide others; the same numbers in every run
    generator = torch.Generator().manual_seed(0)
    trained = [name for name, weight in layer.named_parameters() if weight.requires_grad]
    _disturb(layer, trained, generator)
    try:
        merged = _merge(copy.deepcopy(layer))
    # each kind of adapter has its own errors
    except Exception as error:
        return f"can't be merged ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    problem = _difference(layer, merged, generator)
    if problem is not None:
        return problem
    for name in trained:
        changed = copy.deepcopy(layer)
        _disturb(changed, [name], generator)
        if _same(_merge(changed), merged):
            return f"trains {name}, which changes no merged weight"
    return None


def _disturb(layer: nn.Module, names: Iterable[str], generator: torch.Generator) -> None:
    for name in names:
        weight = layer.get_parameter(name)
        noise = torch.randn(weight.shape, generator=generator)
        weight.add_(0.1 * noise.to(weight.device, weight.dtype))


def _same(one: nn.Module, other: nn.Module) -> bool:
    weights = other.state_dict()
    return all(torch.equal(weight, weights[name]) for name, weight in one.state_dict().items())


def _difference(layer: Any, merged: nn.Module, generator: torch.Generator) -> str | None:
    """Return how a layer and the merged one differ on random inputs, None where they agree.

    A layer with other inputs than one tensor is not compared.
    """
    inputs = _inputs(merged, generator)
    if inputs is None:
        return None
    weight = next(merged.parameters())
    inputs = inputs.to(weight.device)
    for part in instances(layer.modules(), nn.Dropout):
        part.p = 0.0
    expected = merged(inputs)
    before = {name: weight.clone() for name, weight in _weights_under(layer).items()}
    # as in rollouts, then as in updates
    for training in (False, True):
        computed = layer.train(training)(inputs)
        if float((computed - expected).norm()) > _TOLERANCE * float(expected.norm()):
            return "computes something else than the merged layer"
    if not all(torch.equal(weight, before[name]) for name, weight in _weights_under(layer).items()):
        return "changes the weights under it when it is used"
    return None


def _inputs(layer: nn.Module, generator: torch.Generator) -> Tensor | None:
    """Return random inputs of a layer; None for one that takes something else than one tensor."""
    if isinstance(layer, nn.Embedding):
        return torch.arange(layer.num_embeddings)
    if isinstance(layer, nn.Linear):
        return torch.randn(_PROBES, layer.in_features, generator=generator)
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        shape = (_PROBES, layer.in_channels, *layer.kernel_size)
        return torch.randn(shape, generator=generator)
    return None
