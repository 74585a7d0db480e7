"""The update's gradient does not depend on how a step is split, nor on tokens off the masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ragen_pl.algorithms.aggregation import Aggregation
from ragen_pl.algorithms.masks import action_span, sampled, until_action
from ragen_pl.algorithms.policy_loss import PolicyLoss
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss
from ragen_pl.modules.masking import Masks
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.trajectory import Span


def loss_settings(aggregation=Aggregation.TOKEN_MEAN, *, coefficient=0.1, **changes):
    constant = 20.0 if aggregation is Aggregation.CONSTANT else None
    policy = PolicyLoss(aggregation=aggregation, constant=constant)
    own = (Aggregation.CONSTANT, Aggregation.EPISODE_MEAN)
    held = Aggregation.SEQ_MEAN_TOKEN_SUM if aggregation in own else aggregation
    kl = ReferenceKL(coefficient=coefficient, aggregation=held)
    return UpdateLoss(policy=policy, kl=kl, **changes)


def nudge(agent):
    """Move the policy off the weights that played, so that ratios and divergences are not trivial."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def assert_close(actual, expected, *, tolerance=1e-5):
    loss, gradient = actual
    other_loss, other_gradient = expected
    assert loss == pytest.approx(other_loss, rel=1e-4, abs=1e-6)
    assert gradient.keys() == other_gradient.keys()
    largest = max(float(value.abs().max()) for value in gradient.values())
    assert largest > 1e-3
    for name, value in gradient.items():
        assert float((value - other_gradient[name]).abs().max()) < tolerance * largest, name


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("own_critic", [False, True], ids=["shared", "own"])
def test_gradient_does_not_depend_on_accumulation(make, aggregation, own_critic):
    agent = make.agent(loss=loss_settings(aggregation), own_critic=own_critic)
    batch = make.batch(agent)
    nudge(agent)

    def split(parts):
        return list(MinibatchLoader(batch, epochs=1, minibatches=1, accumulate=parts))

    whole = make.gradient(agent, split(1))
    for parts in (2, 3, 4, 40):  # 40: more parts than samples, so some hold padding rows only
        assert_close(whole, make.gradient(agent, split(parts)))


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("own_critic", [False, True], ids=["shared", "own"])
def test_gradient_does_not_depend_on_microbatches(make, aggregation, own_critic):
    loss = loss_settings(aggregation, entropy_coefficient=0.05)
    agent = make.agent(loss=loss, own_critic=own_critic)
    batch = make.batch(agent, window="all")
    nudge(agent)
    longest = int(batch.samples.length.max())

    def split(**changes):
        return list(MinibatchLoader(batch, epochs=1, minibatches=1, **changes))

    (one,) = split(length_buckets=1)
    assert len(one.microbatches) == 1
    whole = make.gradient(agent, [one])
    for tokens in (1, longest, 2 * longest + 9, 10 * longest):
        assert_close(whole, make.gradient(agent, split(tokens_per_microbatch=tokens)))
    # other ranks need more microbatches
    more = split(length_buckets=3, max_over_ranks=lambda counts: counts + 2)
    assert len(more[0].samples) == len(batch.samples) + 2
    assert_close(whole, make.gradient(agent, more))
    more = split(tokens_per_microbatch=longest, max_over_ranks=lambda count: count + 9)
    assert sum(len(part.samples) for part in more) > len(batch.samples)
    assert_close(whole, make.gradient(agent, more))


@pytest.mark.parametrize("aggregation", [Aggregation.TOKEN_MEAN, Aggregation.SEQ_MEAN_TOKEN_SUM])
def test_gradient_does_not_depend_on_the_split_over_ranks(make, aggregation):
    """DDP averages the ranks' gradients; one rank has a sample more than it needs, another too few."""
    agent = make.agent(loss=loss_settings(aggregation))
    batch = make.batch(agent)
    nudge(agent)
    whole = make.gradient(agent, list(MinibatchLoader(batch, epochs=1, minibatches=1)))
    rows = torch.arange(len(batch.samples))
    ranks = [
        replace(batch, samples=batch.samples.select(part))
        for part in (rows[:1], rows[1:4], rows[4:])
    ]
    counts = []

    def note(local):
        counts.append(local)
        return local

    for rank in ranks:
        MinibatchLoader(rank, epochs=1, minibatches=1, sum_over_ranks=note)
    total = torch.stack(counts).sum(0)
    parts = [
        make.gradient(
            agent,
            list(
                MinibatchLoader(
                    rank,
                    epochs=1,
                    minibatches=1,
                    accumulate=2,
                    world_size=3,
                    sum_over_ranks=lambda local: total,
                )
            ),
        )
        for rank in ranks
    ]
    mean_loss = sum(loss for loss, _ in parts) / 3
    mean = {
        name: sum(gradient.get(name, torch.zeros_like(value)) for _, gradient in parts) / 3
        for name, value in whole[1].items()
    }
    assert_close(whole, (mean_loss, mean))


