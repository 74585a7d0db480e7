"""Advantage functions and losses in a plain PyTorch loop, without Lightning and transformers.

The policy is a table of logits that samples two tokens in each of two turns. A turn has reward 1 if both
tokens are right. Run `python examples/advantages_only.py`.
"""

from __future__ import annotations

import argparse

import torch

from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.aggregation import Aggregation, aggregate
from ragen_pl.algorithms.credit import AdvantageInputs, place_turn_rewards
from ragen_pl.algorithms.policy_loss import clipped_surrogate
from ragen_pl.algorithms.value_loss import value_loss
from ragen_pl.algorithms.whitening import whiten

EPISODES, VOCABULARY = 64, 4
TURN = torch.tensor([0, 0, 1, 1])  # turn index of each token
RIGHT = torch.tensor([2, 1, 3, 0])


def main(*, updates: int = 60) -> list[float]:
    """Train the table. Return the mean return of each iteration; the maximum is 2."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(len(TURN), VOCABULARY, requires_grad=True)
    values = torch.zeros(len(TURN), requires_grad=True)
    optimizer = torch.optim.Adam([logits, values], lr=0.1)
    estimator = BilevelGAE(gamma_turn=0.95, lam_turn=0.9)
    turn, mask = TURN.expand(EPISODES, -1), torch.ones(EPISODES, len(TURN), dtype=torch.bool)
    curve: list[float] = []
    for _ in range(updates):
        with torch.no_grad():  # rollout phase
            behavior_distribution = logits.log_softmax(-1)
            tokens = torch.multinomial(
                behavior_distribution.exp(), EPISODES, replacement=True, generator=generator
            ).T
            behavior = behavior_distribution[torch.arange(len(TURN)), tokens]
            turn_rewards = (tokens == RIGHT).view(EPISODES, 2, 2).all(-1).float()
            estimates = estimator(
                AdvantageInputs(
                    rewards=place_turn_rewards(turn_rewards, turn, mask),
                    values=values.expand(EPISODES, -1),
                    advantage_mask=mask,
                    loss_mask=mask,
                    turn=turn,
                    group=torch.arange(EPISODES),
                    bootstrap=torch.zeros(EPISODES),
                    returns=turn_rewards.sum(1),
                )
            )
            advantages = whiten(estimates.advantages, mask)
            curve.append(float(turn_rewards.sum(1).mean()))
        for _ in range(2):  # update phase
            logprobs = logits.log_softmax(-1)[torch.arange(len(TURN)), tokens]
            surrogate = clipped_surrogate(
                logprobs, behavior, advantages, mask, clip_low=0.2, clip_high=0.28
            )
            error = value_loss(values.expand(EPISODES, -1), estimates.returns, mask)
            count = {
                "how": Aggregation.TOKEN_MEAN,
                "tokens": float(mask.sum()),
                "sequences": EPISODES,
            }
            loss = aggregate(surrogate.losses, mask, **count)
            loss = loss + 0.5 * aggregate(error.losses, mask, **count)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"return {curve[0]:.2f} -> {curve[-1]:.2f} of 2")
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=60)
    main(updates=parser.parse_args().updates)
