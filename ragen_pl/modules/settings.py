"""Settings of the optimization that stand at the top of the configuration; read without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

from annotated_types import Ge
from omegaconf import DictConfig, OmegaConf

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction, NonNegative, Note


@checked
@dataclass(frozen=True, kw_only=True)
class OptimizationSettings:
    """Learning rates over iterations, and options of the optimizer; keys of the configuration itself.

    Attributes:
        learning_rate_end: Learning rate after the last iteration as a fraction of the highest, with a linear decay.
        learning_rate_warm_up: Number of first iterations over which the learning rate rises linearly.
        master_weights: Keep float32 copies of trained weights in bfloat16; false where the optimizer keeps its own.
        decay_vectors: Apply the optimizer's weight decay to norms and biases too.
    """

    learning_rate_end: Fraction = 0.03
    learning_rate_warm_up: Annotated[int, Ge(0), Note("iterations")] = 0
    master_weights: bool = True
    decay_vectors: bool = False


@checked
@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """Keys of `critic`, the critic that `algorithm.critic` chooses, without the model of its own.

    Attributes:
        lr: Learning rate of the critic; null for the policy's.
        detach: Whether the value loss leaves the trunk that it shares with the policy unchanged.
    """

    lr: NonNegative | None = None
    detach: bool = False

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield settings that need another `algorithm.critic`; see `EngineTraits`."""
        kind = OmegaConf.select(cfg, "algorithm.critic")
        if OmegaConf.select(cfg, "critic.build") is not None and kind != "own":
            yield (
                f"critic.build: algorithm.critic={kind} has no model of its own; set algorithm.critic=own"
            )
        if OmegaConf.select(cfg, "critic.detach") and kind != "shared":
            yield (
                f"critic.detach=true: algorithm.critic={kind} has no trunk in common with the policy; set false"
            )


class IterationData(Protocol):
    """DataModule as the agent's metrics need it, such as a `RolloutDataModule`."""

    metrics: Mapping[str, float]
