"""What the keys of `conf/evaluate.yaml` and `conf/export.yaml` may be; the rest of the table is in `schema`.

A validation set's settings are an environment's, by the same rules.
"""

from __future__ import annotations

from ragen_pl.config.rules import Kind, Rule
from ragen_pl.config.schema_environments import ENVIRONMENTS

_BOOL = Rule(kind=Kind.BOOL)
_COUNT = Rule(kind=Kind.INT, minimum=1)
_GROUP = Rule(kind=Kind.GROUP, also=(None,))

EVALUATION: dict[str, Rule] = {
    "samples": Rule(kind=Kind.INT, minimum=1, note="episodes from each start"),
    "greedy": Rule(kind=Kind.BOOL, also=(None,)),
    "pass_at": Rule(
        kind=Kind.TEXT, choices=(), contains="[", also=(None,), note="a list such as [1,4,8]"
    ),
    "pass_at.*": _COUNT,
    "device": Rule(kind=Kind.TEXT, choices=("cpu", "cuda", "auto")),
    "trajectories": _BOOL,
    "traces": Rule(kind=Kind.INT, minimum=0, note="episodes of each validation set"),
    "mlflow": _BOOL,
    "overwrite": _BOOL,
    "validation.warm_start": _BOOL,
    "source.held_out": Rule(kind=Kind.INT, minimum=0),
    "source.untrained": _BOOL,
    "validation_sets": _GROUP,
    "validation_sets.*": _GROUP,
    "validation_sets.*.episodes": _COUNT,
    "validation_sets.*.max_turns": _COUNT,
    "validation_sets.*.max_actions_per_turn": _COUNT,
    "validation_sets.*.invalid_ends": _BOOL,
    "validation_sets.*.options": _GROUP,
    "validation_sets.*.options.min_distance": _COUNT,
    "validation_sets.*.options.max_distance": _COUNT,
    "validation_sets.*.options.min_detour": Rule(kind=Kind.INT, minimum=0),
    "validation_sets.*.kwargs": _GROUP,
    **{
        f"validation_sets.*.{name.removeprefix('env.')}": rule
        for name, rule in ENVIRONMENTS.items()
    },
}

EVALUATION_TEXT: tuple[str, ...] = (
    "ckpt",
    "to",
    "source.checkpoint",
    "source.run",
    "source.environment",
    "validation_sets.*.key",
    "validation_sets.*.target",
)
