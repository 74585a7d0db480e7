"""Tokens of a mixture in the loss: each environment has its share, however episodes and minibatches are divided."""

from __future__ import annotations

import pytest
import torch
from support.episodes.played_agents import build_agent, play

from ragen_pl.data.collate import collate
from ragen_pl.data.loader import MinibatchLoader

SHARES = {"a": 0.25, "b": 0.75}


def prepared(window):
    """Return an agent and its batch of groups that are in environments a and b in turn."""
    agent = build_agent(environments=SHARES)
    played = play(agent, window=window)
    for one in played:
        one.environment = "ab"[one.group % 2]
    return agent, agent.prepare(collate(played, agent.policy.bundle, shares=SHARES))


@pytest.mark.parametrize("window", [1, 2, "all"])
def test_each_environment_has_its_share_of_the_loss(window):
    _, batch = prepared(window)
    samples = batch.samples
    weight, tokens = samples.loss_weight.sum(1), samples.loss_mask.sum(1).float()
    environment = batch.episodes.environment[samples.episode]
    total = float(weight.sum())
    assert total == pytest.approx(float(tokens.sum()))
    for number, share in enumerate(SHARES.values()):
        of_environment = environment == number
        assert float(weight[of_environment].sum()) == pytest.approx(share * total, rel=1e-5)
        assert abs(float(tokens[of_environment].sum()) - share * total) > 1


def test_the_gradient_does_not_depend_on_the_microbatches():
    agent, batch = prepared(1)
    gradients = []
    for tokens in (None, 150):
        agent.zero_grad()
        loader = MinibatchLoader(batch, epochs=1, minibatches=1, tokens_per_microbatch=tokens)
        assert (len(loader) > 1) == (tokens is not None)
        for minibatch in loader:
            loss, _ = agent.losses(minibatch)
            (loss / loader.accumulate).backward()
        grads = [p.grad.flatten() for p in agent.policy.parameters() if p.grad is not None]
        gradients.append(torch.cat(grads))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    assert float(gradients[0].abs().sum()) > 0
