"""Exploitability of trained policies in Kuhn poker, from the episodes of evaluations against the random player.

    python -m ragen_pl.evaluate ckpt=last validation_sets=two_player greedy=false validation.episodes=4096 to=FOLDER
    python benchmarks/kuhn.py FOLDER …

A response begins with a thought, so the probability of an action has no closed form. It is counted: the share of Bet
among the policy's valid answers at each of the 12 information sets. The random player reaches all of them that the
policy's own moves allow. The others count as 1/2, which changes nothing, for a best response can't reach them either.
The interval is a parametric bootstrap of the counts; noise of the shares makes an estimate too high, never too low.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ragen_pl.base.records import FILE, read_records
from ragen_pl.envs.kuhn_poker import (
    BET,
    CARDS,
    HISTORIES,
    KuhnPoker,
    exploitability,
    information_sets,
)

SETS = ("random_first", "random_second")
_RESAMPLES, _QUANTILES = 200, (0.025, 0.975)

InformationSet = tuple[int, str]
Counts = Mapping[InformationSet, tuple[int, int]]
"""Number of Pass and of Bet at each information set."""


def counted_actions(records: Iterable[Mapping[str, Any]]) -> tuple[dict[Any, Any], int]:
    """Return the actions at each information set, and the number of responses without a valid one.

    Args:
        records: Episodes of Kuhn poker.

    Raises:
        ValueError: A turn shows something else than an information set.
    """
    names = {_seen(*one): one for one in information_sets()}
    counts = {one: [0, 0] for one in information_sets()}
    invalid = 0
    for record in records:
        for turn in record["turns"]:
            seen = turn["observation"]
            if seen not in names:
                raise ValueError(f"expected an observation of Kuhn poker, found {seen!r}")
            if turn["valid"]:
                counts[names[seen]][turn["actions"] == [KuhnPoker.action_names[BET]]] += 1
            else:
                invalid += 1
    return {one: (passes, bets) for one, (passes, bets) in counts.items()}, invalid


def estimated_exploitability(counts: Counts) -> tuple[float, float, float]:
    """Return the exploitability of a policy with the bounds of its 95% interval."""
    rng = np.random.default_rng(0)
    shares = {
        one: bets / total if (total := passes + bets) else 0.5
        for one, (passes, bets) in counts.items()
    }
    drawn = [
        exploitability(
            {
                one: rng.binomial(total, shares[one]) / total
                if (total := sum(counts[one]))
                else 0.5
                for one in counts
            }
        )
        for _ in range(_RESAMPLES)
    ]
    low, high = np.quantile(drawn, _QUANTILES)
    return exploitability(shares), float(low), float(high)


def _seen(card: int, history: str) -> str:
    """Return what the seat sees that decides at an information set."""
    game = KuhnPoker()
    seat = 0 if history in HISTORIES[0] else 1
    game.cards, game.history = (card, card), history
    return str(game.observe(seat))


def _records(folder: Path) -> list[dict[str, Any]]:
    files = [folder / name / FILE for name in SETS]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise SystemExit(
            f"{missing[0]}: there is no such file; give the folder of an evaluation with validation_sets=two_player"
        )
    return [record for file in files for record in read_records(file)]


def main() -> None:
    """Print exploitability and shares of Bet for each evaluation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="+", type=Path, help="folder of an evaluation")
    for folder in parser.parse_args().folder:
        counts, invalid = counted_actions(_records(folder))
        value, low, high = estimated_exploitability(counts)
        print(f"{folder}: exploitability {value:.3f} [{low:.3f}, {high:.3f}], invalid {invalid}")
        for (card, history), (passes, bets) in counts.items():
            share = f"{bets / (passes + bets):.3f}" if passes + bets else "-"
            print(
                f"  {CARDS[card]} after {history or 'nothing':8} bet {share:>5} of {passes + bets}"
            )


if __name__ == "__main__":
    main()
