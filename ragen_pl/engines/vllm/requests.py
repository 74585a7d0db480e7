"""Requests for vLLM: their prompts and sampling parameters, and those that it can't answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image

from ragen_pl.engines.protocol import GenerationRequest, Prompt


def check_request(request: GenerationRequest, *, max_tokens: int) -> None:
    """Refuse a request that vLLM can't answer.

    Raises:
        ValueError: It has more than `max_tokens` with its response, or leaves out parts of its images.
    """
    length = len(request.prompt.ids) + request.max_tokens
    if length > max_tokens:
        raise ValueError(
            f"rollout.engine.max_tokens={max_tokens}: a prompt has {len(request.prompt.ids)} tokens and its "
            f"response may have {request.max_tokens}; set at least {length}"
        )
    if request.prompt.patches is not None:
        raise ValueError(
            "context.leave_out.patches: vLLM shows whole images; set context.leave_out.patches=0, or "
            "rollout/engine=transformers"
        )


def check_prompt(shown: list[int], request: GenerationRequest, *, family: str, engine: str) -> None:
    """Check that vLLM has read a prompt as the trainer does.

    Raises:
        ValueError: It has put other ids in the place of the images than the model's own processor.
    """
    if shown != request.prompt.ids.tolist():
        raise ValueError(
            f"rollout/engine={engine}: vLLM read a prompt as {len(shown)} tokens, the trainer as "
            f"{len(request.prompt.ids)}; it handles images of {family} in another way: set rollout/engine=transformers"
        )


def prompt_arguments(prompt: Prompt) -> dict[str, Any]:
    """Return vLLM's arguments for a prompt: ids, and images with one token for each."""
    if not prompt.images:
        return {"prompt_token_ids": prompt.ids.tolist()}
    images = [Image.fromarray(image) for image in prompt.images]
    return {
        "prompt_token_ids": prompt.unexpanded_ids.tolist(),
        "multi_modal_data": {"image": images},
    }


def sampling_arguments(
    request: GenerationRequest, *, ends: list[int], banned: Mapping[int, float]
) -> dict[str, Any]:
    """Return vLLM's sampling parameters for a request.

    Args:
        request: Request.
        ends: Ids that end a response.
        banned: Biases of the ids that are never sampled.
    """
    truncation = request.truncation
    kept = {}
    if truncation is not None:
        kept = {"top_p": truncation.top_p, "min_p": truncation.min_p}
        # 0 for all
        kept["top_k"] = truncation.top_k or 0
    return kept | {
        "temperature": request.temperature,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "stop_token_ids": ends,
        # the tokenizer's eos_token is among them
        "ignore_eos": True,
        "logit_bias": banned,
        "logprobs": 0,
        "detokenize": False,
    }
