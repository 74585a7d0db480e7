"""A rollout engine that samples from another distribution than the trainer's: the correction removes the bias."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ragen_pl.algorithms.advantages.reinforce import RawReturn
from ragen_pl.algorithms.mismatch import TruncatedWeights
from ragen_pl.data.collate import collate
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.trajectory import Span


def expected_gradient(make, *, bias, correction):
    """Return the policy's gradient of one turn, in expectation over an engine's responses of one token.

    Args:
        make: agents and batches.
        bias: what the engine's distribution has in addition to the policy's, in nats, by token.
        correction: `UpdateLoss.mismatch`.
    """
    agent = make.agent(estimator=RawReturn(), loss=UpdateLoss(mismatch=correction, whiten=False))
    bundle = agent.policy.bundle
    (played,) = make.play(agent, groups=1, members=1)
    (turn,) = played.turns
    with torch.no_grad():
        logits = bundle.model(torch.from_numpy(turn.prompt_ids)[None]).logits[0, -1].float()
    logits[bundle.banned(logits.device)] = -torch.inf
    behavior = (logits + bias[: len(logits)]).log_softmax(-1)
    tokens = behavior.isfinite().nonzero().squeeze(-1).tolist()
    trajectories = [
        replace(
            played,
            member=number,
            turns=[
                replace(
                    turn,
                    response_ids=np.array([token]),
                    response_logprobs=behavior[[token]].numpy(),
                    spans=np.array([Span.ACTION], dtype=np.int8),
                    reward_terms={"environment": float(np.sin(token))},
                )
            ],
        )
        for number, token in enumerate(tokens)
    ]
    batch = agent.prepare(collate(trajectories, bundle))
    samples = batch.samples
    trained = samples.loss_mask
    samples.loss_weight = torch.where(trained, behavior.exp()[samples.input_ids], 0.0)
    _, gradient = make.gradient(agent, [make.minibatch(batch)])
    return torch.cat(
        [value.flatten() for name, value in gradient.items() if name.startswith("policy")]
    )


def test_the_correction_removes_the_bias_of_an_engine(make):
    bias = 0.7 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    expected = expected_gradient(make, bias=torch.zeros(4096), correction=None)
    corrected = expected_gradient(make, bias=bias, correction=TruncatedWeights(cap=1e6))
    biased = expected_gradient(make, bias=bias, correction=None)
    size = expected.norm()
    assert (corrected - expected).norm() < 1e-4 * size
    assert (biased - expected).norm() > 0.1 * size
    # a cap lets some bias back in, less than there was
    truncated = expected_gradient(make, bias=bias, correction=TruncatedWeights(cap=2.0))
    assert 1e-3 * size < (truncated - expected).norm() < (biased - expected).norm()
