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
    "rollout.engine.urls=[]: vllm is not installed, so the run can't start a server; pip install 'ragen_pl[vllm]' "
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
        elif engine.get("router_url"):
            yield (
                "rollout.engine.router_url: a router stands before servers of the user's; give their addresses in "
                "rollout.engine.urls, or set router_url=null"
            )
        elif engine.get("transfer", "folder") != "folder":
            yield (
                f"rollout.engine.transfer={engine.transfer}: the server that the run starts sees the folder of the "
                "weights; set transfer=folder, or rollout.engine.urls"
            )
        elif not (engine.get("python") or is_installed()):
            yield NO_SERVER
        elif nodes not in (None, 1):
            yield (
                "rollout.engine.urls=[]: the run starts a server that its own machine reaches only, and "
                f"trainer.num_nodes={nodes}; start servers and give their addresses"
            )
        if engine.get("serve_address") and engine.get("transfer") not in ("pull", "adapters"):
            yield (
                f"rollout.engine.serve_address={engine.serve_address}: weights are served with transfer=pull or "
                "adapters only; set one of them, or serve_address=null"
            )
        if engine.get("transfer") == "adapters":
            yield from _adapter_problems(cfg)
        yield from sampling_problems(cfg)

    @classmethod
    def planned_memory(cls, settings: Mapping[str, Any], sizes: RolloutSizes) -> EngineMemory:
        """Return none: servers have memory of their own. That of a server that the run starts is not planned."""
        return EngineMemory()


def _adapter_problems(cfg: DictConfig) -> Iterator[str]:
    """Yield why the policy's adapters can't travel alone."""
    # commands of a run get the model's settings from it
    if OmegaConf.select(cfg, "model.build") is None:
        return
    lora = OmegaConf.select(cfg, "model.build.lora")
    if lora is None:
        yield (
            "rollout.engine.transfer=adapters: model.build.lora=null has no adapters; set model.build.lora, or "
            "transfer=folder or pull"
        )
        return
    for key in ("use_dora", "target_parameters", "rank_pattern", "alpha_pattern", "lora_bias"):
        if lora.get(key):
            yield (
                f"rollout.engine.transfer=adapters: vLLM serves no adapters of model.build.lora.{key}={lora[key]}; "
                "leave it out, or set transfer=folder or pull, which merge them"
            )
    if OmegaConf.select(cfg, "model.build.freeze_projector") is False:
        yield (
            "rollout.engine.transfer=adapters: model.build.freeze_projector=false trains weights that are no adapters; "
            "set true, or transfer=folder or pull"
        )
