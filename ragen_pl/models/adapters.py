"""Trained weights of a loaded model; LoRA adapters (Hu et al., 2021) by peft, switched off and merged.

They are added to the model's own layers. The model keeps its class, and all code works with and without adapters.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ragen_pl.models.merging import (
    adapted_layers,
    check_merging,
    has_adapters,
    merged_layer,
    plain_names,
)
from ragen_pl.models.settings import NO_PEFT, lora_problem
from ragen_pl.models.vision_parts import VisionParts, weights_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel

# entry of the settings of adapters, which peft does not save
_BASE_CHANGED = "base_changed"
# in a name, what adapters put between a layer and its weights
_UNDER = re.compile(r"(\.base_layer)+(?=\.)")
# values of a weight that are compared
_VALUES = 4096


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
        ValueError: A setting is out of range, no layer has such a name, or the adapters can't be merged.
    """
    try:
        from peft import LoraConfig
        from peft.tuners.tuners_utils import cast_adapter_dtype
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(NO_PEFT) from error
    if problem := lora_problem(settings):
        raise ValueError(problem)
    try:
        config = LoraConfig(**{"target_modules": "all-linear", **settings})
    except ValueError as error:
        raise ValueError(f"{_place(settings)}: {error}") from error
    config.exclude_modules = _combined_exclusions(config.exclude_modules, excluded)
    names, before = set(model.state_dict()), _some_values(model)
    with warnings.catch_warnings():
        # refused below with a message of our own
        warnings.filterwarnings("ignore", message=".*a tied layer is part of the adapter")
        if not settings.keys() & {"rank_pattern", "alpha_pattern"}:
            # peft's own patterns for fused experts
            warnings.filterwarnings("ignore", message=".*_pattern keys did not match")
        try:
            model.add_adapter(config)
        # peft raises errors of many types for settings that do not fit the layers
        except Exception as error:
            reason = str(error).partition("\n")[0].split(". ")[0]
            if not isinstance(error, ValueError):
                reason = f"peft can't make them ({type(error).__name__}: {reason})"
            if excluded is not None:
                reason += "; layers of the image encoder need model.build.freeze_vision=false"
            targets = settings.get("target_modules")
            place = (
                _place(settings)
                if targets is None
                else f"model.build.lora.target_modules={targets}"
            )
            raise ValueError(f"{place}: {reason}") from error
    # added in the model's dtype
    for name in model.peft_config:
        cast_adapter_dtype(model, name)
    if any("lora_" in name for end in _ends(model) for name, _ in end.named_parameters()):
        raise ValueError(
            "model.build.lora.target_modules: adapters on the embeddings or the head can't be merged where the two "
            "share weights; leave them out"
        )
    if plain_names(model) != names:
        raise ValueError(
            f"{_place(settings)}: its adapters change which layers the model has, so the merged weights would not fit "
            "it; leave such settings out"
        )
    vars(_settings(model))[_BASE_CHANGED] = _base_changed(model, before)
    check_merging(model, place=_place(settings))


def _place(settings: Mapping[str, Any]) -> str:
    given = ", ".join(f"{key}: {value}" for key, value in settings.items())
    return f"model.build.lora={{{given}}}"


def _some_values(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return some values of each weight that has data, by its name without adapters."""
    return {
        _UNDER.sub("", name): _sampled(weight)
        for name, weight in model.named_parameters()
        if not weight.is_meta
    }


def _sampled(weight: Tensor) -> Tensor:
    return weight.detach().flatten()[:: max(1, weight.numel() // _VALUES)].clone()


def _base_changed(model: PreTrainedModel, before: Mapping[str, Tensor]) -> bool:
    """Return whether weights of a model are others than before its adapters were added."""
    now = _some_values(model)
    return any(not torch.equal(now[name], values) for name, values in before.items())


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


def only_adapters_are_trained(model: PreTrainedModel) -> bool:
    """Return whether the model has adapters, and no other weight of it is trained."""
    return has_adapters(model) and all(
        "lora_" in name for name, weight in model.named_parameters() if weight.requires_grad
    )


def base_is_changed(model: PreTrainedModel) -> bool:
    """Return whether the weights under the adapters were changed when these were made, as PiSSA and OLoRA do.

    The model without such adapters is not the model that was loaded.
    """
    return any(vars(settings).get(_BASE_CHANGED, False) for settings in model.peft_config.values())


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
    from peft.tuners.lora import ParamWrapper

    if base_is_changed(model):
        return "the adapters' initial values have changed the weights under them"
    settings = _settings(model)
    for name, layer in adapted_layers(model).items():
        scale = settings.lora_alpha / (settings.r**0.5 if settings.use_rslora else settings.r)
        trained = {end for end, weight in layer.named_parameters() if weight.requires_grad}
        (adapter,) = layer.active_adapters
        served = {f"lora_{part}.{adapter}.weight" for part in "AB"}
        if trained != served or isinstance(layer, ParamWrapper):
            return f"{name} has other adapters than two matrices of a linear layer"
        if layer.scaling[adapter] != scale or layer.r[adapter] != settings.r:
            return f"{name} has a rank or scale of its own"
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
    """Run the model without its adapters. Frozen ones stay frozen."""
    adapters = [weight for name, weight in model.named_parameters() if "lora_" in name]
    frozen = [weight for weight in adapters if not weight.requires_grad]
    model.disable_adapters()
    try:
        yield
    finally:
        # peft lets all of them be trained
        model.enable_adapters()
        for weight in frozen:
            weight.requires_grad_(False)


def merge_adapters(model: PreTrainedModel) -> None:
    """Add the adapters to the weights under them and remove them; do nothing without adapters.

    The weights are those of `checkpoint_weights`.
    """
    plain: dict[int, Module] = {}
    for name, layer in adapted_layers(model).items():
        if id(layer) not in plain:
            plain[id(layer)] = merged_layer(layer, name)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, plain[id(layer)])
    if has_adapters(model):
        model._hf_peft_config_loaded = False
        del model.peft_config
