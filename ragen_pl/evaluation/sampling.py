"""Number of episodes of an evaluation from each initial state, and their decoding; read without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from omegaconf import DictConfig

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, Note


@checked
@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Keys of an evaluation's configuration itself.

    Attributes:
        samples: Episodes from each initial state.
        greedy: Take the most probable tokens; None does where `samples` is 1.
        pass_at: The k of pass@k; None for the powers of two up to `samples`, none for one sample.
    """

    samples: Annotated[int, Ge(1), Note("episodes from each initial state")] = 1
    greedy: bool | None = None
    pass_at: Sequence[Count] | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy."""
        return self.samples == 1 if self.greedy is None else self.greedy

    @property
    def pass_ks(self) -> list[int]:
        """The k of pass@k in order."""
        if self.pass_at is None:
            return [] if self.samples == 1 else [2**n for n in range(self.samples.bit_length())]
        return sorted(set(self.pass_at))

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield settings that need another number of samples; see `EngineTraits`."""
        samples = cfg.get("samples", 1)
        if cfg.get("greedy") and samples > 1:
            yield (
                f"samples={samples} greedy=true: greedy responses are all alike; set greedy=false or samples=1"
            )
        wrong = [k for k in cfg.get("pass_at") or () if k > samples]
        if wrong:
            yield (
                f"pass_at has {wrong[0]} and samples={samples}; set samples={max(wrong)} or leave it out"
            )
