"""Exploitability of trained policies in Kuhn poker, from the episodes of evaluations against the random player.

    python -m ragen_pl.evaluate ckpt=last validation_sets=two_player greedy=false validation.episodes=4096 to=FOLDER
    python benchmarks/kuhn.py FOLDER …

A response begins with a thought, so the probability of an action has no closed form. It is counted: the shares of Pass,
of Bet and of responses without a valid action, which give up the pot, at each of the 12 information sets. The random
player reaches all of them that the policy's own moves allow. The others count as 1/2, which changes nothing, for no
opponent can reach them either. The interval is a parametric bootstrap of the counts; their noise makes an estimate too
high on average.
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
Counts = Mapping[InformationSet, tuple[int, int, int]]
"""Numbers of Pass, of Bet and of responses without a valid action at each information set."""


def counted_actions(records: Iterable[Mapping[str, Any]]) -> dict[InformationSet, tuple[int, ...]]:
    """Return the numbers of actions at each information set, see `Counts`.

    Args:
        records: Episodes of Kuhn poker with `env.invalid_ends=true`.

    Raises:
        ValueError: A turn shows something else than an information set.
    """
    names = {_seen(*one): one for one in information_sets()}
    counts = {one: [0, 0, 0] for one in information_sets()}
    for record in records:
        for turn in record["turns"]:
            seen = turn["observation"]
            if seen not in names:
                raise ValueError(f"expected an observation of Kuhn poker, found {seen!r}")
            bets = turn["actions"] == [KuhnPoker.action_names[BET]]
            counts[names[seen]][int(bets) if turn["valid"] else 2] += 1
    return {one: tuple(numbers) for one, numbers in counts.items()}


def estimated_exploitability(counts: Counts) -> tuple[float, float, float]:
    """Return the exploitability of a policy with the bounds of its 95% interval."""
    rng = np.random.default_rng(0)
    shares = {one: np.array(numbers) / max(1, sum(numbers)) for one, numbers in counts.items()}
    drawn = [
        _exploitability(
            {
                one: tuple(rng.multinomial(sum(numbers), shares[one])) if sum(numbers) else numbers
                for one, numbers in counts.items()
            }
        )
        for _ in range(_RESAMPLES)
    ]
    low, high = np.quantile(drawn, _QUANTILES)
    return _exploitability(counts), float(low), float(high)


def _exploitability(counts: Counts) -> float:
    strategy = {
        one: bets / (passes + bets) if passes + bets else 0.5
        for one, (passes, bets, _) in counts.items()
    }
    given_up = {one: numbers[2] / max(1, sum(numbers)) for one, numbers in counts.items()}
    return exploitability(strategy, gives_up=given_up)


def _seen(card: int, history: str) -> str:
    """Return the observation of the seat that decides at an information set."""
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
        counts = counted_actions(_records(folder))
        value, low, high = estimated_exploitability(counts)
        print(f"{folder}: exploitability {value:.3f} [{low:.3f}, {high:.3f}]")
        for (card, history), numbers in counts.items():
            print(
                f"  {CARDS[card]} after {history or 'nothing':8}"
                + "".join(
                    f" {name} {number / max(1, sum(numbers)):.3f}"
                    for name, number in zip(("pass", "bet", "none"), numbers, strict=True)
                )
                + f" of {sum(numbers)}"
            )


if __name__ == "__main__":
    main()
