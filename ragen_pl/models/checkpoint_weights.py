"""A model's weights under the names of its checkpoints, adapters merged, for an engine that has a copy of the model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ragen_pl.models.adapters import has_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# a numbered layer and all that is before it in a name
_LAYER = re.compile(r".*?\.\d+(?=\.)")
_BYTES_OF_A_FILE = 2**31


@torch.no_grad()
def checkpoint_weights(
    model: PreTrainedModel, *, value: Callable[[str], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights that `save_pretrained` would write, adapters merged into those under them.

    Weights are those of the model where nothing has to be computed. Merged and converted ones, and those of `value`,
    exist for one layer at a time.

    Args:
        model: Model.
        value: Returns the weight of a name in the model's state, for a model whose own weights have no data; called
            once for each.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    adapted = _adapted_layers(model) if has_adapters(model) else {}
    state = {name: weight for name, weight in model.state_dict().items() if "lora_" not in name}
    state = remove_tied_weights_from_state_dict(state, model)
    for _, names in groupby(list(state), key=_layer_of):
        weights: dict[str, Tensor] = {}
        for name in names:
            layer, _, end = name.rpartition(".base_layer.")
            if layer in adapted and end == "weight":
                weights[f"{layer}.weight"] = _merged(adapted[layer], layer, value)
            else:
                merged = name.replace(".base_layer.", ".")
                weights[merged] = state[name] if value is None else value(name)
        yield from revert_weight_conversion(model, weights).items()


def write_weights(pairs: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write names and weights to safetensors files of a folder, a few at a time.

    Raises:
        OSError: They can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Tensor] = {}
    size = files = 0
    for name, weight in pairs:
        if size + weight.nbytes > _BYTES_OF_A_FILE and weights:
            _write(weights, folder / f"model-{files:05}.safetensors")
            weights, size, files = {}, 0, files + 1
        # not on a GPU until the file is full
        weights[name] = weight.contiguous().cpu()
        size += weight.nbytes
    _write(weights, folder / f"model-{files:05}.safetensors")


def _write(weights: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(weights, file)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _layer_of(name: str) -> str:
    layer = _LAYER.match(name)
    return "" if layer is None else layer.group()


def _adapted_layers(model: PreTrainedModel) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: part for name, part in model.named_modules() if isinstance(part, BaseTunerLayer)}


def _merged(layer: Any, name: str, value: Callable[[str], Tensor] | None) -> Tensor:
    """Return the weight under adapters with these merged, as `adapters.merge_adapters` computes it."""
    own = {}
    if value is not None:
        own = {
            id(weight): nn.Parameter(value(f"{name}.{end}"), requires_grad=False)
            for end, weight in layer.named_parameters()
            # a bias is yielded by itself
            if end != "base_layer.bias"
        }
    merged = copy.deepcopy(layer, memo=own)
    merged.merge()
    weight: Tensor = merged.get_base_layer().weight
    return weight.detach()
