"""Types of the models' settings, which the config checks.

Those of the small models are not in `ragen_pl.models.small_vlm`: an exported folder contains its modules, which must
work without this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import product
from typing import Annotated, Any, Literal, TypedDict

from annotated_types import Interval
from omegaconf import DictConfig, OmegaConf

from ragen_pl.base.constraints import Count, Fraction, Positive

Attention = Literal["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"]
"""Implementations of attention in transformers."""
# each is a Python object before it has weights
Layers = Annotated[int, Interval(ge=1, le=10_000)]


class VisionSettings(TypedDict, total=False):
    """Settings of the image encoder.

    Attributes:
        patch_size: Side of a patch in pixels.
        width: Size of the features.
        depth: Number of timm blocks.
        heads: Number of attention heads.
        mlp_ratio: Hidden size of a block's MLP as a multiple of `width`.
        max_cells: Number of patches along a side that images may have.
    """

    patch_size: Count
    width: Count
    depth: Layers
    heads: Count
    mlp_ratio: Positive
    max_cells: Count


class DecoderSettings(TypedDict, total=False):
    """Settings of the decoder that are checked early; others are those of its transformers config.

    Attributes:
        hidden_size: Size of the hidden states.
        intermediate_size: Hidden size of a layer's MLP.
        num_hidden_layers: Number of layers.
        num_attention_heads: Number of attention heads.
        num_key_value_heads: Number of heads of keys and values.
        max_position_embeddings: Longest sequence.
    """

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    num_key_value_heads: Count
    # the rotary embedding computes positions in float32, exact up to here
    max_position_embeddings: Annotated[int, Interval(ge=1, le=2**24)]


class LoraSettings(TypedDict, total=False):
    """Settings of peft's `LoraConfig` that are checked early; it has others."""

    r: Count
    lora_alpha: Positive
    lora_dropout: Fraction


# sizes, each with the setting that divides it
_DIVISORS = (
    ("text.hidden_size", "text.num_attention_heads"),
    ("text.num_attention_heads", "text.num_key_value_heads"),
    ("vision.width", "vision.heads"),
)
# packages any of which an implementation needs, and the name of the first one for pip
_PACKAGES = {
    "flash_attention_2": (("flash_attn", "kernels"), "flash-attn"),
    "flash_attention_3": (("kernels", "flash_attn_interface"), "kernels"),
}
NO_PEFT = "model.build.lora: peft is not installed; pip install 'ragen_pl[lora]', or set null"
_SCALED = ("16-mixed", "16")
# precisions of the Trainer in which float32 weights are computed on in 16 bits
_AUTOCAST = ("bf16-mixed", "bf16", *_SCALED)


def lora_problem(lora: Mapping[str, Any]) -> str | None:
    """Return one line on settings of adapters that train something else than adapters; None if there are none."""
    kind = lora.get("peft_type") or "LORA"
    if kind != "LORA":
        return f"model.build.lora.peft_type={kind}: adapters are LoRA's; leave it out"
    for key in ("modules_to_save", "bias", "trainable_token_indices"):
        value = lora.get(key)
        if value and value != "none":
            return (
                f"model.build.lora.{key}={value}: modules_to_save and bias train weights that are no adapters, as "
                "trainable_token_indices does, and can neither be switched off nor merged; leave it out"
            )
    return None


class ModelRules:
    """Requirements of a model on the rest of a config."""

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield one line for each setting that does not fit the model; see `EngineTraits`."""
        size, sizes = OmegaConf.select(cfg, "model.size"), OmegaConf.select(cfg, "model.sizes")
        if sizes is not None and size not in sizes:
            yield f"model.size={size}: expected one of {', '.join(map(str, sizes))}"
        build = OmegaConf.select(cfg, "model.build") or {}
        if OmegaConf.select(cfg, "algorithm") is not None:
            yield from _training_problems(cfg, build)
        if build.get("lora") is not None and find_spec("peft") is None:
            yield NO_PEFT
        yield from _attention_problems(cfg, build)
        for model, (size, divisor) in product(("model.build", "critic.build"), _DIVISORS):
            whole, part = (OmegaConf.select(cfg, f"{model}.{key}") for key in (size, divisor))
            if whole is not None and part is not None and whole % part:
                yield f"{model}.{divisor}={part}: expected a divisor of {model}.{size}={whole}"


def _training_problems(cfg: DictConfig, build: Mapping[str, Any]) -> Iterator[str]:
    lora, precision = build.get("lora"), str(OmegaConf.select(cfg, "trainer.precision"))
    # gradients in float16 underflow without a scaled loss, which needs trained weights in float32
    if build.get("dtype") == "float16" and lora is None:
        yield (
            "model.build.dtype=float16: the gradients of float16 weights underflow; set model.build.dtype=bfloat16, or "
            "model.build.dtype=float32 trainer.precision=16-mixed"
        )
    elif build.get("dtype") == "float16" and build.get("freeze_projector") is False:
        yield (
            "model.build.freeze_projector=false: the gradients of its float16 weights underflow; set null, or "
            "model.build.dtype=bfloat16"
        )
    elif build.get("dtype") == "float16" and precision not in _SCALED:
        yield (
            f"model.build.dtype=float16: gradients through it underflow with trainer.precision={precision}; set "
            "trainer.precision=16-mixed, or model.build.dtype=bfloat16"
        )
    clip_norm = OmegaConf.select(cfg, "algorithm.loss.kl.clip_norm")
    if clip_norm is not None and precision in _SCALED:
        yield (
            f"algorithm.loss.kl.clip_norm={clip_norm}: its second backward pass takes no scaled loss, as "
            f"trainer.precision={precision} needs; set algorithm.loss.kl.clip_norm=null, or "
            "trainer.precision=bf16-mixed"
        )
    if lora is not None and (dropout := lora.get("lora_dropout")):
        yield (
            f"model.build.lora.lora_dropout={dropout}: an update with dropout would be compared with old log-probs "
            "without; set lora_dropout=0.0"
        )
    if lora is not None and (problem := lora_problem(lora)):
        yield problem
    reference = str(OmegaConf.select(cfg, "algorithm.loss.kl.reference._target_"))
    if lora is None and reference.endswith(".AdaptersOff"):
        yield (
            "algorithm.loss.kl.reference=AdaptersOff: model.build.lora=null has no adapters to switch off; set "
            "model.build.lora, or use FrozenCopy"
        )


def _attention_problems(cfg: DictConfig, build: Mapping[str, Any]) -> Iterator[str]:
    """Yield where flash attention is not installed, not on a GPU or not in 16 bits."""
    attention = build.get("attn_implementation")
    parts = attention.values() if isinstance(attention, Mapping) else [attention]
    key, flash = f"model.build.attn_implementation={attention}", _PACKAGES.keys() & set(parts)
    for part in flash:
        packages, name = _PACKAGES[part]
        if not any(map(find_spec, packages)):
            yield f"{key}: {part} needs the package {packages[0]}; install it (pip install {name}), or set sdpa"
    if not flash:
        return
    place, precision = f"{key}: flash attention", str(OmegaConf.select(cfg, "trainer.precision"))
    if "cpu" in (OmegaConf.select(cfg, "trainer.accelerator"), OmegaConf.select(cfg, "device")):
        yield f"{place} needs a GPU; set model.build.attn_implementation=sdpa"
    if build.get("dtype") == "float32" and precision not in _AUTOCAST:
        yield (
            f"{place} computes in 16 bits, and model.build.dtype=float32; set model.build.dtype=bfloat16, or "
            "trainer.precision=bf16-mixed for a training run"
        )
