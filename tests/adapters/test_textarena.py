"""Games of TextArena for one and two players: seeds, news only, rules, moves that the games cannot read."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.episodes.hostile import hostile_answers
from support.episodes.players import steps

from envs.adapters.textarena import GAMES, TextArena, TextArenaTwoPlayer

pytestmark = pytest.mark.environments


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Check that a block leaves the global generators as they are."""
    random.seed(5)
    np.random.seed(5)
    expected = (random.Random(5).random(), np.random.RandomState(5).rand())
    yield
    assert (random.random(), np.random.rand()) == expected


def hostile_steps(env: TextArena | TextArenaTwoPlayer, *, count: int) -> Iterator[Any]:
    """Yield what hostile moves return, each game to its end."""
    env.reset(seed=0)
    over = False
    for number, text in enumerate(hostile_answers(np.random.default_rng(0), count)):
        if over:
            env.reset(seed=number)
        step = env.step(text)
        over = step[2]
        yield step


@pytest.mark.parametrize("game", sorted(GAMES))
def test_player_wins_and_seeds_repeat_beside_the_global_generators(game: str) -> None:
    with untouched_generators():
        env, other = TextArena(game=game), TextArena(game=game)
        for seed in range(10):
            assert steps(env, seed=seed, noise=0.0)[-1].info["success"]
            assert steps(env, seed=seed, noise=0.7) == steps(other, seed=seed, noise=0.7)


@pytest.mark.parametrize("game", sorted(GAMES))
def test_trivial_players_earn_little(game: str) -> None:
    env = TextArena(game=game)
    for text in ("[1]", "[1 2 3 4]", "[A B]", "x", ""):
        rewards = []
        for seed in range(20):
            env.reset(seed=seed)
            total, over = 0.0, False
            while not over:
                _, reward, over, _, info = env.step(text)
                total += reward
                assert info["action_is_valid"] or not reward
            rewards.append(total)
        assert np.mean(rewards) <= 0.15


def test_observations_hold_the_news_only() -> None:
    env = TextArena(game="GuessTheNumber")
    assert env.reset(seed=0)[0] == "begin"
    number = env.game.game_number
    text, reward, over, _, info = env.step("1" if number > 1 else "2")
    assert text in ("The target number is higher.", "The target number is lower.")
    assert (reward, over) == (0.0, False) and info["action_is_valid"]
    again = env.step("1" if number > 1 else "2")
    assert not again[4]["action_is_valid"] and not again[2]
    assert env.step(str(number))[1:3] == (1.0, True)


@pytest.mark.parametrize("game", [*sorted(GAMES), "LightsOut", "2048", "Sudoku"])
def test_hostile_moves_do_no_harm(game: str) -> None:
    for observation, reward, _, _, _ in hostile_steps(TextArena(game=game), count=1000):
        assert reward == 0 and str(observation).encode()
        assert len(observation) < 5000


def test_games_that_cannot_be_played_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="game=TicTacToe: "):
        TextArena(game="TicTacToe")
    with pytest.raises(
        ValueError, match="game: found 'Tic' with version '', expected one of 2048, "
    ):
        TextArena(game="Tic")
    small = TextArena(settings={"max_number": 5})
    assert "between 1 and 5" in small.reset(seed=0)[0]
    env = TextArena(game="LightsOut")
    env.reset(seed=0)
    with pytest.raises(NotImplementedError, match="have a policy"):
        env.optimal_action(np.random.default_rng(0))


def test_a_random_code_of_a_large_game_is_drawn_without_a_list_of_all() -> None:
    env = TextArena(game="Mastermind", version="-extreme")
    env.reset(seed=0)
    began, rng = time.process_time(), np.random.default_rng(0)
    codes = {env.random_action(rng) for _ in range(100)}
    assert len(codes) > 90 and time.process_time() - began < 5
    assert env.step(codes.pop())[4]["action_is_valid"]


# ---- two players


def moved(env, *moves):
    """Make moves; return what the last step returned."""
    env.reset(seed=0)
    return [env.step(move) for move in moves][-1]


def random_games(env, *, games):
    """Play random games to their end in both seats; return what each saw and the rewards of each game."""
    rng, played = np.random.default_rng(0), []
    for seed in range(games):
        env.reset(seed=seed)
        seen, over = [], False
        while not over:
            seat = env.to_move()
            seen.append((seat, env.observe(seat)))
            _, reward, over, _, info = env.step(env.random_action(rng))
            assert info["action_is_valid"] and info["seat_rewards"][seat] == reward
        assert env.to_move() == seat
        played.append((seen, tuple(info["seat_rewards"])))
    return played


