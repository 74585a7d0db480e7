"""What each key of the configuration may be: one table, looked up by the key's full name.

`RULES` holds the constraints, `FREE_TEXT` the keys whose text is the user's own, and `OPEN` the places
where users put settings of classes of their own, which nothing here can know. The first pattern that
covers a key counts, RULES before FREE_TEXT before OPEN. A test walks over all keys of the shipped
configuration: a new one needs a line here.
"""

from __future__ import annotations

from collections.abc import Iterable

from ragen_pl.config.rules import Kind, Rule, covers
from ragen_pl.config.schema_algorithm import ALGORITHM
from ragen_pl.config.schema_diagnostics import DIAGNOSTICS, DIAGNOSTICS_TEXT
from ragen_pl.config.schema_environments import ENVIRONMENTS
from ragen_pl.config.schema_evaluation import EVALUATION, EVALUATION_TEXT
from ragen_pl.config.schema_looking import LOOKING, LOOKING_TEXT
from ragen_pl.config.schema_trainer import TRAINER

_BOOL = Rule(kind=Kind.BOOL)
_COUNT = Rule(kind=Kind.INT, minimum=1)
_COUNT_OR_ZERO = Rule(kind=Kind.INT, minimum=0)
_POSITIVE = Rule(kind=Kind.FLOAT, above=0)
_NOT_NEGATIVE = Rule(kind=Kind.FLOAT, minimum=0)
_SHARE = Rule(kind=Kind.FLOAT, minimum=0, maximum=1)
_BETA = Rule(kind=Kind.FLOAT, minimum=0, below=1)
_PROMPT_FORMATS = (
    "free_think", "no_think", "grounding", "worldmodeling", "grounding_worldmodeling",
)  # fmt: skip

_OPTIMIZER = {
    "lr": _NOT_NEGATIVE,
    "betas.*": _BETA,
    "eps": _POSITIVE,
    "weight_decay": _NOT_NEGATIVE,
}

RULES: dict[str, Rule] = {
    "seed": Rule(kind=Kind.INT, minimum=0, maximum=2**32 - 1),
    "debug": _BOOL,
    "ckpt_path": Rule(kind=Kind.PATH, also=(None, "last")),
    "experiment": Rule(kind=Kind.GROUP, also=(None,)),
    **{f"optimizer.{name}": rule for name, rule in _OPTIMIZER.items()},
    "learning_rate_end": _SHARE,
    "critic_rate": _NOT_NEGATIVE,
    # the environment and its manager
    "env.visual": _BOOL,
    "env.max_turns": _COUNT,
    "env.max_actions_per_turn": _COUNT,
    "env.format_penalty": _NOT_NEGATIVE,
    "env.invalid_ends": _BOOL,
    "env.turn_limit_bootstraps": _BOOL,
    "env.prompt_format": Rule(kind=Kind.TEXT, choices=_PROMPT_FORMATS),
    "env.timeout_s": Rule(kind=Kind.FLOAT, above=0, also=(None,)),
    **ENVIRONMENTS,
    # what is shown to the policy, and how it samples
    "context.window": Rule(kind=Kind.INT, minimum=1, also=("all",), note="the latest turns shown"),
    "context.turn_template": Rule(kind=Kind.TEXT, contains="{observation}"),
    "context.max_tokens": _COUNT,
    "context.leave_out": Rule(kind=Kind.GROUP, also=(None,)),
    "context.leave_out.patches": Rule(kind=Kind.FLOAT, minimum=0, below=1),
    "context.leave_out.turns": Rule(kind=Kind.FLOAT, minimum=0, below=1),
    "rollout.groups": _COUNT,
    "rollout.group_size": _COUNT,
    "rollout.temperature": _POSITIVE,
    "rollout.max_response_tokens": _COUNT,
    "rollout.num_envs": _COUNT,
    "rollout.engine": Rule(kind=Kind.GROUP),
    "rollout.adaptive_temperature": Rule(kind=Kind.GROUP, also=(None,)),
    "rollout.adaptive_temperature.low": _POSITIVE,
    "rollout.adaptive_temperature.high": _POSITIVE,
    "rollout.adaptive_temperature.window": _COUNT,
    "rollout.adaptive_temperature.*": Rule(kind=Kind.FLOAT),
    # the update
    "update.epochs": _COUNT,
    "update.minibatches": _COUNT,
    "update.length_buckets": _COUNT,
    "curriculum": Rule(kind=Kind.GROUP, also=(None,)),
    "curriculum.above": _SHARE,
    "curriculum.share": _SHARE,
    "curriculum.window": _COUNT,
    "curriculum.options.min_distance": _COUNT,
    "curriculum.options.min_detour": _COUNT_OR_ZERO,
    "world_model": Rule(kind=Kind.GROUP, also=(None,)),
    "world_model.grounding_weight": _NOT_NEGATIVE,
    "world_model.worldmodeling_weight": _NOT_NEGATIVE,
    "world_model.judge.floor": Rule(kind=Kind.FLOAT, above=0, maximum=1),
    "validation.episodes": _COUNT,
    "validation.held_out": _BOOL,
    "validation.blank": _BOOL,
    "validation.baselines": Rule(kind=Kind.GROUP, also=(None,)),
    "validation.baselines.*": Rule(kind=Kind.GROUP, also=(None,)),
    **ALGORITHM,
    # the model: one built from its config, or one of the user's own
    "model.build.path": Rule(kind=Kind.TEXT, note="a folder, or a name on the model hub"),
    "model.build.lora": Rule(kind=Kind.GROUP, also=(None,), note="settings of peft's LoraConfig"),
    "model.build.lora.r": _COUNT,
    "model.build.lora.lora_alpha": _POSITIVE,
    "model.build.lora.lora_dropout": _SHARE,
    "model.build.vision.mlp_ratio": _POSITIVE,
    "model.build.vision.*": _COUNT,
    **{
        f"model.build.text.{name}": _COUNT
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        )
    },
    "model.build.seed": Rule(kind=Kind.INT, minimum=0, maximum=2**32 - 1),
    "model.build.prompt_format": Rule(
        kind=Kind.TEXT, choices=_PROMPT_FORMATS, note="it follows env.prompt_format"
    ),
    "model.build.dtype": Rule(kind=Kind.TEXT, choices=("float32", "bfloat16", "float16")),
    "model.build.attn_implementation": Rule(kind=Kind.TEXT, choices=("sdpa", "eager")),
    # the warm start
    "warm_start.enabled": _BOOL,
    "warm_start.episodes": _COUNT,
    "warm_start.steps": _COUNT,
    "warm_start.batch_size": _COUNT,
    "warm_start.gamma": _SHARE,
    "warm_start.value_coefficient": _NOT_NEGATIVE,
    "warm_start.warm_up": _COUNT_OR_ZERO,
    "warm_start.checkpoint_every_n_steps": Rule(kind=Kind.INT, minimum=1, also=(None,)),
    "warm_start.learning_rate_end": _SHARE,
    "warm_start.demonstrator.noise": _SHARE,
    "warm_start.demonstrator.base": Rule(kind=Kind.TEXT, choices=("blind", "optimal")),
    **{f"warm_start.optimizer.{name}": rule for name, rule in _OPTIMIZER.items()},
    # callbacks, by the names they ship under
    "callbacks": Rule(kind=Kind.GROUP, also=(None,)),
    "callbacks.*": Rule(kind=Kind.GROUP, also=(None,)),
    "callbacks.checkpoint.auto_insert_metric_name": _BOOL,
    "callbacks.checkpoint.every_n_epochs": Rule(kind=Kind.INT, minimum=0, also=(None,)),
    "callbacks.checkpoint.every_n_train_steps": Rule(kind=Kind.INT, minimum=0, also=(None,)),
    "callbacks.checkpoint.save_last": Rule(kind=Kind.BOOL, also=("link",)),
    "callbacks.checkpoint.save_top_k": Rule(kind=Kind.INT, minimum=-1),
    "callbacks.checkpoint.save_on_train_epoch_end": _BOOL,
    "callbacks.checkpoint.save_weights_only": _BOOL,
    "callbacks.checkpoint.grace_seconds": _POSITIVE,
    "callbacks.trajectories.every_n_iterations": _COUNT,
    "callbacks.trajectories.count": _COUNT_OR_ZERO,
    "callbacks.trajectories.traces": _COUNT_OR_ZERO,
    **DIAGNOSTICS,
    "callbacks.plots.every_n_iterations": _COUNT,
    "logger": Rule(kind=Kind.GROUP, also=(None,)),
    **TRAINER,
    **EVALUATION,
    **LOOKING,
}

