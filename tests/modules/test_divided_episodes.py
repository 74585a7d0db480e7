"""The gradient does not depend on how an episode is divided into samples; averages over samples are refused."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from support.episodes.call_trees import after, call, episode

from ragen_pl.algorithms.advantages.group import GroupRelative
from ragen_pl.algorithms.aggregation import Aggregation
from ragen_pl.algorithms.policy_loss import PolicyLoss
from ragen_pl.algorithms.ratio_losses import (
    ClippedWeightLoss,
    DivergencePolicyLoss,
    SequencePolicyLoss,
    Unit,
)
from ragen_pl.data.batch import Samples, TrajectoryBatch
from ragen_pl.data.collate import collate
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.engines.errors import RolloutError
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.losses import KLPlace, ReferenceKL, UpdateLoss
from ragen_pl.modules.policy import TokenScores

FREE = [Aggregation.TOKEN_MEAN, Aggregation.EPISODE_MEAN]
OVER_ROWS = [
    Aggregation.SEQ_MEAN_TOKEN_MEAN,
    Aggregation.SEQ_MEAN_TOKEN_SUM,
    Aggregation.CONSTANT,
]


def in_float64(bundle: ModelBundle) -> None:
    """Replace the norms, which compute in float32 whatever their type; the pass over a token reads those."""
    bundle.token_pass = None
    for module in list(bundle.model.modules()):
        for name, norm in module.named_children():
            if hasattr(norm, "variance_epsilon"):
                size = len(norm.weight)
                setattr(module, name, torch.nn.RMSNorm(size, eps=norm.variance_epsilon))


def divided(samples: Samples) -> Samples:
    """Return a sample for each turn, with all that comes before it as context."""
    pairs = [
        (row, number)
        for row, turn in enumerate(samples.turn)
        for number in turn[turn >= 0].unique().tolist()
    ]
    rows, turns = torch.tensor(pairs).unbind(1)
    columns = {field.name: getattr(samples, field.name)[rows].clone() for field in fields(samples)}
    parts = Samples(**columns)
    other = parts.turn != turns[:, None]
    for name in ("turn", "token"):
        getattr(parts, name)[other] = -1
    for name in ("loss_mask", "loss_weight", "advantage_mask", "kl_mask", "spans", "advantages"):
        getattr(parts, name)[other] = 0
    place = torch.arange(other.shape[1])
    parts.length = torch.where(other, 0, place + 1).amax(1)
    return parts


def gradient(make, agent, batch: TrajectoryBatch) -> torch.Tensor:
    """Return the gradient of one step, float64."""
    (minibatch,) = MinibatchLoader(batch, epochs=1, minibatches=1)
    # of fractions in float32
    minibatch.episodes = minibatch.episodes.double().round()
    _, gradients = make.gradient(agent, [minibatch])
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


@pytest.mark.parametrize("aggregation", FREE)
@pytest.mark.parametrize(
    "policy",
    [
        PolicyLoss,
        SequencePolicyLoss,
        ClippedWeightLoss,
        DivergencePolicyLoss,
        partial(DivergencePolicyLoss, level=Unit.TURN),
    ],
    ids=["ppo", "gspo", "cispo", "dppo", "dppo_turn"],
)
@pytest.mark.parametrize("estimator", ["k3", "full", "full_reverse"])
def test_gradient_does_not_depend_on_the_division(make, policy, aggregation, estimator) -> None:
    kl = ReferenceKL(coefficient=0.1, aggregation=Aggregation.TOKEN_MEAN, estimator=estimator)
    loss = UpdateLoss(policy=policy(aggregation=aggregation), kl=kl, entropy_coefficient=0.1)
    agent = make.agent(loss=loss, change=in_float64)
    batch = make.batch(agent, window="all")
    assert int(batch.episodes.turns.max()) == 3 and len(batch.samples) == len(batch.episodes.turns)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    agent.double()
    batch.reference = batch.reference.double()
    whole = gradient(make, agent, batch)
    parts = replace(batch, samples=divided(batch.samples))
    assert len(parts.samples) > len(batch.samples)
    assert whole.dtype == torch.float64 and float(whole.abs().max()) > 1e-2
    assert float((whole - gradient(make, agent, parts)).abs().max()) < 1e-12


def fork():
    """An episode of two samples: the second and third calls begin anew, and the last goes on from the first."""
    main = call([20, 21], [30, 31])
    helper = call([22], [32])
    again = call(after(helper, 40), [33])
    return episode(main, helper, again, call(after(main, 41, 42), [34, 35], reward=1.0))


def compaction():
    """An episode of two samples, the first of which ends with a summary."""
    first = call([20], [30])
    summary = call(after(first, 40), [31, 32], is_task_step=False)
    return episode(first, summary, call([20, 41], [33], reward=1.0))


def settings_over_rows() -> list[UpdateLoss]:
    """Return losses of which one average each counts rows."""
    policies = [
        PolicyLoss(aggregation=how, constant=9.0 if how is Aggregation.CONSTANT else None)
        for how in OVER_ROWS
    ]
    policies += [SequencePolicyLoss(), DivergencePolicyLoss(level=Unit.SEQUENCE)]
    losses = [UpdateLoss(policy=policy) for policy in policies]
    return [*losses, UpdateLoss(kl=ReferenceKL(coefficient=0.1))]


@pytest.mark.parametrize("loss", settings_over_rows(), ids=range(6))
def test_averages_over_rows_are_refused_where_the_history_divides_episodes(make, loss) -> None:
    agent = make.agent(loss=loss, estimator=GroupRelative())
    bundle = agent.policy.bundle
    setting = r"algorithm\.loss\.(policy|kl)\.(aggregation=(seq-mean|constant)|level=sequence)"
    for played in (fork(), compaction()):
        batch = collate([played], bundle)
        assert len(batch.samples) == 2
        with pytest.raises(RolloutError, match=f"{setting}.* history of 1 episodes .* set token-"):
            agent.prepare(batch)
    # a sample for each turn, as a window of turns gives, and a summary in the only sample
    apart = episode(call([20], [30]), call([21], [31]), call([22], [32], reward=1.0))
    first = call([20], [30])
    whole = episode(first, call(after(first, 40), [31], is_task_step=False))
    for played, rows in ((apart, 3), (whole, 1)):
        assert len(agent.prepare(collate([played], bundle)).samples) == rows


@pytest.mark.parametrize("aggregation", FREE)
def test_other_averages_take_episodes_of_several_samples(make, aggregation) -> None:
    unused = ReferenceKL(coefficient=0.0)
    in_reward = ReferenceKL(coefficient=0.1, place=KLPlace.REWARD, estimator="k1")
    by_token = ReferenceKL(coefficient=0.1, aggregation=Aggregation.TOKEN_MEAN)
    for kl in (None, unused, in_reward, by_token):
        loss = UpdateLoss(policy=PolicyLoss(aggregation=aggregation), kl=kl)
        agent = make.agent(loss=loss, estimator=GroupRelative())
        batch = agent.prepare(collate([fork(), compaction()], agent.policy.bundle))
        assert len(batch.samples) == 4 and bool(batch.samples.loss_mask.any())


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [(Aggregation.TOKEN_MEAN, (1 / 9, 1 / 9)), (Aggregation.EPISODE_MEAN, (1 / 12, 1 / 6))],
)
def test_weights_of_tokens(make, aggregation, weights) -> None:
    """By hand: episodes of 6 and 3 tokens, the first of them in two samples."""
    other = episode(call([20, 21], [36, 37, 38]))
    (step,) = MinibatchLoader(collate([fork(), other], make.bundle()), epochs=1, minibatches=1)
    samples, loss = step.samples, UpdateLoss(policy=PolicyLoss(aggregation=aggregation))
    samples.advantages = torch.ones_like(samples.advantages)
    logprobs = samples.old_logprobs.clone().requires_grad_()
    loss(TokenScores(logprobs, torch.zeros_like(logprobs)), step).loss.backward()
    sampled = samples.turn >= 0
    owners = samples.episode[:, None].expand_as(sampled)[sampled]
    torch.testing.assert_close(-logprobs.grad[sampled], torch.tensor(weights)[owners])