def test_gradient_with_images_does_not_depend_on_accumulation(make):
    for window in (1, "all"):
        agent = make.agent(loss=loss_settings(), images=True)
        batch = make.batch(agent, window=window, groups=3)
        assert len(batch.images) > 1
        nudge(agent)
        whole = make.gradient(agent, list(MinibatchLoader(batch, epochs=1, minibatches=1)))
        split = list(MinibatchLoader(batch, epochs=1, minibatches=1, accumulate=3))
        assert_close(whole, make.gradient(agent, split), tolerance=1e-4)


@pytest.mark.parametrize("images", [False, True])
def test_gradient_does_not_depend_on_gradient_checkpointing(make, images):
    agent = make.agent(loss=loss_settings(), images=images, own_critic=True)
    batch = make.batch(agent, window="all", groups=3)
    nudge(agent)
    agent.train()
    minibatch = make.minibatch(batch)
    calls = []
    for model in (agent.policy.model, agent.critic.model):
        layer = model.get_decoder().layers[0].mlp
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    whole, once = make.gradient(agent, [minibatch]), len(calls)
    policy = PolicyModule(agent.policy.bundle, update=UpdateSettings(gradient_checkpointing=True))
    CriticModule(32, backbone=agent.critic.backbone, gradient_checkpointing=True)
    assert_close(whole, make.gradient(agent, [minibatch]), tolerance=1e-6)
    assert len(calls) == 3 * once
    # off where nothing is trained
    with torch.no_grad():
        policy.eval()(batch.samples, batch.images)
    assert len(calls) == 3 * once + 1


