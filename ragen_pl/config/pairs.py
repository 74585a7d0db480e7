"""Parts of an algorithm that make no sense together: refused with the reason before anything heavy is imported.

Only this project's own classes are known here, by name; classes of users check themselves when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from omegaconf import DictConfig, OmegaConf

_MISSING = object()
_IN_GROUPS = ("GroupRelative", "LeaveOneOut", "GroupInGroup")
_WITH_VALUES = ("MaskedGAE", "BilevelGAE", "AdaptiveBilevelGAE", "TurnGAE")
_WITHOUT_VALUES = (
    *_IN_GROUPS, "BatchRelative", "RawReturn", "ReinforcePlusPlus",
)  # fmt: skip


def pair_problems(cfg: DictConfig) -> Iterator[str]:
    """Yield one line for each pair of settings that has no meaning."""
    if not isinstance(cfg.get("algorithm"), DictConfig):
        return
    for check in _CHECKS:
        problem = check(cfg)
        if problem is not None:
            yield problem


def _get(cfg: DictConfig, key: str, default: object = None) -> object:
    value = OmegaConf.select(cfg, key, default=_MISSING, throw_on_missing=False)
    return default if value is _MISSING or value is None else value


def class_named(cfg: DictConfig, key: str) -> str:
    """Return the name, without its module, of the class that a part of the config is built from."""
    return str(_get(cfg, f"{key}._target_", "")).rpartition(".")[2]


def _alone(cfg: DictConfig) -> bool:
    return _get(cfg, "rollout.group_size") == 1


def _groups(cfg: DictConfig) -> str | None:
    estimator = class_named(cfg, "algorithm.estimator")
    if estimator in _IN_GROUPS and _alone(cfg):
        return (
            f"rollout.group_size=1: {estimator} compares the episodes of a group, and one alone "
            "teaches nothing; set at least 2"
        )
    return None


def _group_filter(cfg: DictConfig) -> str | None:
    watch = "callbacks.collapse"
    mitigates = "mitigate" in (_get(cfg, f"{watch}.actions") or ())  # type: ignore[operator]
    keys = ("algorithm.filter", *([f"{watch}.mitigation.group_filter"] if mitigates else []))
    for key in keys:
        chooses = class_named(cfg, f"{key}.keep") not in ("", "KeepAll")
        rescale = _get(cfg, f"{key}.rescale", "none")
        if not chooses and rescale != "none":
            return f"{key}.rescale={rescale}: all groups are kept, so that the share is 1; set none, or a rule"
        if (chooses or _get(cfg, f"{key}.reweight")) and _alone(cfg):
            return (
                f"rollout.group_size=1: {key} judges a group by how its returns differ, and one return "
                "differs from nothing; set rollout.group_size=8, or keep all groups"
            )
    return None


def _resample(cfg: DictConfig) -> str | None:
    rule, rounds = (
        class_named(cfg, "algorithm.filter.keep"),
        _get(cfg, "algorithm.filter.resample", 0),
    )
    if rounds and rule in ("", "KeepAll", "TopFraction", "TopCount", "TopMass"):
        return (
            f"algorithm.filter.resample={rounds}: {rule or 'no rule'} does not judge each group by itself, so no "
            "number of rollouts fills a batch; set resample=0, or keep AboveDeviation"
        )
    return None


def _normalizer(cfg: DictConfig) -> str | None:
    by, estimator = (
        class_named(cfg, "algorithm.normalize.by"),
        class_named(cfg, "algorithm.estimator"),
    )
    if by == "Schedule":
        stages = _get(cfg, "algorithm.normalize.by.stages", ({"_target_": ".ByGroup"},))
        grouped = any(str(one["_target_"]).endswith(".ByGroup") for one in stages)  # type: ignore[attr-defined]
    else:
        grouped = by == "ByGroup"
    if grouped and _alone(cfg):
        return (
            f"rollout.group_size=1: algorithm.normalize.by={by} would make every return 0; set "
            "rollout.group_size=8, or ByBatch"
        )
    unbounded = not any(
        isinstance(_get(cfg, f"algorithm.normalize.clip_{side}"), int | float)
        for side in ("low", "high")
    )
    standardised = (
        estimator == "BatchRelative"
        or (estimator == "GroupRelative" and _get(cfg, "algorithm.estimator.scale_by_std") is True)
    ) and not _penalised(cfg)
    if unbounded and standardised and by in ("ByGroup", "ByBatch", "Running", "Schedule"):
        same = by != "ByGroup" or estimator == "GroupRelative"
        return (
            (
                f"algorithm.normalize.by={by}: {estimator} standardises returns itself, which undoes it; set Raw, or "
                "another estimator"
            )
            if same
            else None
        )
    return None


def _penalised(cfg: DictConfig) -> bool:
    return _get(cfg, "algorithm.loss.kl.place") == "reward" and bool(
        _get(cfg, "algorithm.loss.kl.coefficient")
    )


def _values(cfg: DictConfig) -> str | None:
    name = class_named(cfg, "algorithm.estimator")
    if name in _WITH_VALUES and _get(cfg, "algorithm.critic") == "none":
        return f"algorithm.critic=none: {name} needs values; set algorithm.critic=shared (or own)"
    critic = _get(cfg, "algorithm.critic", "none")
    if name in _WITHOUT_VALUES and critic != "none":
        return f"algorithm.critic={critic}: {name} asks no critic for values; set algorithm.critic=none"
    if name in _WITHOUT_VALUES and _get(cfg, "env.turn_limit_bootstraps"):
        return (
            f"env.turn_limit_bootstraps=true: {name} has no values to bootstrap from; set false, or an algorithm "
            "with a critic"
        )
    return None


def _thoughts(cfg: DictConfig) -> str | None:
    if _get(cfg, "env.prompt_format") != "no_think":
        return None
    for which in ("loss", "advantage"):
        mask = class_named(cfg, f"algorithm.masks.{which}")
        if mask in ("think_span", "think_weighted"):
            return f"algorithm.masks.{which}={mask}: env.prompt_format=no_think has no reasoning; set another mask"
    amount = _get(cfg, "algorithm.rewards.think_length.amount")
    if amount:
        return f"algorithm.rewards.think_length.amount={amount}: env.prompt_format=no_think has no reasoning; set 0"
    return None


def _observations(cfg: DictConfig) -> str | None:
    masks = [class_named(cfg, f"algorithm.masks.{which}") for which in ("loss", "advantage")]
    labelled, window = _get(cfg, "algorithm.masks.observations"), _get(cfg, "context.window")
    if labelled and window != "all":
        return (
            f"context.window={window}: masks over text that was shown need the trajectory as one undivided "
            "sequence, else a text would be trained on once for each turn that shows it; set context.window=all"
        )
    if labelled and "all_text" not in masks:
        return (
            "algorithm.masks.observations=true: neither mask holds text that was shown; set "
            "algorithm.masks.loss._target_=ragen_pl.algorithms.masks.all_text, or observations=false"
        )
    if "all_text" in masks and not labelled:
        return (
            "algorithm.masks.observations=false: all_text would hold sampled tokens only; set "
            "algorithm.masks.observations=true"
        )
    if labelled and _get(cfg, "algorithm.masks.importance") is not None:
        return (
            "algorithm.masks.importance: it chooses among sampled tokens, and observations=true trains on text that "
            "was shown; set algorithm.masks.importance=null, or observations=false"
        )
    return None


def _weights(cfg: DictConfig) -> str | None:
    if class_named(cfg, "algorithm.masks.advantage") == "think_weighted":
        return (
            "algorithm.masks.advantage=think_weighted: a token is a step of credit or is not, it can't be part of "
            "one; weights belong into algorithm.masks.loss"
        )
    return None


def _loss(cfg: DictConfig) -> str | None:
    policy, key = class_named(cfg, "algorithm.loss.policy"), "algorithm.loss.policy"
    dual = _get(cfg, f"{key}.dual_clip")
    if policy in ("SequencePolicyLoss", "ClippedWeightLoss") and dual is not None:
        return f"{key}.dual_clip={dual}: {policy} has no dual clip; set {key}.dual_clip=null"
    how, constant = _get(cfg, f"{key}.aggregation"), _get(cfg, f"{key}.constant")
    if (how == "constant") != (constant is not None):
        return (
            f"{key}.constant={'null' if constant is None else constant} with {key}.aggregation={how}: a constant "
            f"goes with aggregation 'constant', and only with it; set {key}.constant="
            f"{'null' if constant is not None else 'the tokens a sequence stands for'}"
        )
    return None


def _entropy(cfg: DictConfig) -> str | None:
    target = _get(cfg, "algorithm.loss.entropy_target")
    if target is not None and not _get(cfg, "algorithm.loss.entropy_coefficient"):
        return (
            f"algorithm.loss.entropy_target={target}: there is no entropy bonus to steer; set "
            "algorithm.loss.entropy_coefficient=0.01"
        )
    return None


_CHECKS: tuple[Callable[[DictConfig], str | None], ...] = (
     _groups, _group_filter, _resample, _normalizer, _values, _observations, _weights, _loss, _entropy,
     _thoughts,
)  # fmt: skip
