"""Rules on the contexts of a run. The module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

_NOTHING_LEFT_OUT = "context.leave_out.patches=0 context.leave_out.turns=0"


class ContextRules:
    """Limits of prompts, and of leaving parts of them out."""

    @staticmethod
    def config_problems(cfg: DictConfig, *, ranks: int | None) -> Iterator[str]:
        """Yield one line for each setting that does not fit the context; see `EngineTraits`."""

        def get(key: str) -> Any:
            return OmegaConf.select(cfg, key)

        response, budget = get("rollout.max_response_tokens"), get("context.max_tokens")
        if response is not None and budget is not None and response >= budget:
            yield (
                f"rollout.max_response_tokens={response}: leaves no room for a prompt in context.max_tokens={budget}; "
                "make this one larger"
            )
        patches, turns = get("context.leave_out.patches"), get("context.leave_out.turns")
        window = get("context.window")
        if patches and get("env.visual") is False:
            yield f"context.leave_out.patches={patches}: env.visual=false shows no images; set patches=0"
        if turns and isinstance(window, int) and int(turns * (window - 1)) == 0:
            yield (
                f"context.leave_out.turns={turns}: of the old turns in context.window={window} that is none; set "
                "context.window=all, or turns=0"
            )
        if get("context.compaction") is not None and (window != "all" or patches or turns):
            yield cut_problem(window)
        if (patches or turns) and get("rollout.iterations_ahead"):
            yield (
                "rollout.iterations_ahead=1: the scores of context.leave_out are computed on the weights that are "
                f"trained; set {_NOTHING_LEFT_OUT}, or rollout.iterations_ahead=0"
            )
        if (patches or turns) and get("env.prompt_format") == "native":
            yield (
                f"env.prompt_format=native: no part of its prompts is left out; set {_NOTHING_LEFT_OUT}, or "
                "env.prompt_format=free_think"
            )


def cut_problem(window: object) -> str:
    """Return the problem of summaries where prompts lose turns or parts without one."""
    return (
        f"context.compaction with context.window={window}: a window drops turns without a summary; set "
        "context.window=all without context.leave_out"
    )
