"""LoRA adapters (Hu et al., 2021) in a loaded model, by peft: put in, switched off for a while, merged.

They are put into the model's own layers, so that it stays the class that it was and everything that
asks a model works on one with adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_lora(model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Put adapters in and freeze all other weights.

    Args:
        model: is changed.
        settings: of peft's `LoraConfig`; `target_modules` is `all-linear` unless given.

    Raises:
        ModuleNotFoundError: peft is not installed.
        TypeError: `LoraConfig` has no such setting.
        ValueError: a setting is out of range, or no layer has such a name.
    """
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "model.build.lora: peft is not installed; pip install 'ragen_pl[lora]', or set null"
        ) from error
    model.add_adapter(LoraConfig(**{"target_modules": "all-linear", **settings}))


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether there are any."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Let the model answer as it was before adapters were put in."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def merge_adapters(model: PreTrainedModel) -> None:
    """Add what the adapters say to the weights under them and take them out; nothing without adapters."""
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
