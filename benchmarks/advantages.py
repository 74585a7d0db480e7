"""Time the advantage estimators on a large batch, and compare bi-level GAE with a plain loop over its tokens.

    python benchmarks/advantages.py

The batch has 128 trajectories of 4096 tokens in 10 turns; a tenth of the tokens is outside M_adv. The loop
implements the definition token by token in Python. Both results must agree.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.bilevel import bilevel_gae
from ragen_pl.algorithms.advantages.gae import masked_gae
from ragen_pl.algorithms.advantages.gigpo import gigpo
from ragen_pl.algorithms.advantages.group import grpo
from ragen_pl.algorithms.advantages.turn import turn_gae

FOUR = {"gamma_turn": 0.95, "lam_turn": 0.9, "gamma_token": 1.0, "lam_token": 0.99}


def problem(rows: int, tokens: int, turns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rewards, values, turn indices and bootstraps."""
    generator = torch.Generator().manual_seed(0)
    turn = (torch.arange(tokens) * turns // tokens).expand(rows, tokens).clone()
    turn[torch.rand(rows, tokens, generator=generator) < 0.1] = -1
    rewards = torch.zeros(rows, tokens)
    for number in range(turns):
        last = ((turn == number) * torch.arange(tokens)).argmax(1, keepdim=True)
        rewards.scatter_(1, last, torch.rand(rows, 1, generator=generator))
    values = torch.randn(rows, tokens, generator=generator)
    return rewards, values, turn, torch.randn(rows, generator=generator)


def plain_loop(rewards: Tensor, values: Tensor, turn: Tensor, bootstrap: Tensor) -> Tensor:
    """Compute bi-level GAE token by token from its definition."""
    result = torch.zeros_like(values)
    for row in range(turn.shape[0]):
        following_value, following = float(bootstrap[row]), 0.0  # at the end of the next turn
        token_value = token_advantage = 0.0
        total, end = 0.0, -1
        ends: dict[int, int] = {}
        sums: dict[int, float] = {}
        for token in range(turn.shape[1]):
            number = int(turn[row, token])
            if number >= 0:
                ends[number] = token
                sums[number] = sums.get(number, 0.0) + float(rewards[row, token])
        of_turn: dict[int, float] = {}
        for number in sorted(ends, reverse=True):
            end, total = ends[number], sums[number]
            delta = total + FOUR["gamma_turn"] * following_value - float(values[row, end])
            following = delta + FOUR["gamma_turn"] * FOUR["lam_turn"] * following
            of_turn[number], following_value = following, float(values[row, end])
        for token in range(turn.shape[1] - 1, -1, -1):
            number = int(turn[row, token])
            if number < 0:
                continue
            value = float(values[row, token])
            if token == ends[number]:
                token_advantage = of_turn[number]
            else:
                delta = FOUR["gamma_token"] * token_value - value
                token_advantage = delta + FOUR["gamma_token"] * FOUR["lam_token"] * token_advantage
            token_value = value
            result[row, token] = token_advantage
    return result


def seconds(function: Callable[[], object], *, repeats: int, clock: Callable[[], float]) -> float:
    """Return the median time of a call."""
    function()
    times = []
    for _ in range(repeats):
        began = clock()
        function()
        times.append(clock() - began)
    return statistics.median(times)


def main() -> None:
    """Print a table of times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    rewards, values, turn, bootstrap = problem(args.rows, args.tokens, args.turns)
    ours = bilevel_gae(rewards, values, turn, bootstrap=bootstrap, **FOUR)[0]
    began = clock()
    theirs = plain_loop(rewards, values, turn, bootstrap)
    loop = clock() - began
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    group = torch.arange(args.rows) // 8
    of_turn = torch.rand(args.rows, args.turns)
    state = torch.randint(0, 16, (args.rows, args.turns))
    calls: dict[str, Callable[[], object]] = {
        "bi-level GAE": lambda: bilevel_gae(rewards, values, turn, bootstrap=bootstrap, **FOUR),
        "masked GAE": lambda: masked_gae(rewards, values, turn >= 0, gamma=1.0, lam=0.95),
        "turn-level GAE": lambda: turn_gae(rewards, values, turn, gamma=1.0, lam=0.95),
        "GRPO": lambda: grpo(of_turn.sum(1), group),
        "GiGPO": lambda: gigpo(of_turn.sum(1), group, of_turn, state, gamma=0.95, step_weight=1.0),
    }
    times = {name: seconds(call, repeats=9, clock=clock) for name, call in calls.items()}
    print(f"{args.rows} x {args.tokens} tokens, {args.turns} turns, {args.threads} thread(s)")
    for name, value in times.items():
        print(f"{name:16s} {1e3 * value:9.2f} ms")
    print(f"{'plain loop':16s} {1e3 * loop:9.0f} ms")
    print(f"bi-level GAE is {loop / times['bi-level GAE']:.0f}x as fast as the loop (wanted: 100x)")


if __name__ == "__main__":
    main()
