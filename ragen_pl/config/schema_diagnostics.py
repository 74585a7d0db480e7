"""What the settings of the diagnostics and of the collapse monitor may be; the rest of the table is in `schema`."""

from __future__ import annotations

from ragen_pl.config.rules import Kind, Rule

_COUNT = Rule(kind=Kind.INT, minimum=1)
_COUNT_OR_ZERO = Rule(kind=Kind.INT, minimum=0)
_GROUP = Rule(kind=Kind.GROUP, also=(None,))
_LIMIT = Rule(kind=Kind.FLOAT, also=(None,))
_NOT_NEGATIVE = Rule(kind=Kind.FLOAT, minimum=0, also=(None,))

_DIAGNOSTICS = {
    "probe_every_n_iterations": _COUNT,
    "prompts": _COUNT_OR_ZERO,
    "first": _COUNT,
    "window": Rule(kind=Kind.INT, minimum=2),
}
_COLLAPSE = {
    "actions.*": Rule(kind=Kind.TEXT, choices=("warn", "stop", "rollback", "mitigate")),
    "grace": _COUNT_OR_ZERO,
    "cooldown": _COUNT_OR_ZERO,
    "good_every_n_iterations": _COUNT,
    "max_rollbacks": _COUNT_OR_ZERO,
    "alarms": _GROUP,
    "alarms.*": _GROUP,
    "alarms.*.below": _LIMIT,
    "alarms.*.above": _LIMIT,
    "alarms.*.patience": _COUNT,
    "alarms.*.calm_above": Rule(kind=Kind.FLOAT, minimum=0, maximum=1, also=(None,)),
    "mitigation": _GROUP,
    "mitigation.clip_high": Rule(kind=Kind.FLOAT, above=0, also=(None,)),
    "mitigation.kl_coefficient": _NOT_NEGATIVE,
    "mitigation.learning_rate_share": Rule(kind=Kind.FLOAT, above=0, maximum=1, also=(None,)),
    "mitigation.entropy_target": _NOT_NEGATIVE,
    "mitigation.entropy_rate": Rule(kind=Kind.FLOAT, minimum=0),
    "mitigation.entropy_most": Rule(kind=Kind.FLOAT, minimum=0),
    "mitigation.group_filter": _GROUP,
}

DIAGNOSTICS: dict[str, Rule] = {
    **{f"callbacks.diagnostics.{name}": rule for name, rule in _DIAGNOSTICS.items()},
    **{f"callbacks.collapse.{name}": rule for name, rule in _COLLAPSE.items()},
}
DIAGNOSTICS_TEXT: tuple[str, ...] = ("callbacks.collapse.alarms.*.reading",)
