"""What the settings of an algorithm may be; the rest of the table is in `schema`."""

from __future__ import annotations

from ragen_pl.config.rules import Kind, Rule

_BOOL = Rule(kind=Kind.BOOL)
_COUNT = Rule(kind=Kind.INT, minimum=1)
_COUNT_OR_ZERO = Rule(kind=Kind.INT, minimum=0)
_NUMBER = Rule(kind=Kind.FLOAT)
_POSITIVE = Rule(kind=Kind.FLOAT, above=0)
_POSITIVE_OR_NONE = Rule(kind=Kind.FLOAT, above=0, also=(None,))
_NOT_NEGATIVE = Rule(kind=Kind.FLOAT, minimum=0)
_SHARE = Rule(kind=Kind.FLOAT, minimum=0, maximum=1)
_PART = Rule(kind=Kind.FLOAT, above=0, maximum=1)
_GROUP_OR_NONE = Rule(kind=Kind.GROUP, also=(None,))
_AGGREGATION = Rule(
    kind=Kind.TEXT,
    choices=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"),
)


def _choice(*choices: str) -> Rule:
    return Rule(kind=Kind.TEXT, choices=choices)


ALGORITHM: dict[str, Rule] = {
    "algorithm.critic": _choice("shared", "own", "none"),
    # rewards
    "algorithm.reward.place": _choice("turn", "end"),
    "algorithm.reward.turn_weight": _NUMBER,
    "algorithm.reward.final_weight": _NUMBER,
    "algorithm.reward.format_weight": _NOT_NEGATIVE,
    "algorithm.reward.think_amount": _NUMBER,
    "algorithm.reward.think_low": _COUNT_OR_ZERO,
    "algorithm.reward.think_high": _COUNT,
    "algorithm.reward.action_efficiency": _NOT_NEGATIVE,
    "algorithm.reward.overlong_penalty": _NOT_NEGATIVE,
    "algorithm.normalize": _GROUP_OR_NONE,
    "algorithm.normalize.clip_low": Rule(kind=Kind.FLOAT, also=(None,)),
    "algorithm.normalize.clip_high": Rule(kind=Kind.FLOAT, also=(None,)),
    "algorithm.normalize.by.scale_by_std": _BOOL,
    "algorithm.normalize.by.decay": _PART,
    "algorithm.normalize.by.starts.*": _COUNT_OR_ZERO,
    # which groups
    "algorithm.filter": _GROUP_OR_NONE,
    "algorithm.filter.rescale": _choice("none", "linear", "sqrt"),
    "algorithm.filter.reweight": _NOT_NEGATIVE,
    "algorithm.filter.resample": _COUNT_OR_ZERO,
    "algorithm.filter.keep.fraction": _PART,
    "algorithm.filter.keep.share": _PART,
    "algorithm.filter.keep.minimum": _COUNT,
    "algorithm.filter.keep.count": _COUNT,
    "algorithm.filter.keep.threshold": _NOT_NEGATIVE,
    # credit
    "algorithm.estimator.gamma*": _SHARE,
    "algorithm.estimator.lam*": _SHARE,
    "algorithm.estimator.scale_by_std": _BOOL,
    "algorithm.estimator.step_weight": _NOT_NEGATIVE,
    "algorithm.estimator.beta": _NUMBER,
    "algorithm.estimator.low": _SHARE,
    "algorithm.estimator.high": _SHARE,
    "algorithm.estimator.window": _COUNT,
    "algorithm.estimator.feedback": _NUMBER,
    # masks
    "algorithm.masks.top_entropy": _PART,
    "algorithm.masks.overlong_responses": _choice("keep", "mask"),
    "algorithm.masks.observations": _BOOL,
    "algorithm.masks.importance": _GROUP_OR_NONE,
    "algorithm.masks.importance.loss": _PART,
    "algorithm.masks.importance.advantage": _PART,
    "algorithm.masks.*.fill_empty": _BOOL,
    "algorithm.masks.loss.think": _NOT_NEGATIVE,
    # the loss
    "algorithm.loss.value_coefficient": _NOT_NEGATIVE,
    "algorithm.loss.value_clip": _POSITIVE_OR_NONE,
    "algorithm.loss.entropy_coefficient": _NUMBER,
    "algorithm.loss.entropy_target": _POSITIVE_OR_NONE,
    "algorithm.loss.whiten": _BOOL,
    "algorithm.loss.mismatch": _GROUP_OR_NONE,
    "algorithm.loss.mismatch.cap": _POSITIVE,
    "algorithm.loss.mismatch.low": Rule(kind=Kind.FLOAT, minimum=0, below=1),
    "algorithm.loss.mismatch.high": Rule(kind=Kind.FLOAT, above=1),
    "algorithm.loss.mismatch.level": _choice("token", "sequence"),
    "algorithm.loss.policy.clip_low": _PART,
    "algorithm.loss.policy.clip_high": _POSITIVE,
    "algorithm.loss.policy.dual_clip": Rule(kind=Kind.FLOAT, above=1, also=(None,)),
    "algorithm.loss.policy.aggregation": _AGGREGATION,
    "algorithm.loss.policy.constant": _POSITIVE_OR_NONE,
    "algorithm.loss.kl": _GROUP_OR_NONE,
    "algorithm.loss.kl.coefficient": _NOT_NEGATIVE,
    "algorithm.loss.kl.estimator": _choice("k1", "k2", "k3", "abs", "full"),
    "algorithm.loss.kl.aggregation": _choice(
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
    ),
    "algorithm.loss.kl.place": _choice("loss", "reward"),
    "algorithm.loss.kl.reference.decay": Rule(kind=Kind.FLOAT, minimum=0, below=1),
}