@pytest.mark.parametrize(
    ("game", "begins", "outcomes"),
    [
        ("TicTacToe", 0, {(1.0, -1.0), (-1.0, 1.0), (0.0, 0.0)}),
        ("KuhnPoker", 1, {(1.0, -1.0), (-1.0, 1.0)}),
        ("ConnectFour", 0, {(1.0, -1.0), (-1.0, 1.0)}),
    ],
)
def test_random_games_of_two_end_by_the_rules_and_repeat_beside_the_global_generators(
    game: str, begins: int, outcomes: set[tuple[float, float]]
) -> None:
    with untouched_generators():
        env, other = (TextArenaTwoPlayer(game=game) for _ in range(2))
        played = random_games(env, games=40)
        assert {rewards for _, rewards in played} == outcomes
        assert {seen[0][0] for seen, _ in played} == {begins}
        assert random_games(other, games=40) == played


def test_a_seat_sees_the_rules_once_then_the_news_and_the_latest_board() -> None:
    env = TextArenaTwoPlayer(game="TicTacToe")
    first, _ = env.reset(seed=0)
    assert first.startswith("You are Player 0 in Tic Tac Toe") and "Available Moves" in first
    second, *_ = env.step("4")
    assert second.startswith("You are Player 1") and second.count("Current Board") == 1
    # what the other player wrote
    assert "Player 0: [4]" in second and "'[4]'" not in second.partition("Available Moves")[2]
    third, *_ = env.step("[0]")
    assert "Tic Tac Toe" not in third and third.count("Current Board") == 1
    assert "Player 1: [0]" in third and "[4]" not in third


def test_no_seat_sees_the_card_of_the_other() -> None:
    env, seen = TextArenaTwoPlayer(game="KuhnPoker"), set()
    for seed in range(30):
        env.reset(seed=seed)
        cards = env.game.state.game_state["player_cards"]
        for seat in (0, 1):
            text = env.observe(seat)
            assert f"Your card is: '{'JQK'[cards[seat]]}'" in text
            assert f"Your card is: '{'JQK'[cards[1 - seat]]}'" not in text
            seen.add((seat, cards[seat]))
    assert len(seen) == 6


def test_an_invalid_move_is_asked_again_and_a_second_one_loses() -> None:
    env = TextArenaTwoPlayer(game="TicTacToe")
    seen, reward, over, _, info = moved(env, "4", "4")
    assert "already occupied" in seen and (reward, over, env.to_move()) == (0.0, False, 1)
    assert not info["action_is_valid"] and info["seat_rewards"] == [0.0, 0.0]
    _, reward, over, _, info = env.step("x")
    assert (reward, over, info["seat_rewards"]) == (-1.0, True, [1.0, -1.0])
    # a valid one in between is forgiven
    assert not moved(env, "4", "4", "0", "4")[2]
    assert env.forfeit(0)[4]["seat_rewards"] == [-1.0, 1.0]


def test_a_move_that_the_game_cannot_read_loses_and_a_broken_connection_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(error: Exception) -> None:
        def step(action: str) -> None:
            raise error

        monkeypatch.setattr(env.game, "step", step)

    env = TextArenaTwoPlayer(game="TicTacToe")
    env.reset(seed=0)
    fails(IndexError("list index out of range"))
    _, reward, over, _, info = env.step("4")
    assert (reward, over, info["seat_rewards"]) == (-1.0, True, [-1.0, 1.0])
    assert not info["action_is_valid"]
    env.reset(seed=0)
    fails(ConnectionResetError("gone"))
    with pytest.raises(ConnectionResetError):
        env.step("4")


@pytest.mark.parametrize("seat", [0, 1])
def test_the_random_player_plays_the_other_seat(seat: int) -> None:
    env, rng, rewards = TextArenaTwoPlayer(game="KuhnPoker"), np.random.default_rng(0), []
    for seed in range(20):
        seen, _ = env.reset(seed=seed, options={"held_out": True, "seat": seat})
        assert (env.seats, env.to_move()) == (1, seat) and f"You are Player {seat}" in seen
        over = False
        while not over:
            _, reward, over, _, info = env.step(env.random_action(rng))
            assert "seat_rewards" not in info and info["success"] == (reward > 0)
        rewards.append(reward)
    assert set(rewards) == {1.0, -1.0}


@pytest.mark.parametrize(
    "game", ["TicTacToe", "KuhnPoker", "ConnectFour", "Nim", "SimpleNegotiation"]
)
def test_hostile_moves_of_two_players_do_no_harm(game: str) -> None:
    """Without the library's rules on errors a reward would be a win by such moves."""
    env = TextArenaTwoPlayer(game=game, validation_opponent=None)
    for observation, reward, _, _, info in hostile_steps(env, count=200):
        assert str(observation).encode() and reward <= 0 and sum(info["seat_rewards"]) == 0


def test_games_that_two_cannot_play_and_opponents_without_moves_are_refused() -> None:
    with pytest.raises(ValueError, match="game=GuessTheNumber: does not begin for 2 players: "):
        TextArenaTwoPlayer(game="GuessTheNumber")
    with pytest.raises(
        ValueError, match="opponent=random, game=Breakthrough: the game lists no moves"
    ):
        TextArenaTwoPlayer(game="Breakthrough")
    assert TextArenaTwoPlayer(game="Breakthrough", validation_opponent=None).seats == 2
