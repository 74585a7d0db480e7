"""Preparation of a batch: the log-probs that the update's ratios refer to."""

from __future__ import annotations

import pytest
import torch

from ragen_pl.algorithms.masks import all_text
from ragen_pl.algorithms.mismatch import TruncatedWeights
from ragen_pl.base.finite import NonFiniteError
from ragen_pl.data.collate import collate
from ragen_pl.engines.errors import RolloutError
from ragen_pl.modules import scorer
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss
from ragen_pl.modules.masking import Masks
from ragen_pl.trajectory import Span


def test_shown_text_takes_the_log_probs_before_the_update(make) -> None:
    agent = make.agent(masks=Masks(loss=all_text, advantage=all_text, observations=True))
    trajectories = make.play(agent, window="all")
    raw = collate(trajectories, agent.policy.bundle, observations=True)
    shown = raw.samples.spans == Span.SHOWN
    assert shown.any() and not raw.samples.old_logprobs[shown].any()
    engine_logprobs = raw.samples.rollout_logprobs.clone()

    batch = agent.prepare(raw)
    samples = batch.samples
    with torch.no_grad():
        scores = agent.policy(samples, batch.images)
    assert samples.loss_mask[shown].all()
    torch.testing.assert_close(samples.old_logprobs[shown], scores.logprobs[shown])
    assert samples.old_logprobs[shown].max() < 0
    sampled = (samples.turn >= 0) & ~shown
    assert torch.equal(samples.old_logprobs[sampled], engine_logprobs[sampled])
    assert torch.equal(samples.rollout_logprobs, engine_logprobs)

    # before the first step, all ratios of the policy's loss are 1
    agent.training_step(make.minibatch(batch), 0)
    sums = agent.statistics.totals()
    assert sums["approx_kl"] < 1e-6 and sums["clipped_low"] == sums["clipped_high"] == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_mismatch_of_an_engine_is_that_of_sampled_tokens(make, level) -> None:
    """Shown text has no log-probs of the engine, and keeps its advantages."""
    advantages = []
    for mismatch in (None, TruncatedWeights(level=level)):
        agent = make.agent(
            masks=Masks(loss=all_text, advantage=all_text, observations=True),
            loss=UpdateLoss(mismatch=mismatch),
        )
        played = make.play(agent, window="all")
        batch = agent.prepare(collate(played, agent.policy.bundle, observations=True))
        advantages.append(batch.samples.advantages)
    assert advantages[0][batch.samples.spans == Span.SHOWN].abs().max() > 0.1
    torch.testing.assert_close(*advantages, rtol=1e-4, atol=1e-4)


def test_reference_is_kept_as_states(make, monkeypatch) -> None:
    """Log-probs of the whole vocabulary would take up to a hundred times the memory."""
    agent = make.agent(loss=UpdateLoss(kl=ReferenceKL(coefficient=0.1)))
    batch = make.batch(agent)
    tokens = int((batch.samples.turn >= 0).sum())
    assert batch.reference.shape == (tokens, agent.policy.bundle.hidden_size)
    monkeypatch.setattr(scorer, "REFERENCE_GIB", tokens * 32 * 4 / 2**30)
    agent.prepare(batch)
    monkeypatch.setattr(scorer, "REFERENCE_GIB", (tokens * 32 * 4 - 1) / 2**30)
    with pytest.raises(RolloutError, match=r"set algorithm\.loss\.kl\.estimator=k3"):
        agent.prepare(batch)


@pytest.mark.parametrize("own_critic", [False, True], ids=["shared", "own"])
def test_values_do_not_depend_on_the_tokens_of_a_forward_pass(make, own_critic) -> None:
    agent = make.agent(own_critic=own_critic)
    played = [make.cut(trajectory) for trajectory in make.play(agent, window="all")]
    lengths = {len(trajectory.final_prompt_ids) for trajectory in played}
    assert len(lengths) > 2
    found = []
    for agent.tokens_per_forward in (1, 3 * max(lengths), 100_000):
        batch = agent.prepare(collate(played, agent.policy.bundle))
        found.append((batch.episodes.bootstrap, batch.samples.values))
    assert found[0][0].abs().min() > 1e-3
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spoiled", "name"),
    [
        ("rollout_logprobs", "rollout.engine: the sampled log-probs are not finite: nan"),
        ("policy", "the policy's log-probs before the update are not finite: nan"),
        ("critic", "the critic's values are not finite: inf"),
        ("reference", "algorithm.loss.kl: the reference's scores are not finite: nan"),
        ("penalty", "algorithm.loss.kl: the penalties on the reward are not finite: nan"),
    ],
)
def test_a_score_that_is_not_finite_is_named(make, monkeypatch, spoiled, name) -> None:
    kl = ReferenceKL(coefficient=0.1, estimator="k1", place="reward")
    agent = make.agent(own_critic=True, loss=UpdateLoss(kl=kl))
    batch = collate(make.play(agent), agent.policy.bundle)
    with torch.no_grad():
        if spoiled == "rollout_logprobs":
            batch.samples.rollout_logprobs[batch.samples.turn >= 0] = torch.nan
        elif spoiled == "critic":
            agent.critic.head.layers[-1].bias.fill_(torch.inf)
        elif spoiled == "penalty":
            kl.coefficient = torch.inf
        else:
            getattr(agent, spoiled).model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError) as caught:
        agent.prepare(batch)
    assert str(caught.value).startswith(name) and "\n" not in str(caught.value)
