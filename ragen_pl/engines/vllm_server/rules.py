"""Traits of the engine on vLLM servers, and its refusals of a config. The module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from ragen_pl.engines.protocol import EngineMemory, EngineTraits
from ragen_pl.engines.vllm.rules import is_installed, sampling_problems

if TYPE_CHECKING:
    from ragen_pl.engines.protocol import RolloutSizes

NO_SERVER = (
    "rollout.engine.urls=[]: vllm is not installed, so the run can't start a server; python -m ragen_pl.install_vllm "
    "(docs/engines.md), or set rollout.engine.python, or rollout.engine.urls to servers"
)


class VLLMServerRules(EngineTraits):
    """Engine on vLLM servers."""

    asynchronous = True
    continuous = True

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield what servers can't run, and settings that need servers of the run's own; see `EngineTraits`."""
        engine = cfg.rollout.engine
        nodes = OmegaConf.select(cfg, "trainer.num_nodes")
        if engine.get("urls"):
            for key in ("settings", "python"):
                if engine.get(key):
                    yield (
                        f"rollout.engine.{key}: the servers in rollout.engine.urls are started already; set null, and "
                        "their arguments where they are started"
                    )
        elif not (engine.get("python") or is_installed()):
            yield NO_SERVER
        elif nodes not in (None, 1):
            yield (
                "rollout.engine.urls=[]: the run starts a server that its own machine reaches only, and "
                f"trainer.num_nodes={nodes}; start servers and give their addresses"
            )
        yield from sampling_problems(cfg)

    @classmethod
    def planned_memory(cls, settings: Mapping[str, Any], sizes: RolloutSizes) -> EngineMemory:
        """Return none: servers have memory of their own. That of a server that the run starts is not planned."""
        return EngineMemory()
