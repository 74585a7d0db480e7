"""Numbers that must agree between them.

What each key may be by itself is in `schema`, which parts of an algorithm go together in `pairs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from omegaconf import DictConfig, ListConfig, OmegaConf


def disagreements(cfg: DictConfig) -> Iterator[str]:
    """Yield one line for each pair of settings that cannot both be."""
    yield from _widths(cfg, "model.build.text", width="hidden_size", heads="num_attention_heads")
    yield from _widths(
        cfg, "model.build.text", width="num_attention_heads", heads="num_key_value_heads"
    )
    yield from _widths(cfg, "model.build.vision", width="width", heads="heads")
    model = str(_get(cfg, "model.build._target_"))
    if _get(cfg, "env.visual") and model.endswith(".build_small_lm"):
        yield "env.visual=true: the model takes no images; set model=small_vlm, or another environment"
    response, budget = _get(cfg, "rollout.max_response_tokens"), _get(cfg, "context.max_tokens")
    if isinstance(response, int) and isinstance(budget, int) and response >= budget:
        yield (
            f"rollout.max_response_tokens={response}: leaves no room for a prompt in "
            f"context.max_tokens={budget}; make this one larger"
        )
    yield from _order(cfg, "algorithm.estimator", "low", "gamma_turn", "high")
    yield from _order(cfg, "rollout.adaptive_temperature", "low", "high")
    yield from _temperature(cfg)
    yield from _left_out(cfg)
    yield from _ranks(cfg)


def _temperature(cfg: DictConfig) -> Iterator[str]:
    """A temperature that follows the episode starts from the base one."""
    base = _get(cfg, "rollout.temperature")
    low, high = (_get(cfg, f"rollout.adaptive_temperature.{name}") for name in ("low", "high"))
    numbers = [value for value in (low, base, high) if isinstance(value, int | float)]
    if len(numbers) == 3 and numbers != sorted(numbers):
        yield (
            f"rollout.temperature={base}: outside rollout.adaptive_temperature's low={low} and high={high}, so that it "
            "would never be used; set one between them"
        )


def _left_out(cfg: DictConfig) -> Iterator[str]:
    """What is to be left out must be there."""
    patches, turns = (_get(cfg, f"context.leave_out.{name}") for name in ("patches", "turns"))
    window = _get(cfg, "context.window")
    if patches and _get(cfg, "env.visual") is False:
        yield f"context.leave_out.patches={patches}: env.visual=false shows no images; set patches=0"
    if not isinstance(turns, int | float) or not turns:
        return
    if isinstance(window, int) and int(turns * (window - 1)) == 0:
        yield (
            f"context.leave_out.turns={turns}: of the old turns in context.window={window} that is none; set "
            "context.window=all, or turns=0"
        )
    if _get(cfg, "algorithm.masks.observations"):
        yield (
            f"context.leave_out.turns={turns}: algorithm.masks.observations=true trains on the trajectory as one "
            "undivided sequence; set turns=0"
        )


def _ranks(cfg: DictConfig) -> Iterator[str]:
    """Every rank needs a demonstration."""
    ranks, episodes = ranks_asked_for(cfg), _get(cfg, "warm_start.episodes")
    if _get(cfg, "warm_start.enabled") and isinstance(episodes, int) and episodes < ranks:
        yield f"warm_start.episodes={episodes}: fewer than the {ranks} ranks; set at least so many"


def ranks_asked_for(cfg: DictConfig) -> int:
    """Return how many processes the Trainer is to have; 1 where only the machine can tell."""
    devices, nodes = _get(cfg, "trainer.devices"), _get(cfg, "trainer.num_nodes")
    count = len(devices) if isinstance(devices, ListConfig) else devices
    if not isinstance(count, int) or count < 1 or not isinstance(nodes, int | None):
        return 1
    return count * (nodes or 1)


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
