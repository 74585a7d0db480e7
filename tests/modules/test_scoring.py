"""Scores of an iteration before its update: computed where something reads them."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.advantages.group import GroupRelative
from ragen_pl.algorithms.masks import all_text
from ragen_pl.algorithms.mismatch import TruncatedWeights
from ragen_pl.data.collate import collate
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.models.truncation import Truncation
from ragen_pl.modules.critic import LastValueReadout
from ragen_pl.modules.losses import KLPlace, ReferenceKL, UpdateLoss
from ragen_pl.modules.masking import Masks
from ragen_pl.modules.policy import TokenReadout

ALWAYS = UpdateSettings(scoring="always")
READERS = {
    "own critic": {"estimator": BilevelGAE(), "own_critic": True},
    "reward": {
        "loss": UpdateLoss(kl=ReferenceKL(coefficient=0.1, place=KLPlace.REWARD, estimator="k1"))
    },
    "truncation": {"truncation": Truncation(top_k=5)},
    "correction": {"loss": UpdateLoss(mismatch=TruncatedWeights())},
    "top_entropy": {"masks": Masks(top_entropy=0.5)},
    "entropy_target": {"loss": UpdateLoss(entropy_coefficient=0.01, entropy_target=1.0)},
    "observations": {"masks": Masks(loss=all_text, advantage=all_text, observations=True)},
}
OTHERS = {
    "plain": {},
    "reference": {"loss": UpdateLoss(kl=ReferenceKL(coefficient=0.1))},
    "entropy": {"loss": UpdateLoss(entropy_coefficient=0.01)},
}


def prepared(make, **changes):
    """Return an agent, its prepared batch and the number of passes of the policy's that scored it."""
    agent = make.agent(**({"estimator": GroupRelative()} | changes))
    observations = agent.masks.observations
    window = "all" if observations else 1
    raw = collate(make.play(agent, window=window), agent.policy.bundle, observations=observations)
    with readouts_of(agent) as readouts:
        batch = agent.prepare(raw)
    return agent, batch, readouts.count(TokenReadout)


@contextmanager
def readouts_of(agent):
    """List the types of the readouts of the policy's passes."""
    found = []
    hook = agent.policy.register_forward_hook(
        lambda module, args, kwargs, output: found.append(type(kwargs["readout"])),
        with_kwargs=True,
    )
    yield found
    hook.remove()


@pytest.mark.parametrize("critic", [False, True], ids=["alone", "with a critic"])
@pytest.mark.parametrize("changes", READERS.values(), ids=READERS)
def test_samples_are_scored_where_scores_are_read(make, changes, critic) -> None:
    """A pass that is needed reads the values of a critic too."""
    changes = changes | ({"estimator": BilevelGAE()} if critic else {})
    agent, batch, passes = prepared(make, **changes)
    assert passes == 1 and "policy_entropy" in agent.preparation.compute()
    assert not batch.has_values
    agent, _, passes = prepared(make, **changes, update=ALWAYS)
    assert passes == 1


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("window", [1, "all"])
def test_values_of_the_engine_stand_for_a_pass(make, window, images) -> None:
    """Advantages, returns, losses and gradients are the same; the states after truncated episodes have a pass."""
    found = []
    for update in (UpdateSettings(), ALWAYS):
        agent = make.agent(images=images, update=update)
        played = [make.cut(one) for one in make.play(agent, window=window)]
        raw = collate(played, agent.policy.bundle)
        with readouts_of(agent) as readouts:
            batch = agent.prepare(raw)
        assert batch.episodes.bootstrap.abs().min() > 0
        minibatch = make.minibatch(batch)
        loss, gradient = make.gradient(agent, [minibatch])
        found.append((readouts, batch, loss, gradient, agent.preparation.compute()))
    (readouts, batch, *own), (others, scored, *other) = found
    assert readouts == [LastValueReadout] and others == [TokenReadout, LastValueReadout]
    assert batch.has_values and not scored.has_values
    for name in ("values", "advantages", "returns", "old_logprobs"):
        expected = getattr(scored.samples, name)
        assert expected.std() > 0.1
        torch.testing.assert_close(getattr(batch.samples, name), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def written(raw, agent) -> None:
    raw.has_values = False


def bfloat16(raw, agent) -> None:
    agent.policy.to(torch.bfloat16)


@pytest.mark.parametrize("change", [written, bfloat16])
def test_a_pass_reads_the_values_that_the_engine_has_not(make, change) -> None:
    agent = make.agent()
    raw = collate(make.play(agent), agent.policy.bundle)
    expected = raw.samples.values.clone()
    # the pass replaces them
    raw.samples.values += 1.0
    change(raw, agent)
    with readouts_of(agent) as readouts:
        batch = agent.prepare(raw)
    assert readouts == [TokenReadout]
    torch.testing.assert_close(batch.samples.values, expected, rtol=0, atol=0.1)


def test_stale_samples_are_scored(make) -> None:
    agent = make.agent()
    raw = collate(make.play(agent), agent.policy.bundle)
    with readouts_of(agent) as readouts:
        agent.prepare(raw, stale=True)
    assert readouts == [TokenReadout]


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_scoring_changes_no_gradient(make, changes) -> None:
    """Without the pass before the update, the first minibatch's tokens give the statistics."""
    agent, batch, passes = prepared(make, **changes)
    scoring, scored, passes_of_scoring = prepared(make, **changes, update=ALWAYS)
    assert (passes, passes_of_scoring) == (0, 1)
    for name, values in vars_of(scored.samples).items():
        assert torch.equal(values, vars_of(batch.samples)[name]), name

    minibatches = list(MinibatchLoader(batch, epochs=2, minibatches=2))
    others = list(MinibatchLoader(scored, epochs=2, minibatches=2))
    before = scoring.preparation.compute()
    for minibatch, other in zip(minibatches, others, strict=True):
        loss, gradient = make.gradient(agent, [minibatch])
        loss_of_scoring, gradient_of_scoring = make.gradient(scoring, [other])
        assert loss == loss_of_scoring
        assert all(torch.equal(gradient[name], gradient_of_scoring[name]) for name in gradient)

    first = int(minibatches[0].samples.sampled.sum())
    totals = agent.preparation.totals()
    assert 0 < totals["tokens"] == first < scoring.preparation.totals()["tokens"]
    metrics = agent.preparation.compute()
    assert metrics["logprob_mismatch_max"] < 1e-4
    assert metrics["policy_entropy"] == pytest.approx(before["policy_entropy"], rel=0.2)
    assert scoring.preparation.compute() == before


def test_the_first_step_has_all_its_parts(make) -> None:
    agent, batch, _ = prepared(make)
    parts = list(MinibatchLoader(batch, epochs=1, minibatches=2, tokens_per_microbatch=64))
    assert not parts[0].ends_step
    agent.training_step(parts[0], 0)
    # a run that is stopped inside the step goes on with it
    checkpoint = {"state_dict": agent.state_dict()}
    agent.on_save_checkpoint(checkpoint)
    agent = make.agent(estimator=GroupRelative())
    agent.on_load_checkpoint(checkpoint)
    agent.load_state_dict(checkpoint["state_dict"])
    for part in parts[1:]:
        agent.training_step(part, 0)
    first = parts[: 1 + next(n for n, part in enumerate(parts) if part.ends_step)]
    assert len(first) < len(parts)
    tokens = sum(int(part.samples.sampled.sum()) for part in first)
    assert agent.preparation.totals()["tokens"] == tokens


def vars_of(samples) -> dict[str, torch.Tensor]:
    return {name: getattr(samples, name) for name in samples.__slots__}
