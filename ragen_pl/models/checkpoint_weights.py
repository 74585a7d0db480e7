"""A model's weights under the names of its checkpoints, adapters merged, for an engine that has a copy of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ragen_pl.models.merging import adapted_layers, layer_around, merged_layer

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
    exist for one layer at a time. Adapters of any kind that peft merges are merged, see `ragen_pl.models.merging`.

    Args:
        model: Model.
        value: Returns the weight of a name in the model's state, for a model whose own weights have no data; called
            once for each.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    layers = adapted_layers(model)
    state = model.state_dict()
    around = {name: layer_around(name, layers) for name in state}
    plain = {name: weight for name, weight in state.items() if around[name] is None}
    plain = remove_tied_weights_from_state_dict(plain, model)
    yielded = [name for name in state if name in plain or around[name] is not None]
    merged: set[str] = set()
    for _, names in groupby(yielded, key=_layer_of):
        weights: dict[str, Tensor] = {}
        for name in names:
            layer = around[name]
            if layer is None:
                weights[name] = plain[name] if value is None else value(name)
            elif layer not in merged:
                merged.add(layer)
                own = merged_layer(layers[layer], layer, value=value).state_dict()
                weights |= {f"{layer}.{end}": weight for end, weight in own.items()}
        yield from revert_weight_conversion(model, weights).items()


def weights_for_engine(
    model: PreTrainedModel, *, adapters: bool, value: Callable[[str], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield what an engine loads: `checkpoint_weights`, or those of the adapters alone.

    Args:
        model: Model.
        adapters: Whether the engine loads adapters, and has the weights under them.
        value: See `checkpoint_weights`.
    """
    if not adapters:
        return checkpoint_weights(model, value=value)
    from ragen_pl.models.adapters import adapter_weights

    return adapter_weights(model, value=value)


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
