"""Rollouts with top-p, top-k and min-p, and updates on them."""

from __future__ import annotations

import copy

import pytest
import torch

from ragen_pl.algorithms.advantages.group import GroupRelative
from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.data.collate import collate, label_shown_text
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.models.truncation import Truncation
from ragen_pl.modules.losses import KLPlace, ReferenceKL, UpdateLoss
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.agreement import check_agreement

KINDS = {
    "top_p": Truncation(top_p=0.8),
    "top_k": Truncation(top_k=5),
    "min_p": Truncation(min_p=0.1),
    "all": Truncation(top_p=0.9, top_k=40, min_p=0.02),
}


def sharpen(bundle) -> None:
    """Make weights so large that some ids are much more probable than others."""
    with torch.no_grad():
        for weight in bundle.model.parameters():
            if weight.ndim > 1:
                weight.mul_(4.0)


def metrics(agent) -> dict[str, float]:
    return agent.preparation.compute()


@pytest.mark.parametrize("kind", KINDS)
def test_engine_and_trainer_have_the_same_log_probs_over_the_kept_ids(make, kind) -> None:
    agent = make.agent(change=sharpen, truncation=KINDS[kind])
    batch = make.batch(agent, window="all", temperature=0.8)
    assert metrics(agent)["logprob_mismatch"] < 2e-6
    assert metrics(agent)["logprob_mismatch_max"] < 1e-4
    tokens = int((batch.samples.turn >= 0).sum())
    vocabulary = agent.policy.bundle.model.config.vocab_size
    assert len(batch.kept_ids) == tokens and (batch.kept_ids.counts > 0).all()
    assert batch.kept_ids.counts.float().mean() < 0.7 * vocabulary


def test_without_its_truncation_the_trainer_would_differ(make) -> None:
    agent = make.agent(change=sharpen, truncation=KINDS["top_p"])
    trajectories = make.play(agent)
    agent.truncation = None
    batch = collate(trajectories, agent.policy.bundle)
    batch.kept_ids = None
    agent.prepare(batch)
    assert metrics(agent)["logprob_mismatch"] > 0.05


def test_a_response_does_not_depend_on_the_others(make) -> None:
    def responses(num_envs: int) -> list:
        agent = make.agent(change=sharpen, truncation=KINDS["all"])
        turns = [turn for one in make.play(agent, num_envs=num_envs) for turn in one.turns]
        return [turn.response_ids.tolist() for turn in turns]

    assert responses(256) == responses(1)


@pytest.mark.parametrize(
    ("place", "estimator"),
    [
        *[(KLPlace.LOSS, estimator) for estimator in ("full", "full_reverse", "k1", "k3")],
        (KLPlace.REWARD, "k1"),
    ],
)
def test_at_unchanged_weights_nothing_has_moved(make, place, estimator) -> None:
    penalty = ReferenceKL(coefficient=0.5, estimator=estimator, place=place)
    agent = make.agent(
        change=sharpen, truncation=KINDS["all"], loss=UpdateLoss(kl=penalty, whiten=False)
    )
    batch = make.batch(agent)
    result = agent.loss(agent.scorer.score_minibatch(make.minibatch(batch)), make.minibatch(batch))
    tokens = float(result.sums["tokens"])
    assert tokens > 50
    assert abs(float(result.sums["approx_kl"])) / tokens < 1e-6
    assert result.sums["clipped_low"] == result.sums["clipped_high"] == 0
    assert abs(float(result.sums["kl"])) / tokens < 1e-5


def brute_force(agent, batch: TrajectoryBatch) -> torch.Tensor:
    """Return the log-probs of the sampled tokens, row after row, from the model's own logits."""
    samples, bundle, number, found = batch.samples, agent.policy.bundle, 0, []
    ends = [0, *batch.kept_ids.ends.tolist()]
    for row in range(len(samples)):
        logits = agent.policy.model(samples.input_ids[row : row + 1, : samples.length[row]]).logits
        for t in (samples.turn[row] >= 0).nonzero().flatten().tolist():
            ids = batch.kept_ids.ids[ends[number] : ends[number + 1]].long()
            assert not set(ids.tolist()) & set(bundle.banned_token_ids)
            heated = logits[0, t - 1, ids] / samples.temperature[row, t]
            own = int((ids == samples.input_ids[row, t]).nonzero())
            found.append(heated.log_softmax(-1)[own])
            number += 1
    return torch.stack(found)