FREE_TEXT: tuple[str, ...] = (
    "env.name",
    "env.target",
    "algorithm.name",
    "context.system_prompt",
    "paths.root",
    "paths.run_dir",
    "warm_start.weights",
    "callbacks.checkpoint.filename",
    "callbacks.best.monitor",
    *DIAGNOSTICS_TEXT,
    "logger.experiment_name",
    "logger.tracking_uri",
    *EVALUATION_TEXT,
    *LOOKING_TEXT,
)

OPEN: tuple[str, ...] = (
    "env.kwargs.**",
    "curriculum.**",
    "world_model.**",
    "algorithm.**",
    "model.**",
    "rollout.engine.**",
    "optimizer.**",
    "validation.baselines.*.**",
    "warm_start.demonstrator.**",
    "warm_start.optimizer.**",
    "callbacks.*.**",
    "logger.**",
    "validation_sets.**",
)

# Words of Hydra's own, wherever they stand.
_EVERYWHERE: dict[str, Rule] = {
    "_target_": Rule(kind=Kind.TARGET),
    "_partial_": _BOOL,
    "_recursive_": _BOOL,
    "_convert_": Rule(kind=Kind.TEXT, choices=("none", "partial", "object", "all")),
}


def rule_for(key: str) -> Rule | None:
    """Return the rule of a key, by its full name or the first pattern that covers it."""
    word = key.rpartition(".")[2]
    if word in _EVERYWHERE:
        return _EVERYWHERE[word]
    if key in RULES:
        return RULES[key]
    return next((rule for pattern, rule in RULES.items() if covers(pattern, key)), None)


def is_free_text(key: str) -> bool:
    """Return whether a key's text is the user's own."""
    return _covered(FREE_TEXT, key)


def is_open(key: str) -> bool:
    """Return whether a key belongs to a place for settings of classes that nothing here knows."""
    return _covered(OPEN, key)


def _covered(patterns: Iterable[str], key: str) -> bool:
    return any(covers(pattern, key) for pattern in patterns)
