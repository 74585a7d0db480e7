"""Trained weights of a loaded model; LoRA adapters (Hu et al., 2021) by peft, switched off and merged.

They are added to the model's own layers. The model keeps its class, and all code works with and without adapters.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from safetensors import SafetensorError
from safetensors.torch import save_file

from ragen_pl.constraints import Count, Fraction, Positive
from ragen_pl.models.settings import NO_PEFT
from ragen_pl.models.vision_parts import VisionParts, weights_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel


class LoraSettings(TypedDict, total=False):
    """Settings of peft's `LoraConfig` that are checked early; it has others."""

    r: Count
    lora_alpha: Positive
    lora_dropout: Fraction


def choose_trained_weights(
    model: PreTrainedModel,
    *,
    lora: Mapping[str, Any] | None = None,
    freeze_vision: bool | None = None,
    freeze_projector: bool | None = None,
    shows_images: bool = True,
) -> None:
    """Freeze the weights that are not trained, and add adapters.

    Args:
        model: Model, changed in place.
        lora: Settings of peft's `LoraConfig` to train adapters; None trains the weights.
        freeze_vision: Whether the image encoder is left unchanged; None: with adapters, or without images.
        freeze_projector: Whether the projector is left unchanged; None: as for the encoder. It gets no adapters, but is
            trained itself.
        shows_images: Whether the environment shows images. Weights that get no gradients would stop DDP, and take
            memory of the optimizer.

    Raises:
        ModuleNotFoundError: peft is not installed.
        TypeError: `LoraConfig` has no such setting.
        ValueError: The model has no such part, a setting is out of range, or no layer has such a name.
    """
    parts = VisionParts.of(model)
    for key, frozen, pattern in (
        ("freeze_vision", freeze_vision, parts.encoder),
        ("freeze_projector", freeze_projector, parts.projector),
    ):
        if frozen is not None and not weights_of(model, pattern):
            raise ValueError(
                f"model.build.{key}={str(frozen).lower()}: {type(model).__name__} has no such part; set null"
            )
    unchanged = lora is not None or not shows_images
    freeze_vision = unchanged if freeze_vision is None else freeze_vision
    freeze_projector = unchanged if freeze_projector is None else freeze_projector
    if lora is not None:
        excluded = [parts.projector, parts.encoder if freeze_vision else None]
        add_lora(model, lora, excluded="|".join(filter(None, excluded)) or None)
    elif freeze_vision:
        for weight in weights_of(model, parts.encoder):
            weight.requires_grad_(False)
    for weight in weights_of(model, parts.projector):
        weight.requires_grad_(not freeze_projector)


def add_lora(
    model: PreTrainedModel, settings: Mapping[str, Any], *, excluded: str | None = None
) -> None:
    """Add adapters in float32 and freeze all other weights.

    Args:
        model: Model, changed in place.
        settings: Settings of peft's `LoraConfig`; `target_modules` is `all-linear` by default.
        excluded: Regular expression of modules that get no adapter, besides `exclude_modules`.

    Raises:
        ModuleNotFoundError: peft is not installed.
        TypeError: `LoraConfig` has no such setting.
        ValueError: A setting is out of range, or no layer has such a name.
    """
    try:
        from peft import LoraConfig
        from peft.tuners.tuners_utils import cast_adapter_dtype
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(NO_PEFT) from error
    config = LoraConfig(**{"target_modules": "all-linear", **settings})
    config.exclude_modules = _combined_exclusions(config.exclude_modules, excluded)
    if config.modules_to_save or config.bias != "none":
        raise ValueError(
            "model.build.lora: modules_to_save and bias train weights that are no adapters and can neither be "
            "switched off nor merged; leave them out"
        )
    with warnings.catch_warnings():
        # refused below with a message of our own
        warnings.filterwarnings("ignore", message=".*a tied layer is part of the adapter")
        try:
            model.add_adapter(config)
        except ValueError as error:
            targets, reason = settings.get("target_modules"), str(error).split(". ")[0]
            raise ValueError(
                f"model.build.lora.target_modules={targets}: {reason}; layers of the image encoder need "
                "model.build.freeze_vision=false"
            ) from error
    # added in the model's dtype
    for name in model.peft_config:
        cast_adapter_dtype(model, name)
    if any("lora_" in name for end in _ends(model) for name, _ in end.named_parameters()):
        raise ValueError(
            "model.build.lora.target_modules: adapters on the embeddings or the head can't be merged where the two "
            "share weights; leave them out"
        )


def _combined_exclusions(
    modules: list[str] | str | None, excluded: str | None
) -> list[str] | str | None:
    """Combine the modules of `exclude_modules` with those that a regular expression matches."""
    if excluded is None or not modules:
        return excluded or modules
    if not isinstance(modules, str):
        modules = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, modules))})"
    return f"{modules}|{excluded}"


def _ends(model: PreTrainedModel) -> list[Module]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether the model has adapters."""
    return bool(model._hf_peft_config_loaded)


def only_adapters_are_trained(model: PreTrainedModel) -> bool:
    """Return whether the model has adapters, and no other weight of it is trained."""
    return has_adapters(model) and all(
        "lora_" in name for name, weight in model.named_parameters() if weight.requires_grad
    )


def largest_rank(model: PreTrainedModel) -> int:
    """Return the largest rank of the model's adapters."""
    settings = _settings(model)
    return int(max([settings.r, *settings.rank_pattern.values()]))


def unservable_adapters(model: PreTrainedModel) -> str | None:
    """Return why a server with the model's frozen weights can't add its adapters to them; None where it can."""
    if not has_adapters(model):
        return "the policy has no adapters"
    if not only_adapters_are_trained(model):
        return "other weights than those of adapters are trained too"
    if _settings(model).use_dora:
        return "DoRA scales the weights under its adapters"
    return None


def adapter_weights(
    model: PreTrainedModel, *, value: Callable[[str], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names in a peft checkpoint and the weights of the model's adapters.

    Args:
        model: Model with adapters.
        value: Returns the weight of a name in the model's state, for a model whose own weights have no data; called
            once for each.
    """
    (adapter,) = model.peft_config
    for name, weight in model.state_dict().items():
        if "lora_" in name:
            saved = f"base_model.model.{name.replace(f'.{adapter}.', '.')}"
            yield saved, weight if value is None else value(name)


def write_adapters(
    model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]], folder: Path
) -> None:
    """Write a peft checkpoint.

    Args:
        model: Model with adapters, for their settings.
        weights: What `adapter_weights` yields.
        folder: Folder, which is made.

    Raises:
        OSError: They can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved = {name: weight.contiguous().cpu() for name, weight in weights}
    try:
        save_file(saved, folder / "adapter_model.safetensors")
    except SafetensorError as error:
        raise OSError(str(error)) from error
    _settings(model).save_pretrained(folder)


def _settings(model: PreTrainedModel) -> Any:
    """Return the `LoraConfig` of the model's adapters."""
    (settings,) = model.peft_config.values()
    return settings


def adapters_are_new(model: PreTrainedModel) -> bool:
    """Return whether the adapters still add nothing: one matrix of each starts at 0, or has no data yet."""
    second = (weight for name, weight in model.named_parameters() if "lora_B" in name)
    return all(weight.is_meta or not bool(weight.any()) for weight in second)


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