def test_the_update_takes_the_gradient_over_the_ids_that_were_kept_before(make) -> None:
    agent = make.agent(change=sharpen, truncation=KINDS["all"])
    batch = make.batch(agent, groups=2, temperature=0.9)
    with torch.no_grad():  # other weights, which would keep other ids
        for weight in agent.policy.parameters():
            weight.add_(
                0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            )
    sampled = batch.samples.turn >= 0
    weights = torch.randn(int(sampled.sum()), generator=torch.Generator().manual_seed(2))

    def gradient(logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
        agent.zero_grad()
        (logprobs * weights).sum().backward()
        return {name: weight.grad.clone() for name, weight in agent.policy.named_parameters()}

    own = brute_force(agent, batch)
    expected = gradient(own)
    for logits_mib in (512.0, 0.01):  # at once, and in chunks that are computed again
        agent.policy.logits_mib = logits_mib
        found = agent.scorer.score_minibatch(make.minibatch(batch)).logprobs[sampled]
        torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)
        for name, value in gradient(found).items():
            torch.testing.assert_close(value, expected[name], atol=2e-5, rtol=1e-4)


def test_minibatches_and_checkpoints_have_the_kept_ids_of_their_tokens(make) -> None:
    agent = make.agent(change=sharpen, truncation=KINDS["all"])
    stored = copy.deepcopy(make.batch(agent, window="all").state_dict())
    batch = TrajectoryBatch.from_state_dict(stored)
    ends = [0, *batch.kept_ids.ends.tolist()]
    of_token = [
        batch.kept_ids.ids[ends[n] : ends[n + 1]].tolist() for n in range(len(batch.kept_ids))
    ]
    for minibatch in MinibatchLoader(batch, epochs=1, minibatches=3, tokens_per_microbatch=100):
        samples, found = minibatch.samples, minibatch.kept_ids
        numbers = samples.token[samples.turn >= 0].tolist()
        own = [0, *found.ends.tolist()]
        assert [found.ids[own[n] : own[n + 1]].tolist() for n in range(len(found))] == [
            of_token[number] for number in numbers
        ]


def test_text_that_was_shown_keeps_all_ids(make) -> None:
    agent = make.agent(
        change=sharpen, estimator=GroupRelative(), truncation=KINDS["top_k"], loss=UpdateLoss()
    )
    bundle = agent.policy.bundle
    plain = collate(make.play(agent, window="all"), bundle)
    # as of an engine that does not tell them
    plain.kept_ids = None
    label_shown_text(plain.samples, [4] * 8, allowed=bundle.can_sample(plain.samples.input_ids))
    batch = agent.prepare(plain)
    shown = (batch.samples.spans == 7)[batch.samples.turn >= 0]
    assert shown.any() and (batch.kept_ids.counts[shown] == 0).all()
    assert (batch.kept_ids.counts[~shown] >= 5).all()
    assert metrics(agent)["logprob_mismatch_max"] < 1e-4


class Ignoring(TransformersEngine):
    """Samples among all ids."""

    def submit(self, requests, *, keep):
        for request in requests:
            request.truncation = None
        super().submit(requests, keep=keep)


def test_an_engine_that_ignores_it_is_refused_at_the_start(make) -> None:
    agent = make.agent(change=sharpen)
    bundle = agent.policy.bundle.with_model(agent.policy.model.eval())
    context, truncation = ContextManager(bundle), Truncation(top_p=0.7)
    check = {"image_size": None, "truncation": truncation}
    assert check_agreement(context, TransformersEngine(PolicyModule(bundle)), **check) < 1e-4
    with pytest.raises(ValueError, match=r"leaves out .*rollout\.top_p, top_k and min_p"):
        check_agreement(context, Ignoring(PolicyModule(bundle)), **check)
