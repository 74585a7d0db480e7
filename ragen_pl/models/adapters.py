"""LoRA adapters (Hu et al., 2021) in a loaded model, by peft: added, switched off for a while, merged.

They are added to the model's own layers. The model keeps its class, and all code works with and without adapters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict

from ragen_pl.constraints import Count, Fraction, Positive

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel


class LoraSettings(TypedDict, total=False):
    """Settings of peft's `LoraConfig` that are checked early; it has others."""

    r: Count
    lora_alpha: Positive
    lora_dropout: Fraction


def add_lora(model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Add adapters and freeze all other weights.

    Args:
        model: Model, changed in place.
        settings: Settings of peft's `LoraConfig`; `target_modules` is `all-linear` by default.

    Raises:
        ModuleNotFoundError: peft is not installed.
        TypeError: `LoraConfig` has no such setting.
        ValueError: A setting is out of range, or no layer has such a name.
    """
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "model.build.lora: peft is not installed; pip install 'ragen_pl[lora]', or set null"
        ) from error
    config = LoraConfig(**{"target_modules": "all-linear", **settings})
    if config.modules_to_save or config.bias != "none":
        raise ValueError(
            "model.build.lora: modules_to_save and bias train weights that are no adapters and can neither be "
            "switched off nor merged; leave them out"
        )
    with warnings.catch_warnings():
        # refused below with a message of our own
        warnings.filterwarnings("ignore", message=".*a tied layer is part of the adapter")
        model.add_adapter(config)
    if any("lora_" in name for end in _ends(model) for name, _ in end.named_parameters()):
        raise ValueError(
            "model.build.lora.target_modules: adapters on the embeddings or the head can't be merged where the two "
            "share weights; leave them out"
        )


def _ends(model: PreTrainedModel) -> list[Module]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether the model has adapters."""
    return bool(model._hf_peft_config_loaded)


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Run the model without its adapters."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def merge_adapters(model: PreTrainedModel) -> None:
    """Add the adapters to the weights under them and remove them; do nothing without adapters."""
    if not has_adapters(model):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.get_base_layer())
    model._hf_peft_config_loaded = False
    del model.peft_config
