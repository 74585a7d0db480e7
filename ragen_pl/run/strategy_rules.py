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


def _named(strategy: object) -> str:
    return str(strategy.get("_target_") if isinstance(strategy, DictConfig) else strategy)


class StrategyRules:
    """What a strategy of the Trainer can't run."""

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield one line for each setting that the strategy can't run; see `EngineTraits`."""
        strategy = OmegaConf.select(cfg, "trainer.strategy")
        name, key = strategy_name(strategy), f"trainer.strategy={_named(strategy)}"
        deepspeed = name.startswith("deepspeed")
        tokens = OmegaConf.select(cfg, "update.tokens_per_microbatch")
        if tokens is not None and deepspeed:
            yield (
                f"update.tokens_per_microbatch={tokens}: {_named(strategy)} accumulates a fixed number of "
                "microbatches; set null and trainer.accumulate_grad_batches, or another trainer.strategy"
            )
        # its ranks gather weights in each forward pass, and run different numbers of them in a rollout
        stage = strategy.get("stage") if isinstance(strategy, DictConfig) else None
        gathers = deepspeed and ("stage_3" in name or stage == 3)
        if gathers or (name.startswith("fsdp") and not is_fsdp2(strategy)):
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
            yield from _fsdp2_problems(cfg)


def _fsdp2_problems(cfg: DictConfig) -> Iterator[str]:
    """Yield the limits of FSDP2's sharded weights."""
    installed, precision = version("torch"), OmegaConf.select(cfg, "trainer.precision")
    if tuple(map(int, installed.split(".")[:2])) < _TORCH_OF_FSDP2:
        yield (
            f"trainer.strategy=fsdp2: needs torch {'.'.join(map(str, _TORCH_OF_FSDP2))} and found {installed}; "
            "pip install -U torch, or set trainer.strategy=ddp"
        )
    if precision in ("16-mixed", "16", 16):
        yield (
            f"trainer.precision={precision}: FSDP2 takes no scaled loss; set trainer.precision=bf16-mixed"
        )
    optimizer = str(OmegaConf.select(cfg, "optimizer._target_"))
    if optimizer.startswith(("bitsandbytes.", "ragen_pl.muon.")):
        yield (
            f"optimizer._target_={optimizer}: it can't step sharded weights; set "
            "optimizer._target_=torch.optim.AdamW or torchao.optim.AdamW8bit"
        )
    left_out = ("context.leave_out.patches", "context.leave_out.turns")
    if any(OmegaConf.select(cfg, key) for key in left_out):
        yield (
            "context.leave_out: its scores are computed on the trainer's weights, which FSDP2 shards; set "
            "context.leave_out.patches=0 context.leave_out.turns=0, or trainer.strategy=ddp"
        )
