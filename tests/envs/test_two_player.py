"""Games of two players: rules, sums of rewards, scripted players and the exploitability of Kuhn poker."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest

from envs.kuhn_poker import (
    CARDS,
    HISTORIES,
    KuhnPoker,
    equilibrium,
    exploitability,
    game_value,
    information_sets,
    payoff,
)
from envs.tic_tac_toe import MARKS, TicTacToe, marked, optimal_moves, value, winner

GAMES = [TicTacToe, KuhnPoker]


def played(game, rng, *, seed, illegal=0.1, options=None):
    """Play a random game, some with an illegal move or a forfeit; return the summed rewards of each seat."""
    game.reset(seed=seed, options=options)
    totals, ended = np.zeros(2), False
    while not ended:
        mover = game.to_move()
        if rng.random() < illegal:
            _, reward, ended, _, info = game.forfeit(mover)
        else:
            action = int(rng.integers(len(game.action_names)))
            _, reward, ended, _, info = game.step(action)
            assert info["action_is_valid"] == info["action_is_effective"]
        assert info["seat_rewards"][mover] == reward
        assert info["seat_success"] == [one > 0 for one in info["seat_rewards"]]
        totals += info["seat_rewards"]
    return totals


@pytest.mark.parametrize("game", GAMES)
def test_rewards_of_the_seats_sum_to_zero(game):
    rng = np.random.default_rng(0)
    totals = np.array([played(game(), rng, seed=seed) for seed in range(400)])
    assert np.abs(totals.sum(1)).max() < 1e-6
    assert (totals[:, 0] > 0).any() and (totals[:, 1] > 0).any()


@pytest.mark.parametrize("game", GAMES)
def test_a_player_sees_its_own_seat_and_an_opponent_replies(game):
    for seat, opponent in product((0, 1), ("random", "optimal")):
        env, rng = game(opponent=opponent), np.random.default_rng(1)
        assert env.seats == 1 and game().seats == 2
        for seed in range(30):
            seen, _ = env.reset(seed=seed, options={"seat": seat})
            ended = False
            while not ended:
                assert env.to_move() == seat and seen == env.observe(seat)
                assert seen in env.observation_space
                seen, reward, ended, _, info = env.step(env.random_action(rng))
                assert "seat_rewards" not in info and info["success"] == (reward > 0)
            assert reward == env.rewards[seat]


@pytest.mark.parametrize("game", GAMES)
def test_without_the_option_both_seats_are_drawn_and_validation_has_its_own_opponent(game):
    env = game(opponent=None, validation_opponent="optimal")
    env.reset(seed=0, options={"held_out": False})
    assert env.seats == 2
    seats = []
    for seed in range(20):
        env.reset(seed=seed, options={"held_out": True})
        assert env.seats == 1
        seats.append(env.to_move())
    assert {0, 1} == set(seats)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="opponent: found 'best', expected null or one of random"):
        TicTacToe(opponent="best")
    with pytest.raises(ValueError, match="found seat=0, but both seats are played"):
        TicTacToe().reset(seed=0, options={"seat": 0})
    with pytest.raises(ValueError, match=r"found seat=2, expected 0 \(first, moves first\) or 1"):
        KuhnPoker(opponent="random").reset(seed=0, options={"seat": 2})
    with pytest.raises(ValueError, match="has no probability for"):
        exploitability({(0, ""): 0.5})
    with pytest.raises(ValueError, match="expected a probability of Bet"):
        exploitability(dict.fromkeys(information_sets(), 1.5))


# ---- tic-tac-toe


def test_an_illegal_move_changes_nothing_and_the_mover_stays():
    env = TicTacToe()
    env.reset(seed=0)
    env.step(4)
    before = env.state_key()
    _, reward, ended, _, info = env.step(4)
    assert (env.state_key(), reward, ended) == (before, 0.0, False)
    assert not info["action_is_valid"] and env.to_move() == 1
    _, reward, ended, _, info = env.forfeit(1)
    assert (reward, ended, info["seat_rewards"]) == (-1.0, True, [1.0, -1.0])


@pytest.mark.parametrize("seat", [0, 1])
def test_the_optimal_player_loses_to_no_replies_at_all(seat):
    """Exhaustive: each of its moves against each move of the other."""
    worst, seen, waiting = 1, set(), ["." * 9]
    while waiting:
        board = waiting.pop()
        if board in seen:
            continue
        seen.add(board)
        if (won := winner(board)) or "." not in board:
            worst = min(worst, won if seat == 0 else -won)
            continue
        mover = board.count("x") - board.count("o")
        empty = [cell for cell in range(9) if board[cell] == "."]
        moves = optimal_moves(board) if mover == seat else empty
        waiting += [marked(board, cell, MARKS[mover]) for cell in moves]
    assert worst == 0 and len(seen) > 100
    assert value("." * 9) == 0


def test_the_description_names_the_cells_that_complete_a_line():
    env = TicTacToe()
    env.reset(seed=0)
    for cell in (0, 3, 1, 4):
        env.step(cell)
    assert (env.observe(0), env.describe()) == ("x x 3, o o 6, 7 8 9 you x", "win 3 block 6")


# ---- Kuhn poker


def pure_value(first, second):
    """Return the first seat's mean reward for two pure strategies, by playing each deal."""
    total = 0.0
    for cards in permutations(range(3), 2):
        history = ""
        while history not in ("pp", "bp", "bb", "pbp", "pbb"):
            plan = (first, second)[len(history) % 2]
            history += plan[cards[len(history) % 2], history]
        total += payoff(cards, history)
    return total / 6


def test_exploitability_agrees_with_an_enumeration_of_pure_strategies():
    plans = [
        [
            dict(zip(product(range(3), HISTORIES[seat]), moves, strict=True))
            for moves in product("pb", repeat=6)
        ]
        for seat in (0, 1)
    ]
    table = np.array([[pure_value(first, second) for second in plans[1]] for first in plans[0]])
    rng = np.random.default_rng(0)
    for _ in range(5):
        bets = {key: float(rng.random()) for key in information_sets()}

        def chance(plan, bets=bets):
            return np.prod(
                [bets[key] if move == "b" else 1 - bets[key] for key, move in plan.items()]
            )

        weights = [np.array([chance(plan) for plan in of_seat]) for of_seat in plans]
        gain = ((table @ weights[1]).max() - (weights[0] @ table).min()) / 2
        assert exploitability(bets) == pytest.approx(gain, abs=1e-9)
        assert game_value(bets) == pytest.approx(weights[0] @ table @ weights[1], abs=1e-9)


@pytest.mark.parametrize("bluff", [0.0, 1 / 9, 1 / 3])
def test_an_equilibrium_cannot_be_exploited_and_has_the_known_value(bluff):
    assert exploitability(equilibrium(bluff=bluff)) == pytest.approx(0.0, abs=1e-12)
    assert game_value(equilibrium(bluff=bluff)) == pytest.approx(-1 / 18)
    assert exploitability(dict.fromkeys(information_sets(), 0.5)) == pytest.approx(11 / 24)


def test_no_seat_sees_the_card_of_the_other():
    env, seen = KuhnPoker(), {}
    for seed in range(60):
        env.reset(seed=seed)
        for seat in (0, 1):
            seen.setdefault((seat, env.cards[seat]), set()).add(env.observe(seat))
    assert len(seen) == 6 and all(len(texts) == 1 for texts in seen.values())
    assert all(CARDS[card] in next(iter(texts)) for (_, card), texts in seen.items())
