"""Traits of the in-process engine, and its refusals of a config. The module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from ragen_pl.engines.protocol import EngineTraits


class InProcessRules(EngineTraits):
    """Engine that runs a transformers model in this process, by default the trainer's own."""

    exact = True
    in_place = True
    records_kept_ids = True
    shares_forward = True
    # asynchronous is False: its weights are those that are trained

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield attention that takes no masks; see `EngineTraits`."""
        attention = OmegaConf.select(cfg, "model.build.attn_implementation")
        if isinstance(attention, DictConfig):
            attention = attention.get("text_config", attention.get("", "sdpa"))
        if attention not in (None, "auto", "sdpa", "eager"):
            yield no_masks(f"model.build.attn_implementation={attention}")


def no_masks(key: str) -> str:
    """Return the refusal of attention that takes no masks, which prompts padded on the left need."""
    return (
        f"{key}: the in-process rollout engine pads prompts, and this attention takes no masks; set sdpa, "
        "{text_config: sdpa, vision_config: flash_attention_2}, or another rollout/engine"
    )
