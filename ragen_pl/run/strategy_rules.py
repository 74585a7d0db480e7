"""Limits of the Trainer's strategies. The module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from omegaconf import DictConfig, OmegaConf

# gradients of weights that some ranks have not used
_TORCH_OF_FSDP2 = (2, 13)


def strategy_name(strategy: object) -> str:
    """Return the name of a strategy, or of its class, in small letters."""
    return _named(strategy).rpartition(".")[2].lower()


def is_fsdp2(strategy: object) -> bool:
    """Return whether `trainer.strategy` is FSDP2."""
    return strategy_name(strategy).startswith("fsdp2")


def shard_size(strategy: object) -> int | None:
    """Return the number of ranks that share a copy of the state under FSDP2; None for all."""
    size = strategy.get("shard_size") if isinstance(strategy, DictConfig) else None
    return size if isinstance(size, int) else None


def _named(strategy: object) -> str:
    return str(strategy.get("_target_") if isinstance(strategy, DictConfig) else strategy)


class StrategyRules:
    """Settings that a strategy of the Trainer can't run."""

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield one line for each setting that the strategy can't run; see `EngineTraits`."""
        strategy = OmegaConf.select(cfg, "trainer.strategy")
        name, key = strategy_name(strategy), f"trainer.strategy={_named(strategy)}"
        if name.startswith("deepspeed"):
            yield (
                f"{key}: DeepSpeed asks for the size of a batch before there is a rollout, and clips and accumulates "
                "by itself; set trainer.strategy=fsdp2, which shards the same state"
            )
        # its ranks gather weights in each forward pass, and run different numbers of them in a rollout
        if name.startswith("fsdp") and not is_fsdp2(strategy):
            yield (
                f"{key}: its ranks would wait for each other in a rollout, where they sample different numbers of "
                "tokens; set trainer.strategy=fsdp2, which gathers the weights once a rollout"
            )
        if name == "modelparallelstrategy":
            yield (
                f"{key}: it shards layers in ways that this trainer's modules do not describe, and writes folders for "
                "checkpoints; set trainer.strategy=fsdp2"
            )
        if is_fsdp2(strategy):
            yield from _fsdp2_problems(cfg, ranks=ranks)
        rollout, longest = (
            OmegaConf.select(cfg, f"trainer.{limit}")
            for limit in ("rollout_timeout_s", "timeout_s")
        )
        if rollout is not None and longest is not None and rollout > longest:
            yield (
                f"trainer.rollout_timeout_s={rollout:g}: expected at most trainer.timeout_s={longest:g}, the limit of "
                "the process group; raise that one"
            )


def _fsdp2_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
    """Yield the limits of FSDP2's sharded weights."""
    installed, precision = version("torch"), OmegaConf.select(cfg, "trainer.precision")
    if tuple(map(int, installed.split(".")[:2])) < _TORCH_OF_FSDP2:
        yield (
            f"trainer.strategy=fsdp2: needs torch {'.'.join(map(str, _TORCH_OF_FSDP2))} and found {installed}; "
            "pip install -U torch, or set trainer.strategy=ddp"
        )
    size = shard_size(OmegaConf.select(cfg, "trainer.strategy"))
    if size is not None and ranks is not None and ranks > 1 and ranks % size:
        yield (
            f"trainer.strategy.shard_size={size}: expected a divisor of the {ranks} ranks; set the number of devices "
            "of a machine"
        )
    if precision in ("16-mixed", "16", 16):
        yield (
            f"trainer.precision={precision}: FSDP2 takes no scaled loss; set trainer.precision=bf16-mixed"
        )
    nodes = ["optimizer"]
    if OmegaConf.select(cfg, "warm_start.enabled"):
        nodes.append("warm_start.optimizer")
    for node in nodes:
        optimizer = str(OmegaConf.select(cfg, f"{node}._target_"))
        if optimizer.startswith("bitsandbytes."):
            yield (
                f"{node}._target_={optimizer}: it can't step sharded weights; set {node}._target_=torch.optim.AdamW or "
                "torchao.optim.AdamW8bit"
            )
    clip_norm = OmegaConf.select(cfg, "algorithm.loss.kl.clip_norm")
    if clip_norm is not None:
        yield (
            f"algorithm.loss.kl.clip_norm={clip_norm}: its second backward pass needs whole weights, which FSDP2 "
            "shards; set algorithm.loss.kl.clip_norm=null, or trainer.strategy=ddp"
        )
    if cfg.get("opponents"):
        yield (
            "opponents: a copy of the policy samples with their weights, which FSDP2 shards; leave opponents out, or "
            "set trainer.strategy=ddp"
        )
    left_out = ("context.leave_out.patches", "context.leave_out.turns")
    if any(OmegaConf.select(cfg, key) for key in left_out):
        yield (
            "context.leave_out: its scores are computed on the trainer's weights, which FSDP2 shards; set "
            "context.leave_out.patches=0 context.leave_out.turns=0, or trainer.strategy=ddp"
        )
