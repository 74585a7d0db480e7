"""Numbers that must agree between them.

What each key may be by itself is in `schema`, which parts of an algorithm go together in `pairs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from omegaconf import DictConfig, OmegaConf


def disagreements(cfg: DictConfig) -> Iterator[str]:
    """Yield one line for each pair of settings that cannot both be."""
    yield from _widths(cfg, "model.build.text", width="hidden_size", heads="num_attention_heads")
    yield from _widths(
        cfg, "model.build.text", width="num_attention_heads", heads="num_key_value_heads"
    )
    yield from _widths(cfg, "model.build.vision", width="width", heads="heads")
    model = str(_get(cfg, "model.build._target_"))
    if _get(cfg, "env.visual") and model.endswith(".build_small_lm"):
        yield "env.visual=true: the model takes no pictures; set model=small_vlm, or another world"
    reply, budget = _get(cfg, "rollout.max_reply_tokens"), _get(cfg, "context.max_tokens")
    if isinstance(reply, int) and isinstance(budget, int) and reply >= budget:
        yield (
            f"rollout.max_reply_tokens={reply}: leaves no room for a prompt in "
            f"context.max_tokens={budget}; make this one larger"
        )
    yield from _order(cfg, "algorithm.estimator", "low", "gamma_turn", "high")
    yield from _order(cfg, "rollout.adaptive_temperature", "low", "high")


def _order(cfg: DictConfig, group: str, *names: str) -> Iterator[str]:
    values = [_get(cfg, f"{group}.{name}") for name in names]
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) == len(names) and any(a > b for a, b in pairwise(numbers)):
        said = ", ".join(f"{name}={value}" for name, value in zip(names, numbers, strict=True))
        yield f"{group}: found {said}, expected {' <= '.join(names)}; change one of them"


def _widths(cfg: DictConfig, group: str, *, width: str, heads: str) -> Iterator[str]:
    whole, parts = _get(cfg, f"{group}.{width}"), _get(cfg, f"{group}.{heads}")
    if isinstance(whole, int) and isinstance(parts, int) and parts > 0 and whole % parts:
        yield f"{group}.{heads}={parts}: expected a divisor of {group}.{width}={whole}"


def _get(cfg: DictConfig, key: str) -> object:
    return OmegaConf.select(cfg, key)
