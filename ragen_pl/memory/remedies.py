"""Settings that lower the memory of a run, in the order in which they should be tried."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from ragen_pl.algorithms.kl import KLEstimator
from ragen_pl.base.constraints import shown
from ragen_pl.memory.plan import Counts, MemoryPlan, plan_memory
from ragen_pl.run.strategy_rules import is_fsdp2

Overrides = dict[str, object]


@dataclass(frozen=True, slots=True)
class Step:
    """A remedy that was applied, and the plan with it and all before it."""

    overrides: tuple[str, ...]
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class _Remedy:
    """Parts of memory that it lowers, and the overrides to apply; None where there is nothing left to do."""

    lowers: frozenset[str]
    overrides: Callable[[DictConfig, MemoryPlan], Overrides | None]


def remedies(cfg: DictConfig, plan: MemoryPlan, counts: Counts | None = None) -> Iterator[Step]:
    """Yield settings that make a run need less, until it fits or there are no more.

    Each builds on those before it. One that does not help is left out.

    Args:
        cfg: Config of the run.
        plan: Its plan.
        counts: Counts that the plan was made of.
    """
    counts = Counts() if counts is None else counts
    cfg = copy.deepcopy(cfg)
    OmegaConf.set_struct(cfg, False)
    helped = True
    # a remedy may help once others have made another phase the highest
    while helped:
        helped = False
        for remedy in _REMEDIES:
            while not plan.fits and (overrides := _applicable(remedy, cfg, plan)) is not None:
                changed = copy.deepcopy(cfg)
                for key, value in overrides.items():
                    OmegaConf.update(changed, key, value, merge=False)
                better = plan_memory(changed, counts)
                if better.highest.total >= 0.99 * plan.highest.total:
                    break
                cfg, plan, helped = changed, better, True
                yield Step(tuple(_written(key, value) for key, value in overrides.items()), plan)


def _applicable(remedy: _Remedy, cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    parts = {name for name, size in plan.highest.parts.items() if size}
    return remedy.overrides(cfg, plan) if parts & remedy.lowers else None


def _written(key: str, value: object) -> str:
    """Return an override as a shell takes it."""
    if isinstance(value, dict):
        inner = ", ".join(f"{name}: {shown(item)}" for name, item in value.items())
        return f"'{key}={{{inner}}}'"
    return f"{key}={shown(value)}"


def _is_pretrained(cfg: DictConfig) -> bool:
    return OmegaConf.select(cfg, "model.build.path") is not None


def _half_precision(cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    wide = _is_pretrained(cfg) and cfg.model.build.dtype == "float32"
    return {"model.build.dtype": "bfloat16"} if wide else None


def _adapters(cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    if not _is_pretrained(cfg) or cfg.model.build.lora is not None:
        return None
    return {"model.build.lora": {"r": 16, "lora_alpha": 32}}


def _estimated_divergence(cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    estimator = OmegaConf.select(cfg, "algorithm.loss.kl.estimator")
    if estimator is None or not KLEstimator(estimator).over_vocabulary:
        return None
    return {"algorithm.loss.kl.estimator": KLEstimator(estimator).from_tokens.value}


def _checkpointed(cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    key = "update.gradient_checkpointing"
    return None if cfg["update"].gradient_checkpointing else {key: True}


def _smaller_microbatches(cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    rows, length = plan.workload.rows, plan.workload.length
    return {"update.tokens_per_microbatch": rows // 2 * length} if rows > 1 else None


def _smaller_chunks(cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    mib = cfg["update"].logits_mib
    return {"update.logits_mib": mib // 2} if mib >= 64 else None


def _shorter_forward(cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    tokens = cfg["update"].tokens_per_forward
    return {"update.tokens_per_forward": tokens // 2} if tokens > plan.workload.length else None


def _shorter_prefill(cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    tokens = OmegaConf.select(cfg, "rollout.engine.prefill_tokens")
    prompt = plan.workload.prompt
    return (
        {"rollout.engine.prefill_tokens": tokens // 4} if tokens and tokens > 4 * prompt else None
    )


def _smaller_memory_fraction(cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    """Return a `memory_fraction` for vLLM with which the rollout fits, if twice its weights in 16 bits fit into it."""
    fraction = OmegaConf.select(cfg, "rollout.engine.memory_fraction")
    if fraction is None or plan.device is None:
        return None
    size = plan.device.size
    smaller = math.floor(20 * (fraction - (plan.highest.total - size) / size)) / 20
    return (
        {"rollout.engine.memory_fraction": smaller}
        if smaller * size > 4 * plan.parameters
        else None
    )


def _eight_bits(cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    """Return an optimizer with moments in 8 bits (Dettmers et al., 2022, arXiv 2110.02861), where one is installed."""
    if not str(cfg.optimizer._target_).startswith("torch.optim.Adam"):
        return None
    for package, target in _EIGHT_BITS.items():
        if find_spec(package) is not None:
            return {"optimizer._target_": target}
    return None


def _fewer_environments(cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    episodes = plan.workload.episodes
    return {"rollout.num_envs": episodes // 2} if episodes > 1 else None


def _sharded(cfg: DictConfig, plan: MemoryPlan) -> Overrides | None:
    if plan.ranks > 1:
        return None if is_fsdp2(cfg.trainer.strategy) else {"trainer.strategy": "fsdp2"}
    return {"trainer.devices": 8, "trainer.strategy": "fsdp2"}


_STATE = frozenset({"weights", "reference", "optimizer state", "gradients", "step"})
_ACTIVATIONS = frozenset({"activations"})
_EIGHT_BITS = {"bitsandbytes": "bitsandbytes.optim.AdamW8bit", "torchao": "torchao.optim.AdamW8bit"}
_REMEDIES = (
    _Remedy(_STATE, _half_precision),
    _Remedy(frozenset({"vLLM"}), _smaller_memory_fraction),
    _Remedy(_ACTIVATIONS, _checkpointed),
    _Remedy(_ACTIVATIONS, _smaller_microbatches),
    _Remedy(_ACTIVATIONS, _shorter_forward),
    _Remedy(_ACTIVATIONS, _shorter_prefill),
    _Remedy(frozenset({"head"}), _smaller_chunks),
    _Remedy(_STATE, _adapters),
    _Remedy(frozenset({"head"}), _estimated_divergence),
    _Remedy(frozenset({"optimizer state"}), _eight_bits),
    _Remedy(frozenset({"keys and values", "head"}), _fewer_environments),
    _Remedy(_STATE, _sharded),
)
