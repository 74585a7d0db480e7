"""Reasoning probes computed by hand, at their extremes, and from a real policy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.episodes.trajectories import starts
from support.models.tiny_models import TEXT, VISION

import envs  # noqa: F401
import visual_envs  # noqa: F401
from envs.policies import OptimalPolicy
from ragen_pl.callbacks.reasoning_probe import (
    Regime,
    cross_score,
    first_thoughts,
    probe_reasoning,
)
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder


def ones(count):
    return torch.ones(count, dtype=torch.int64)


def test_probe_of_two_prompts_by_hand():
    """p(z1|x1)=1/2, p(z1|x2)=1/4, p(z2|x1)=1/8, p(z2|x2)=1/2."""
    scores = torch.tensor([[1 / 2, 1 / 4], [1 / 8, 1 / 2]]).log()
    probe = probe_reasoning(scores, torch.tensor([1, 3]))
    assert probe.conditional_entropy == pytest.approx(math.log(2))
    assert probe.marginal_entropy == pytest.approx(-(math.log(3 / 8) + math.log(5 / 16)) / 2)
    assert probe.mutual_information == pytest.approx((math.log(4 / 3) + math.log(8 / 5)) / 2)
    assert probe.mutual_information == pytest.approx(
        probe.marginal_entropy - probe.conditional_entropy
    )
    assert probe.bound == pytest.approx(math.log(2)) and probe.retrieval_accuracy == 1.0
    assert probe.entropy_per_token == pytest.approx(2 * math.log(2) / 4)


def test_probe_of_three_prompts_with_a_tie_and_a_miss():
    scores = torch.tensor([[-1.0, -1.0, -9.0], [-5.0, -4.0, -3.0], [-7.0, -8.0, -2.0]])
    probe = probe_reasoning(scores, ones(3))
    assert probe.retrieval_accuracy == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert probe.metrics()["retrieval_above_chance"] == pytest.approx(0.5 - 1 / 3)
    assert "of at most 1.10 nats (log N)" in str(probe)


@pytest.mark.parametrize("count", [2, 16])
def test_regimes_at_their_extremes(count):
    own = torch.eye(count, dtype=torch.bool)
    # Each prompt has one text of its own.
    faithful = torch.where(own, -0.001, -1e4)
    diverse = torch.where(own, -30.0, -1e4)
    # Varied, and independent of the prompt.
    template = torch.full((count, count), -30.0)
    single = torch.full((count, count), -0.001)
    probes = [
        probe_reasoning(scores, 10 * ones(count))
        for scores in (diverse, template, faithful, single)
    ]
    assert [probe.regime() for probe in probes] == list(Regime)
    # in a run's log, without a letter of a formula
    words = [probe.in_words().partition("; ") for probe in probes]
    kinds = ["vary, and", "vary, but hardly", "depend on", "are nearly the same for all"]
    assert all(text.startswith(kind) for (text, _, _), kind in zip(words, kinds, strict=True))
    assert words[0][2] == f"100% of them fit their own prompt best, {1 / count:.0%} would by chance"
    for probe in probes[::2]:
        assert probe.mutual_information == pytest.approx(math.log(count))
        assert probe.information_share == pytest.approx(1.0) and probe.retrieval_accuracy == 1.0
    for probe in probes[1::2]:
        assert probe.mutual_information == pytest.approx(0.0)
        assert probe.retrieval_accuracy == pytest.approx(1 / count)


@given(st.integers(1, 6).flatmap(lambda n: st.lists(
    st.lists(st.floats(-200, 0), min_size=n, max_size=n), min_size=n, max_size=n)))  # fmt: skip
def test_information_is_bounded(scores):
    probe = probe_reasoning(torch.tensor(scores, dtype=torch.float64), ones(len(scores)))
    assert probe.mutual_information <= probe.bound + 1e-9
    assert 0.0 <= probe.retrieval_accuracy <= 1.0


def test_scores_must_be_square():
    with pytest.raises(ValueError, match=r"expected \[N, N\]"):
        probe_reasoning(torch.zeros(2, 3), ones(2))


def policy_and_thoughts(*, images, count=5, groups=8):
    bundle = build_small_lm(seed=0, text=TEXT)
    if images:
        bundle = build_small_vlm(seed=0, text=TEXT, vision=VISION)
    with torch.no_grad():
        for parameter in bundle.model.parameters():
            if parameter.ndim > 1:
                # With larger weights the prompt matters more.
                parameter.mul_(3.0)
    proxy = AgentProxy(
        environments=EnvironmentManager(
            target=f"ragen/FrozenLake{'Visual' * images}-v0",
            max_turns=2,
            kwargs={"min_distance": 1},
        ),
        context=ContextManager(bundle, system_prompt=None),
    )
    played = proxy.rollout(
        ScriptedResponder(policy=OptimalPolicy()),
        starts(groups, 2),
        seed_key=(0,),
    )
    return PolicyModule(bundle).eval(), played, first_thoughts(played, count=count)


@pytest.mark.parametrize("images", [False, True])
def test_cross_scores_do_not_depend_on_batching(images):
    policy, _, thoughts = policy_and_thoughts(images=images)
    scores, lengths = cross_score(policy, thoughts)
    assert scores.shape == (5, 5) and lengths.tolist() == [len(thought.ids) for thought in thoughts]
    one_by_one, _ = cross_score(policy, thoughts, tokens_per_forward=1)
    assert torch.allclose(scores, one_by_one, atol=1e-4)
    alone = [cross_score(policy, [thought])[0].item() for thought in thoughts]
    assert torch.allclose(scores.diagonal(), torch.tensor(alone).double(), atol=1e-4)
    assert (scores - scores.diagonal()[:, None]).abs().max() > 1e-3, "the prompt does not matter"


def test_first_thoughts_have_different_groups_and_prompts():
    _, played, thoughts = policy_and_thoughts(images=False, count=100)
    assert [thought.group for thought in thoughts] == list(range(8))
    turn = played[0].turns[0]
    kept = thoughts[0].ids
    assert np.array_equal(kept, turn.response_ids[: len(kept)])
    assert len(kept) == len(turn.response_ids) - 5  # </think>, three of the answer, the end
    for trajectory in played:
        trajectory.turns[0].prompt_ids = played[0].turns[0].prompt_ids
    assert len(first_thoughts(played, count=100)) == 1
    played[0].turns[0].think = None
    assert first_thoughts(played[:1], count=3) == []