def test_gradient_checkpointing_is_refused_where_a_model_has_none(make, monkeypatch):
    bundle = make.bundle()
    monkeypatch.setattr(type(bundle.model), "supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match=r"update\.gradient_checkpointing=true: .*set false"):
        PolicyModule(bundle, update=UpdateSettings(gradient_checkpointing=True))


def test_tokens_off_the_masks_have_no_influence(make):
    agent = make.agent(
        loss=loss_settings(value_clip=0.2),
        masks=Masks(loss=action_span, advantage=until_action),
    )
    batch = make.batch(agent)
    nudge(agent)
    minibatch = make.minibatch(batch)
    before = make.gradient(agent, [minibatch])
    samples = minibatch.samples
    off_loss, off_advantage = ~samples.loss_mask, ~samples.advantage_mask
    assert (off_loss & (samples.turn >= 0)).any() and (off_advantage & (samples.turn >= 0)).any()
    samples.advantages[off_loss] = 1e3
    samples.old_logprobs[off_loss] = -50.0
    samples.returns[off_advantage] = 1e3
    samples.values[off_advantage] = -1e3
    assert_close(before, make.gradient(agent, [minibatch]), tolerance=1e-9)


def test_padding_has_no_influence(make):
    agent = make.agent(loss=loss_settings())
    minibatch = make.minibatch(make.batch(agent, window="all"))
    nudge(agent)
    before = make.gradient(agent, [minibatch])
    samples = minibatch.samples
    padding = torch.arange(samples.input_ids.shape[1]) >= samples.length[:, None]
    assert padding.any()
    samples.input_ids[padding] = 77
    assert_close(before, make.gradient(agent, [minibatch]), tolerance=1e-9)


def test_padding_rows_have_no_influence(make):
    agent = make.agent(loss=loss_settings(entropy_coefficient=0.1))
    minibatch = make.minibatch(make.batch(agent))
    nudge(agent)
    rows = torch.arange(len(minibatch.samples))
    numbers = minibatch.samples.token[:-2][minibatch.samples.turn[:-2] >= 0]
    without = replace(
        minibatch,
        samples=minibatch.samples.select(rows[:-2]),
        reference=minibatch.reference[numbers],
        microbatches=[rows[:-2]],
    )
    samples = make.copied(minibatch.samples)
    samples.weight[-2:] = 0
    for garbage in (samples.advantages, samples.returns):
        garbage[-2:] = 1e3
    filled = replace(minibatch, samples=samples)
    gradient, other = make.gradient(agent, [without]), make.gradient(agent, [filled])
    assert_close(gradient, other)
    metrics = agent.statistics.totals()
    assert metrics["tokens"] == 2 * int(without.samples.loss_mask.sum())


def test_value_loss_covers_tokens_outside_the_advantage_mask(make):
    agent = make.agent(masks=Masks(advantage=until_action))
    minibatch = make.minibatch(make.batch(agent))
    samples = minibatch.samples

    def figure():
        agent.statistics.reset()
        agent.training_step(minibatch, 0)
        return agent.statistics.totals()["value_loss"]

    mask = samples.value_mask
    assert torch.equal(mask, samples.loss_mask)
    # the tag after an action is worth what the action is
    after = mask & ~samples.advantage_mask
    assert after.any()
    assert torch.isin(samples.returns[after], samples.returns[samples.advantage_mask]).all()
    values = samples.values[mask]
    expected = (
        0.5 * float(((values - samples.returns[mask]) ** 2).sum()) / float(minibatch.value_tokens)
    )
    assert figure() == pytest.approx(expected, rel=1e-4)
    samples.returns[~mask] = 9.0
    assert figure() == pytest.approx(expected, rel=1e-4)
    samples.returns[mask] += 1.0
    assert figure() != pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("estimator", ["full", "full_reverse", "k1", "k2", "k3"])
def test_divergence_is_zero_at_first_and_ignores_the_action(make, estimator):
    loss = UpdateLoss(kl=ReferenceKL(coefficient=1.0, estimator=estimator))
    agent = make.agent(loss=loss)
    minibatch = make.minibatch(make.batch(agent))
    agent.training_step(minibatch, 0)
    metrics = agent.statistics.totals()
    spans = minibatch.samples.spans
    held = (minibatch.samples.turn >= 0) & (spans != Span.ACTION)
    # a sum and a mean, which some processors round to a little more or less than 0
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["kl_loss"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["kl_tokens"] == int(held.sum()) < int((minibatch.samples.turn >= 0).sum())
    nudge(agent)
    before = make.gradient(agent, [minibatch])
    action = minibatch.samples.token[(minibatch.samples.turn >= 0) & (spans == Span.ACTION)]
    minibatch.reference[action] -= 3.0
    assert_close(before, make.gradient(agent, [minibatch]), tolerance=1e-9)
    others = minibatch.samples.token[held]
    minibatch.reference[others] -= 3.0
    assert make.gradient(agent, [minibatch])[0] != pytest.approx(before[0], rel=1e-3)


def test_without_the_policy_loss_advantages_move_nothing(make):
    kl = ReferenceKL(
        coefficient=0.5, estimator="full_reverse", mask=sampled, aggregation=Aggregation.TOKEN_MEAN
    )
    agent = make.agent(loss=UpdateLoss(policy_coefficient=0.0, kl=kl, value_coefficient=0.0))
    minibatch = make.minibatch(make.batch(agent))
    nudge(agent)
    before = make.gradient(agent, [minibatch])
    metrics = agent.statistics.totals()
    assert metrics["policy_loss"] != 0.0 and metrics["tokens"] > 0
    assert before[0] == pytest.approx(metrics["kl_loss"], rel=1e-5) and before[0] > 0
    minibatch.samples.advantages.mul_(-3.0).add_(1.0)
    assert_close(make.gradient(agent, [minibatch]), before, tolerance=1e-9)
    # a step with tokens of M_loss alone has none for the policy
    without = replace(minibatch, counted=torch.tensor([True, True, False, False]))
    assert not bool(agent.has_tokens(without)["policy"])
    assert bool(agent.has_tokens(minibatch)["policy"])
    agent.loss.policy_coefficient = 0.1
    assert bool(agent.has_tokens(without)["policy"])


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_policy_that_no_term_trains_is_refused(place):
    coefficient = 0.0 if place == "loss" else 0.1
    kl = ReferenceKL(coefficient=coefficient, estimator="k1", place=place)
    for penalty in (None, kl):
        with pytest.raises(ValueError, match=r"policy_coefficient=0: no other term .* set 1\.0"):
            UpdateLoss(policy_coefficient=0.0, kl=penalty)
    assert UpdateLoss(policy_coefficient=0.0, entropy_coefficient=0.1)
