"""A policy's model for vLLM: the files and arguments that it is built from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

CPU_CACHE_BYTES = 2**30
"""Keys and values on the CPU, where vLLM would take most of the machine's memory."""
CPU_BATCH_TOKENS = 4096
"""Tokens of a step there, which vLLM would take itself."""


def check_weights(bundle: ModelBundle, *, engine: str) -> None:
    """Refuse a model whose weights vLLM can't take over.

    Raises:
        ValueError: They are quantized.
    """
    if "quantization_config" in bundle.model.config.to_dict():
        raise ValueError(
            f"rollout/engine={engine}: quantized weights can't be copied into vLLM after each update; set "
            "rollout/engine=transformers, or load the weights in bfloat16"
        )


def model_arguments(
    bundle: ModelBundle, *, dtype: torch.dtype, max_tokens: int, on_gpu: bool
) -> dict[str, Any]:
    """Return vLLM's arguments for a model, in this process or on a server."""
    arguments: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_tokens,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "mm_processor_kwargs": dict(bundle.image_settings) or None,
    }
    if bundle.processor is not None:
        # else vLLM normalizes images itself, with constants that new weights overwrite (0.32)
        arguments |= {"limit_mm_per_prompt": {"video": 0}, "mm_device_do_normalize": False}
    if not on_gpu:
        # a seeded request can't continue a prompt that was computed in part: CPU generators have no offset (0.32)
        arguments |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_tokens, CPU_BATCH_TOKENS),
        }
    return arguments


def save_without_weights(bundle: ModelBundle, folder: str | Path) -> None:
    """Write the config, the tokenizer and the processor for vLLM to build the model from."""
    config = copy.deepcopy(bundle.model.config)
    config.architectures = [type(bundle.model).__name__]
    config.save_pretrained(folder)
    (bundle.processor or bundle.tokenizer).save_pretrained(folder)
