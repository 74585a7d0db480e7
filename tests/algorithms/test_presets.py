"""Presets differ from each other, and every setting changes its metric and the weights."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from ragen_pl.assembly.build import build_bundle
from ragen_pl.config import ConfigError, config_dir

PRESETS = sorted(file.stem for file in (config_dir() / "algorithm").glob("*.yaml"))
TEACHER = "algorithm.loss.kl.reference.path"
ALGORITHMS = "ragen_pl.algorithms"
KEEP = f"algorithm.filter.keep._target_={ALGORITHMS}.group_filter"
MASK = f"algorithm.masks.loss._target_={ALGORITHMS}.masks"
CREDIT = f"algorithm.masks.advantage._target_={ALGORITHMS}.masks"
HELD = f"algorithm.loss.kl.mask._target_={ALGORITHMS}.masks"
LOSS = f"algorithm.loss.policy._target_={ALGORITHMS}.ratio_losses"
ESTIMATOR = f"algorithm.estimator._target_={ALGORITHMS}.advantages"
BY = f"algorithm.normalize.by._target_={ALGORITHMS}.normalization"
MISMATCH = f"+algorithm.loss.mismatch._target_={ALGORITHMS}.mismatch"
NO_SCALE = "+algorithm.normalize.by.scale_by_std=false"

# (algorithm and what else it takes, the switch, the metric that changes)
SWITCHES = [
    # filters
    ("starpo", f"{KEEP}.TopFraction +algorithm.filter.keep.fraction=0.5", "episodes_trained"),
    ("starpo", f"{KEEP}.TopCount +algorithm.filter.keep.count=1", "episodes_trained"),
    ("starpo", f"{KEEP}.TopMass +algorithm.filter.keep.fraction=0.3", "episodes_trained"),
    ("starpo", f"{KEEP}.AboveDeviation", "episodes_trained"),
    ("starpo_s algorithm.filter.keep.fraction=0.5", "algorithm.filter.keep.minimum=3", "episodes_trained"),
    ("starpo_s", "algorithm.filter.rescale=linear", "advantage"),
    ("starpo_s", "algorithm.filter.rescale=sqrt", "advantage"),
    ("starpo", "algorithm.filter.reweight=1.0", "advantage"),
    ("dapo", "algorithm.filter.resample=0", "attempts"),
    ("dapo", "algorithm.filter.keep.threshold=4.0", "episodes_trained"),
    # masks
    ("starpo", f"{MASK}.action_span", "trained"),
    ("starpo", f"{MASK}.think_span", "trained"),
    ("starpo", f"{MASK}.no_special", "trained"),
    ("starpo", f"{MASK}.think_weighted", "weight"),
    ("starpo " + f"{MASK}.think_weighted", "+algorithm.masks.loss.think=0.1", "weight"),
    ("starpo", f"{CREDIT}.action_span", "credited"),
    ("starpo algorithm.estimator.lam=0.9", f"{CREDIT}.until_action", "credited"),
    ("starpo " + f"{CREDIT}.action_span", "+algorithm.masks.advantage.fill_empty=true", None),
    ("starpo", "algorithm.masks.top_entropy=0.2", "trained"),
    ("starpo", "algorithm.masks.overlong_responses=mask", "trained"),
    ("starpo", f"{HELD}.sampled", "held"),
    # rewards
    ("starpo", "algorithm.rewards.placement.place=end", "reward"),
    ("starpo", "algorithm.rewards.weights.turn=0.5", "return"),
    ("starpo", "algorithm.rewards.weights.final=2.0", "return"),
    ("starpo", "algorithm.rewards.weights.format=3.0", "return"),
    ("starpo", "algorithm.rewards.think_length.amount=0.5", "return"),
    ("starpo algorithm.rewards.think_length.amount=0.5", "algorithm.rewards.think_length.high=4", "return"),
    ("starpo algorithm.rewards.think_length.amount=0.5", "algorithm.rewards.think_length.low=1", "return"),
    ("starpo", "algorithm.rewards.action_efficiency.penalty=0.5", "return"),
    ("starpo", "algorithm.rewards.overlong.penalty=0.5", "return"),
    # normalization
    ("starpo", f"{BY}.ByGroup", "target"),
    ("starpo " + f"{BY}.ByGroup", NO_SCALE, "target"),
    ("starpo", f"{BY}.ByBatch", "target"),
    ("starpo " + f"{BY}.ByBatch", NO_SCALE, "target"),
    ("starpo", f"{BY}.Running", "target"),
    ("starpo", "algorithm.normalize.clip_low=-1.0", "target"),
    ("starpo", "algorithm.normalize.clip_high=1.0", "target"),
    ("arpo", "algorithm.loss.whiten=true", "spread"),
    # credit
    ("starpo", "algorithm.estimator.gamma=0.9", "target"),
    ("starpo", "algorithm.estimator.lam=0.9", "target"),
    ("trico", "algorithm.estimator.gamma_turn=0.5", "target"),
    ("trico", "algorithm.estimator.lam_turn=0.2", "target"),
    ("trico", "algorithm.estimator.gamma_token=0.9", "target"),
    ("trico", "algorithm.estimator.lam_token=0.5", "target"),
    ("trico_adaptive", "algorithm.estimator.beta=0.0", "target"),
    ("trico_adaptive algorithm.estimator.beta=1.0", "algorithm.estimator.feedback=0.1", "target"),
    ("trico_importance", "algorithm.masks.importance.loss=0.1", "trained"),
    ("trico_importance", "algorithm.masks.importance.advantage=0.1", "credited"),
    ("turn_ppo", "algorithm.estimator.gamma=0.9", "target"),
    ("turn_ppo", "algorithm.estimator.lam=0.5", "target"),
    ("grpo", "algorithm.estimator.scale_by_std=false", "advantage"),
    ("gigpo", "algorithm.estimator.gamma=0.5", "advantage"),
    ("gigpo", "algorithm.estimator.step_weight=0.1", "advantage"),
    ("gigpo", "algorithm.estimator.scale_by_std=false", "advantage"),
    ("gigpo", "algorithm.estimator.step_baseline=all", "advantage"),
    ("gigpo algorithm.estimator.step_baseline=all", "algorithm.estimator.scale_steps=true", "advantage"),
    ("gagpo", "algorithm.estimator.gamma=0.5", "advantage"),
    ("gagpo", "algorithm.estimator.lam=0.1", "advantage"),
    ("graphgpo", "algorithm.estimator.omega=0.5", "advantage"),
    ("graphgpo", "algorithm.estimator.step_weight=0.1", "advantage"),
    ("graphgpo", "algorithm.estimator.scale_by_std=false", "advantage"),
    ("cast", "algorithm.estimator.weight=0.5", "advantage"),
    ("cast", "algorithm.estimator.compress=false", "advantage"),
    ("cast", "algorithm.estimator.scale_by_rms=false", "advantage"),
    ("reinforce_pp", "algorithm.estimator.gamma=0.9", "target"),
    ("evpo algorithm.estimator.threshold=10.0", "algorithm.estimator.threshold=-1e6", "advantage"),
    ("gdpo", "algorithm.estimator.final=none", "advantage"),
    ("starpo", "algorithm.critic=own", "value_loss"),
    # losses
    ("starpo", f"{LOSS}.SequencePolicyLoss", "clipped"),
    ("starpo", f"{LOSS}.ClippedWeightLoss", "policy_loss"),
    ("echo", "algorithm.loss.echo=null", "loss"),
    ("echo", "algorithm.loss.echo.observation=0.5", "loss"),
    ("dppo", "algorithm.loss.policy.clip_low=1e-4", "clipped"),
    ("dppo", "algorithm.loss.policy.clip_high=1e-4", "clipped"),
    ("dppo algorithm.loss.policy.clip_high=1e-4", "algorithm.loss.policy.divergence=kl", "clipped"),
    ("dppo", "algorithm.loss.policy.level=turn", "policy_loss"),
    ("dppo context.window=all", "algorithm.loss.policy.level=sequence", "policy_loss"),
    ("starpo", "algorithm.loss.policy.clip_low=0.01", "clipped"),
    ("starpo", "algorithm.loss.policy.clip_high=0.01", "clipped"),
    ("starpo", "algorithm.loss.policy.dual_clip=1.01", "clipped"),
    ("starpo", "algorithm.loss.policy.aggregation=token-mean", "policy_loss"),
    ("starpo", "algorithm.loss.policy.aggregation=seq-mean-token-mean", "policy_loss"),
    ("starpo", "algorithm.loss.policy.aggregation=episode-mean", "policy_loss"),
    ("dr_grpo", "algorithm.loss.policy.constant=3", "policy_loss"),
    ("starpo", "algorithm.loss.value_coefficient=0.1", "loss"),
    ("starpo", "algorithm.loss.value_clip=0.01", "value_loss"),
    ("starpo", "algorithm.loss.entropy_coefficient=0.1", "loss"),
    ("starpo algorithm.loss.entropy_coefficient=0.1", "algorithm.loss.entropy_target=7.0", "loss"),
    ("starpo", f"{MISMATCH}.TruncatedWeights", "old_logprob"),
    ("starpo " + f"{MISMATCH}.TruncatedWeights", "+algorithm.loss.mismatch.cap=0.9", "advantage"),
    ("starpo " + f"{MISMATCH}.TruncatedWeights", "+algorithm.loss.mismatch.level=sequence", "advantage"),
    ("starpo", f"{MISMATCH}.MaskedWeights", "old_logprob"),
    ("starpo " + f"{MISMATCH}.MaskedWeights", "+algorithm.loss.mismatch.high=1.1", "advantage"),
    ("starpo " + f"{MISMATCH}.MaskedWeights", "+algorithm.loss.mismatch.low=0.9", "advantage"),
    # divergence from the reference
    ("starpo", "algorithm.loss.kl=null", "kl_loss"),
    ("starpo", "algorithm.loss.kl.coefficient=0.1", "kl_loss"),
    ("starpo", "algorithm.loss.kl.estimator=k1", "kl_loss"),
    ("starpo", "algorithm.loss.kl.estimator=k2", "kl_loss"),
    ("starpo", "algorithm.loss.kl.estimator=k3", "kl_loss"),
    ("starpo", "algorithm.loss.kl.estimator=abs", "kl_loss"),
    ("starpo", "algorithm.loss.kl.aggregation=token-mean", "kl_loss"),
]  # fmt: skip
LATER = [  # what differs from the second iteration on
    ("starpo", "algorithm.loss.kl.place=reward algorithm.loss.kl.estimator=k1", "target"),
    (
        "starpo",
        "algorithm.loss.kl.reference._target_=ragen_pl.modules.reference.MovingAverage",
        "kl_loss",
    ),
    ("starpo", f"{BY}.Schedule +algorithm.normalize.by.starts=[0,1,2]", "target"),
]


def shown(value: object) -> str:
    return str(value).replace("ragen_pl.", "").replace("algorithm", "a") if value else "-"


@pytest.mark.slow
@pytest.mark.parametrize(("base", "switch", "metric"), SWITCHES, ids=shown)
def test_setting_changes_its_metric_and_the_weights(
    run, base: str, switch: str, metric: str | None
) -> None:
    overrides = f"algorithm={base}".split()
    before, after = run(*overrides), run(*overrides, *switch.split())
    if metric is None:  # the default, stated
        assert torch.equal(before.weights, after.weights)
        return
    assert before.metrics.get(metric) != pytest.approx(after.metrics.get(metric), rel=1e-5)
    assert not torch.allclose(before.weights, after.weights, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "switch", "metric"), LATER, ids=shown)
def test_setting_changes_later_iterations(run, base: str, switch: str, metric: str) -> None:
    before = run(f"algorithm={base}", iterations=2)
    after = run(f"algorithm={base}", *switch.split(), iterations=2)
    assert before.metrics[metric] != pytest.approx(after.metrics[metric], rel=1e-5)
    assert not torch.allclose(before.weights, after.weights, rtol=0, atol=1e-6)


@pytest.fixture(scope="session")
def teacher(config_of, tmp_path_factory) -> str:
    """Return the override that names a larger model with other weights."""
    folder = tmp_path_factory.mktemp("teacher")
    larger = ("++model.build.text.hidden_size=32", "model.build.seed=7")
    build_bundle(config_of("algorithm=starpo", *larger)).save(folder)
    return f"{TEACHER}={folder}"


def test_presets_lead_to_different_weights(run, teacher) -> None:
    assert len(PRESETS) >= 13
    more = {"opd": (teacher,)}
    ends = {name: run(f"algorithm={name}", *more.get(name, ())).weights for name in PRESETS}
    start = run("algorithm=starpo", "optimizer.lr=0").weights
    for name in PRESETS:
        assert not torch.allclose(ends[name], start, rtol=0, atol=1e-5), f"{name} learns nothing"
    for first, second in combinations(PRESETS, 2):
        same = torch.allclose(ends[first], ends[second], rtol=0, atol=1e-6)
        assert not same, f"{first} is {second}"


@pytest.mark.parametrize("estimator", ["full_reverse", "full"])
def test_the_divergence_from_a_teacher_falls_whatever_the_rewards(run, teacher, estimator) -> None:
    distilled = ("algorithm=opd", teacher, f"algorithm.loss.kl.estimator={estimator}")
    first, last = (run(*distilled, iterations=count).metrics["kl_loss"] for count in (1, 6))
    assert 0 < last < 0.7 * first
    other = run(*distilled, "algorithm.rewards.weights.turn=-9.0", iterations=6)
    assert torch.equal(other.weights, run(*distilled, iterations=6).weights)


def test_trico_without_discounts_and_with_the_same_masks_equals_starpo(run) -> None:
    names = ("gamma_turn", "lam_turn", "gamma_token", "lam_token")
    ones = [f"algorithm.estimator.{name}=1.0" for name in names]
    trico = run("algorithm=trico", *ones, f"{CREDIT}.sampled")
    starpo = run("algorithm=starpo")
    torch.testing.assert_close(trico.weights, starpo.weights, rtol=1e-3, atol=1e-4)
    assert trico.metrics["target"] == pytest.approx(starpo.metrics["target"], rel=1e-4)


REFUSED = [
    ("grpo rollout.group_size=1", "GroupRelative compares"),
    ("gigpo rollout.group_size=1", "GroupInGroup compares"),
    ("maxrl rollout.group_size=1", "SuccessRelative compares"),
    ("gdpo rollout.group_size=1", "Decoupled compares"),
    ("cast rollout.group_size=1", "SolverTeacher compares"),
    *(
        (f"{name} {change}", f"{refused}.* does not read the returns")
        for name in ("maxrl", "gdpo")
        for change, refused in (
            ("algorithm.loss.kl.place=reward algorithm.loss.kl.estimator=k1", "kl.place=reward"),
            ("algorithm.normalize.clip_high=1.0", "algorithm.normalize:"),
        )
    ),
    ("gdpo +algorithm.estimator.weights={environment/goal:1.0}", "is a part of environment"),
    ("evpo algorithm.critic=none", "GatedGAE needs values"),
    ("opd", f"{TEACHER} has no value; set {TEACHER}=…"),
    (f"opd {TEACHER}=/nowhere", f"{TEACHER}=/nowhere: there is no such file or folder; give a"),
    ("starpo algorithm.loss.kl=null algorithm.loss.policy_coefficient=0", "no other term"),
    ("opsd algorithm.loss.kl.hint=null", "the reference is the policy itself"),
    ("starpo algorithm.loss.policy_coefficient=0", "the reference is the policy itself"),
    ("opsd algorithm.loss.kl.estimator=k1", "k1 with a hint: in the loss its gradient"),
    (f"arpo {ESTIMATOR}.teacher_ratio.TeacherRatio", "reads the KL penalty"),
    ("echo context.window=1", "no response before an observation"),
    ("dppo algorithm.loss.policy.dual_clip=3.0", "has no dual clip"),
    ("starpo_s rollout.group_size=1", "GroupFilter compares"),
    (f"starpo rollout.group_size=1 {BY}.ByGroup", "RewardNormalizer compares"),
    ("starpo algorithm.filter.resample=1", "does not judge each group by itself"),
    ("starpo_s algorithm.filter.resample=1", "TopFraction does not judge"),
    (f"grpo {BY}.ByGroup", "standardizes returns itself"),
    (f"brpo {BY}.ByBatch", "standardizes returns itself"),
    *(
        (f"{name} algorithm.loss.whiten=true", f"loss.whiten=true: .* mean of their {scope}")
        for name, scope in (
            ("grpo", "group"),
            ("dr_grpo", "group"),
            ("dapo", "group"),
            ("rloo", "group"),
            (f"rloo {ESTIMATOR}.turn_baseline.TurnLeaveOneOut", "group"),
            ("gigpo", "group"),
            ("brpo", "batch"),
            ("reinforce_pp", "batch"),
            (f"arpo {BY}.ByGroup", "group"),
            (f"arpo {BY}.Running", "batch"),
        )
    ),
    ("starpo algorithm.critic=none", "MaskedGAE needs values"),
    ("rico context.window=1", "one undivided sequence"),
    ("starpo context.window=all algorithm.masks.observations=true", "neither mask holds text"),
    (f"starpo {MASK}.all_text", "sampled tokens only"),
    (f"starpo {CREDIT}.think_weighted", "a token is a step of credit or is not"),
    (f"starpo {LOSS}.SequencePolicyLoss algorithm.loss.policy.dual_clip=3.0", "has no dual clip"),
    ("starpo algorithm.loss.policy.constant=3", "only with it"),
    ("starpo algorithm.loss.entropy_target=1.0", "no entropy bonus to steer"),
    ("grpo algorithm.critic=shared", "reads no values"),
    ("grpo env.turn_limit_bootstraps=true", "no values to bootstrap from"),
    (f"starpo rollout.group_size=1 {BY}.Schedule", "RewardNormalizer compares"),
    ("starpo algorithm.filter.rescale=linear", "the fraction of kept groups is 1"),
    (
        "starpo rollout.group_size=1 callbacks.collapse.actions=[mitigate] callbacks.collapse.mitigation.group_filter="
        "{_target_:ragen_pl.algorithms.group_filter.GroupFilter,keep:{_target_:ragen_pl.algorithms.group_filter.AboveDeviation}}",
        "callbacks.collapse.mitigation.group_filter compares",
    ),
    (f"starpo env.prompt_format=no_think {MASK}.think_span", "has no reasoning"),
    (
        "starpo env.prompt_format=no_think algorithm.rewards.think_length.amount=1.0",
        "has no reasoning",
    ),
    ("starpo context.leave_out.turns=0.5 context.window=2", "context.window=2 that is none"),
    ("starpo env.visual=false context.leave_out.patches=0.5", "shows no images"),
    (
        "starpo rollout.temperature=1.5 rollout.adaptive_temperature="
        "{_target_:ragen_pl.rollout.temperature.AdaptiveTemperature,low:0.8,high:1.2}",
        "rollout.temperature=1.5: outside",
    ),
    ("rico context.leave_out.turns=0.5", "one undivided sequence; set turns=0"),
    ("starpo warm_start.episodes=3 trainer.devices=2 trainer.num_nodes=2", "than the 4 ranks"),
]


@pytest.mark.parametrize(("overrides", "reason"), REFUSED, ids=shown)
def test_meaningless_combinations_are_rejected_with_the_reason(
    config_of, overrides, reason
) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_of(*f"algorithm={overrides}".split())


def test_a_teacher_without_a_gradient_is_refused(config_of, teacher) -> None:
    with pytest.raises(
        ConfigError, match=r"kl\.estimator=k1: in the loss .* set full_reverse or k2"
    ):
        config_of("algorithm=opd", teacher, "algorithm.loss.kl.estimator=k1")
