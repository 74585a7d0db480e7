"""A teacher that reads hints: the prompts, the policy's own tokens behind them, and the divergence from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.episodes.small_lakes import ENVIRONMENT, Module
from support.episodes.trajectories import starts
from support.runs.composing import composed

from ragen_pl.algorithms.aggregation import Aggregation
from ragen_pl.algorithms.kl import full_kl
from ragen_pl.algorithms.masks import sampled
from ragen_pl.assembly.component_checks import check_components
from ragen_pl.config import ConfigError
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.settings import IterationSettings
from ragen_pl.engines.errors import RolloutError
from ragen_pl.environments.calls import make_environment
from ragen_pl.environments.check import check_environments
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.metrics.rollout import rollout_metrics
from ragen_pl.models.distribution import log_distribution
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss
from ragen_pl.modules.reference import FrozenCopy, MovingAverage
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.hint import Hint
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.trajectory import Observation

PLAN = Hint(template="{observation} {plan}")


def distillation(hint, *, reference=None, estimator="full_reverse") -> UpdateLoss:
    penalty = ReferenceKL(
        coefficient=1.0, estimator=estimator, mask=sampled, aggregation=Aggregation.TOKEN_MEAN,
        reference=reference or FrozenCopy(), hint=hint,
    )  # fmt: skip
    return UpdateLoss(policy_coefficient=0.0, value_coefficient=0.0, whiten=False, kl=penalty)


def distributions(model, bundle, prompt, turn) -> torch.Tensor:
    """Return the log-distributions at a turn's response behind a prompt, from the model's own forward."""
    ids = torch.from_numpy(np.concatenate([prompt, turn.response_ids]))[None]
    start = len(prompt) - 1
    logits = model(ids).logits[0, start:-1, : bundle.logit_count]
    return log_distribution(logits, temperature=1.0, banned=bundle.banned(ids.device))


@pytest.mark.parametrize("estimator", ["full_reverse", "k2"])
@pytest.mark.parametrize("window", [1, "all"])
def test_the_teacher_scores_the_responses_behind_its_own_prompts(make, window, estimator) -> None:
    agent = make.agent(loss=distillation(PLAN, estimator=estimator))
    played = make.play(agent, window=window)
    expected, bundle = [], agent.policy.bundle
    batch = make.batch(agent, window=window)
    assert batch.hinted is None
    for trajectory in played:
        texts = [bundle.decode(turn.teacher_prompt_ids) for turn in trajectory.turns]
        own = [bundle.decode(turn.prompt_ids) for turn in trajectory.turns]
        assert all(len(text) > len(shown) for text, shown in zip(texts, own, strict=True))
        for turn in trajectory.turns:
            with torch.no_grad():
                teacher = distributions(
                    agent.reference.model, bundle, turn.teacher_prompt_ids, turn
                )
                policy = distributions(agent.policy.model, bundle, turn.prompt_ids, turn)
            if estimator == "k2":
                at = torch.from_numpy(turn.response_ids)[:, None]
                expected.append((policy - teacher).gather(-1, at).squeeze(-1) ** 2 / 2)
            else:
                expected.append(full_kl(policy, teacher))
    loss, gradients = make.gradient(agent, [make.minibatch(batch)])
    divergence = float(torch.cat(expected).mean())
    assert divergence > 1e-4
    assert loss == pytest.approx(divergence, rel=1e-3)
    assert any(gradient.any() for gradient in gradients.values())


def test_a_teacher_without_images_reads_the_state_in_words(make) -> None:
    hint = Hint(template="{state}", shows_images=False)
    agent = make.agent(loss=distillation(hint), images=True)
    (turn, *_) = make.play(agent)[0].turns
    bundle = agent.policy.bundle
    assert turn.prompt_images and turn.teacher_images == []
    assert turn.state_description in bundle.decode(turn.teacher_prompt_ids)
    assert bundle.image_token_id not in turn.teacher_prompt_ids
    batch = make.batch(agent)
    loss, _ = make.gradient(agent, [make.minibatch(batch)])
    assert loss > 1e-4


@pytest.mark.parametrize("reference", [FrozenCopy(), MovingAverage(decay=0.0)])
def test_the_policy_is_its_own_teacher_only_with_hints(make, reference) -> None:
    losses = []
    for hint in (None, PLAN):
        agent = make.agent(loss=distillation(hint, reference=reference))
        losses.append(make.gradient(agent, [make.minibatch(make.batch(agent))])[0])
    assert abs(losses[0]) < 1e-6 < 1e-4 < losses[1]


@pytest.mark.parametrize("window", [1, "all"])
def test_what_the_policy_reads_and_samples_is_as_without_hints(make, window) -> None:
    def played(hint):
        return make.play(make.agent(loss=distillation(hint)), window=window)

    for one, other in zip(played(None), played(PLAN), strict=True):
        for turn, hinted in zip(one.turns, other.turns, strict=True):
            assert np.array_equal(turn.prompt_ids, hinted.prompt_ids)
            assert np.array_equal(turn.response_ids, hinted.response_ids)
            assert turn.teacher_prompt_ids is None


def test_in_one_conversation_each_teacher_prompt_continues_the_last(make) -> None:
    agent = make.agent(loss=distillation(PLAN))
    played = make.play(agent, window="all")
    pairs = [pair for one in played for pair in zip(one.turns, one.turns[1:], strict=False)]
    assert pairs
    for before, after in pairs:
        begin = np.concatenate([before.teacher_prompt_ids, before.response_ids])
        assert np.array_equal(after.teacher_prompt_ids[: len(begin)], begin)
    assert rollout_metrics(played)["hinted_fraction"] == 1.0


def test_the_last_result_of_tools_has_the_hint_and_none_replaces_it_where_it_lacks() -> None:
    shown = Observation(text="a b", results=["a", "b"])
    hinted = Hint(template="{observation}, {plan}").observation(shown, state=None, plan="Up")
    assert hinted.results == ["a", "b, Up"] and hinted.text == "a b, Up"
    assert Hint(template="{plan}").observation(shown, state="x", plan=None) is shown


def module_of(lm, *, max_tokens=4096, **kwargs) -> RolloutDataModule:
    proxy = AgentProxy(
        environments=EnvironmentManager(
            target=ENVIRONMENT["target"],
            kwargs={**ENVIRONMENT["kwargs"], **kwargs},
            record_plans=True,
        ),
        context=ContextManager(lm, system_prompt=None, max_tokens=max_tokens),
        hint=PLAN,
        max_response_tokens=6,
    )
    return RolloutDataModule(proxy, iteration=IterationSettings(groups=2, group_size=2))


def test_an_iteration_without_a_hint_is_an_error(make) -> None:
    module, bundle = module_of(make.bundle(), plans=False), make.bundle()
    with pytest.raises(RolloutError, match="no turn of the iteration has a hint"):
        module.collect(0, Module(bundle))


@pytest.mark.parametrize(
    ("overrides", "has"),
    [
        (("env.kwargs.plans=false",), False),
        (("env.kwargs.plans=true",), True),
        # the state is described without plans
        (("env.kwargs.plans=false", "algorithm.loss.kl.hint.template='{state}'"), True),
    ],
)
def test_an_environment_without_a_hint_is_refused_before_a_model_is_built(overrides, has) -> None:
    cfg = composed("env=frozenlake", "algorithm=opsd", *overrides)
    if has:
        check_environments(cfg)
        return
    with pytest.raises(ConfigError, match="no state of its random episodes has a hint"):
        check_environments(cfg)


def test_a_context_holds_the_teachers_prompt_too(make) -> None:
    bundle = make.bundle()
    proxy = module_of(bundle, plans=True).proxy
    engine = Module(bundle).rollout_engine()
    responder = EngineResponder(engine=engine, context=proxy.context)
    played = proxy.rollout(responder, starts(2), seed_key=(0, "sample", 0))
    longest = max(len(turn.teacher_prompt_ids) for one in played for turn in one.turns[:1])
    assert longest > max(len(one.turns[0].prompt_ids) for one in played)
    small = module_of(bundle, plans=True, max_tokens=longest + 5).proxy
    with pytest.raises(RolloutError, match=f"the first prompt has {longest} tokens"):
        small.rollout(responder, starts(2), seed_key=(0, "sample", 0))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{answer}", "unknown fields"),
        ("{observation}", "would read what the policy reads"),
        ("{", "algorithm.loss.kl.hint.template"),
    ],
)
def test_a_template_that_shows_no_hint_is_refused(template, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        Hint(template=template)


@pytest.mark.parametrize(
    ("environment", "overrides", "problem"),
    [
        ("blackjack", (), "has no plan"),
        (
            "frozenlake",
            ("context.window=all", "context.compaction={max_summary_tokens: 8}"),
            "context.compaction",
        ),
        (
            "frozenlake",
            (
                "context.window=all",
                "algorithm.masks.observations=true",
                "algorithm.masks.loss._target_=ragen_pl.algorithms.masks.all_text",
            ),
            "algorithm.masks.observations=true",
        ),
    ],
)
def test_a_run_that_cannot_have_hints_is_refused(environment, overrides, problem) -> None:
    cfg = composed(f"env={environment}", "algorithm=opsd", *overrides)
    environments = {cfg.env.name: make_environment(cfg.env).unwrapped}
    with pytest.raises(ConfigError, match=problem):
        check_components(cfg, environments)
