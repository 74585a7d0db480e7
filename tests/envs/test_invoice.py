"""Invoice checking: its errors, what a decision and its reason are worth, and what trivial players earn."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from support.episodes.players import play

from envs.invoice import DOCUMENTS, FIELDS, ITEMS, Invoice, Line
from envs.tools import call_text

LARGE = {"lines": 5, "max_number": 99}


def begin(
    lines: list[Line], *, wrong: Line | None = None, read: bool = True, **settings
) -> Invoice:
    env = Invoice(**settings)
    env.reset(seed=0)
    env.lines, env.wrong_line = lines, wrong
    for document in DOCUMENTS if read else ():
        env.step(call_text("open", document=document))
    return env


def decide(env: Invoice, verdict: str, reason: str) -> float:
    _, reward, over, _, info = env.step(call_text("decide", verdict=verdict, reason=reason))
    assert over and sum(info["reward_parts"].values()) == pytest.approx(reward)
    return reward


RIGHT = Line("lamp", 3, 4, 2, 2, 4, 8)
WRONG = Line("desk", 3, 4, 2, 3, 4, 12)


@pytest.mark.parametrize("settings", [{}, LARGE, {"lines": 1}])
def test_the_careful_clerk_decides_rightly_and_says_why(settings):
    env, rng, errors = Invoice(**settings), np.random.default_rng(0), Counter()
    for seed in range(300):
        env.reset(seed=seed)
        found = [line.error() for line in env.lines if line.error()]
        assert len(found) <= 1 and (env.wrong_line is None) == (not found)
        errors.update(found[0][:1] if found else ["none"])
        total, success, _ = play(env, lambda env: env.optimal_action(rng), limit=8)
        assert success and total == pytest.approx(0.97)
    assert set(errors) == {*FIELDS, "none"} and 0.3 < errors["none"] / 300 < 0.5


def test_the_documents_show_the_lines():
    env = begin([RIGHT, Line("desk", 0, 0, 0, 1, 5, 5)], read=False)
    shown = [env.step(call_text("open", document=document))[0] for document in DOCUMENTS]
    assert shown == [
        "order: 3 lamp at 4",
        "delivery: 2 lamp",
        "invoice: 2 lamp at 4 sum 8, 1 desk at 5 sum 5",
    ]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (RIGHT, None),
        (WRONG, ("count", 2)),
        (Line("desk", 3, 4, 3, 3, 5, 15), ("price", 4)),
        (Line("desk", 3, 4, 3, 3, 4, 13), ("sum", 12)),
        (Line("desk", 0, 0, 0, 3, 4, 12), ("item", None)),
    ],
)
def test_the_error_of_a_line(line, error):
    assert line.error() == error


@pytest.mark.parametrize(
    ("verdict", "reason", "reward"),
    [
        ("refuse", "The desk has the wrong count: 2 were delivered.", 1.0),
        ("refuse", "DESK COUNT 2", 1.0),
        ("refuse", "desk count", 0.65),
        ("refuse", "desk count 3", 0.3),
        ("refuse", "desk count 2 3", 0.3),
        ("refuse", "desk", 0.3),
        ("refuse", "count 2", 0.3),
        ("refuse", "desk count price sum 2", 0.3),
        ("refuse", " ".join((*ITEMS, *FIELDS, *map(str, range(30)))), 0.3),
        ("refuse", "ok desk count 2", 0.3),
        ("refuse", "", 0.3),
        ("accept", "ok", -1.0),
        ("accept", "desk count 2", -1.0),
    ],
)
def test_a_refusal_is_worth_its_reason(verdict, reason, reward):
    assert decide(begin([RIGHT, WRONG], wrong=WRONG), verdict, reason) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("verdict", "reason", "reward"),
    [
        ("accept", "All is ok.", 1.0),
        ("accept", "ok, but the lamp", 0.3),
        ("refuse", "lamp count 2", 0.0),
    ],
)
def test_a_right_invoice_is_worth_an_acceptance(verdict, reason, reward):
    assert decide(begin([RIGHT]), verdict, reason) == pytest.approx(reward)


def test_a_reason_without_the_documents_is_a_guess():
    assert decide(begin([WRONG], wrong=WRONG, read=False), "refuse", "desk count 2") == 0.0


@pytest.mark.parametrize(
    "choose",
    [
        lambda env: call_text("decide", verdict="accept", reason="ok"),
        *(
            lambda env, reason=reason: call_text("decide", verdict="refuse", reason=reason)
            for reason in ("", "lamp count 2", "desk price", " ".join((*ITEMS, *FIELDS)))
        ),
        lambda env: call_text("open", document="invoice"),
        lambda env: "null",
    ],
)
def test_trivial_players_earn_little(choose):
    env, totals, wins = Invoice(), [], 0
    for seed in range(200):
        env.reset(seed=seed)
        total, success, _ = play(env, choose, limit=8)
        totals.append(total)
        wins += success
    assert np.mean(totals) < 0.05 and wins == 0


def test_wrong_calls_are_invalid():
    env = begin([RIGHT], read=False)
    for call in (
        call_text("open", document="mail"),
        call_text("decide", verdict="maybe", reason="ok"),
        call_text("decide", verdict="accept"),
    ):
        assert not env.step(call)[4]["action_is_valid"]


@pytest.mark.parametrize("setting", [{"lines": 6}, {"max_number": 1}, {"wrong_fraction": 2}])
def test_settings_out_of_range_raise(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        Invoice(**setting)
