"""Traits of an engine on vLLM, and its refusals of a config. The module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ragen_pl.base.constraints import Count, problem
from ragen_pl.engines.protocol import EngineTraits

NOT_INSTALLED = (
    "rollout/engine=vllm: vllm is not installed; pip install 'ragen_pl[vllm]' (docs/engines.md), or set "
    "rollout/engine=transformers"
)
# it refuses higher ones, and raises lower ones to the limit without a word (0.32)
_TEMPERATURES = (0.01, 2.0)
# arguments by which vLLM splits a model or its requests over processes of its own
_OWN_PROCESSES = ("pipeline_parallel_size", "data_parallel_size")


class VLLMRules(EngineTraits):
    """Engine on vLLM in the trainer's process."""

    continuous = True
    # asynchronous is False: vLLM uses the global generators

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield what vLLM in the trainer's process can't run; see `EngineTraits`."""
        if not is_installed():
            yield NOT_INSTALLED
        for key in _OWN_PROCESSES:
            parts = OmegaConf.select(cfg, f"rollout.engine.settings.{key}")
            if parts not in (None, 1):
                yield (
                    f"rollout.engine.settings.{key}={parts}: ranks share an engine by tensor_parallel_size, and groups "
                    "of them have engines of their own; leave it out, or set rollout/engine=vllm_server"
                )
        parts = OmegaConf.select(cfg, "rollout.engine.settings.tensor_parallel_size")
        if parts is not None and (refusal := split_problem(parts, ranks=ranks)) is not None:
            yield refusal
        yield from sampling_problems(cfg)


def is_installed() -> bool:
    """Return whether vLLM is installed."""
    return find_spec("vllm") is not None


def split_problem(parts: Any, *, ranks: int | None) -> str | None:
    """Return the problem with the number of ranks that hold a model together, None if there is none.

    Args:
        parts: `tensor_parallel_size`.
        ranks: Number of ranks of the run; None if it is not known.
    """
    key = f"rollout.engine.settings.tensor_parallel_size={parts}"
    if (expected := problem(Count, parts)) is not None:
        return f"{key}: {expected}"
    if ranks is None or ranks % parts == 0:
        return None
    return (
        f"{key}: so many ranks share an engine, expected a divisor of their number, {ranks}; set it to 1, other "
        "trainer.devices, or rollout/engine=vllm_server"
    )


def sampling_problems(cfg: DictConfig) -> Iterator[str]:
    """Yield what vLLM can't sample, in the trainer's process or on a server."""
    lowest, highest = _TEMPERATURES
    for key in (
        "rollout.temperature",
        "rollout.adaptive_temperature.low",
        "rollout.adaptive_temperature.high",
    ):
        value = OmegaConf.select(cfg, key)
        if isinstance(value, int | float) and not lowest <= value <= highest:
            yield (
                f"{key}={value}: vLLM samples at temperatures from {lowest} to {highest:g}; set one of these, or "
                "rollout/engine=transformers"
            )
    if str(OmegaConf.select(cfg, "model.build._target_")).endswith(".build_small_vlm"):
        yield (
            "model=small_vlm: vLLM does not know this architecture; set rollout/engine=transformers, or a pretrained "
            "model"
        )
    left_out = ("context.leave_out.patches", "context.leave_out.turns")
    if any(OmegaConf.select(cfg, key) for key in left_out):
        yield (
            "context.leave_out: vLLM shows whole prompts; set context.leave_out.patches=0 context.leave_out.turns=0, "
            "or rollout/engine=transformers"
        )
