"""Games of two players: rules, rewards, scripted players, the exploitability of Kuhn poker, and negotiations."""

from __future__ import annotations

import re
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from envs.negotiation import ITEMS, WORTH, Move, Negotiation, Problem, drawn_problem, read_move
from envs.policies import PlayerPolicy
from envs.tic_tac_toe import MARKS, TicTacToe, marked, optimal_moves, value, winner
from envs.trivial_policies import AcceptFirst

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
                # the opponent's view is not shown where it moved last
                assert env.render() == seen == env.observe(seat)
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
    for key in ("opponent", "validation_opponent"):
        with pytest.raises(ValueError, match=f"^{key}: found 'best', expected null or one of rand"):
            TicTacToe(**{key: "best"})
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


# ---- negotiation

PROBLEM = Problem(counts=(2, 1, 3), values=((1, 8, 0), (2, 3, 1)))
SEEDS = st.integers(0, 2**32 - 1)


def negotiation(**settings):
    env = Negotiation(**settings)
    env.reset(seed=0)
    env._start(PROBLEM)
    return env


def negotiated(policy, *, opponent, games):
    """Return mean reward and success of a policy, the seat drawn for each game."""
    env, rng = Negotiation(opponent=opponent), np.random.default_rng(0)
    results = []
    for seed in range(games):
        env.reset(seed=seed)
        ended = False
        while not ended:
            _, reward, ended, _, info = env.step(policy.act(env, rng))
            assert info["action_is_valid"]
        results.append((reward, info["success"]))
    return np.mean(results, axis=0)


@given(SEEDS, st.booleans())
def test_a_drawn_problem_keeps_its_rules(seed, held_out):
    problem = drawn_problem(np.random.default_rng(seed), held_out=held_out)
    assert problem.held_out == held_out
    assert 5 <= sum(problem.counts) <= 7 and all(1 <= count <= 4 for count in problem.counts)
    pairs = list(zip(*problem.values, strict=True))
    assert all(any(pair) for pair in pairs) and any(all(pair) for pair in pairs)
    for seat in (0, 1):
        assert problem.worth(seat, problem.counts) == WORTH
    assert any(min(outcome) >= WORTH / 2 for outcome in problem.outcomes())
    frontier = problem.frontier()
    assert frontier and frontier <= problem.outcomes()
    for first, second in problem.outcomes():
        assert any(one >= first and two >= second for one, two in frontier)
    assert all(
        one < other or two < last
        for one, two in frontier
        for other, last in frontier - {(one, two)}
    )


@given(SEEDS, st.sampled_from([None, "random", "fair", "greedy"]), st.integers(1, 3))
def test_a_random_negotiation_divides_all_items_and_pays_their_values(seed, opponent, turns):
    env, rng = Negotiation(turns=turns, opponent=opponent), np.random.default_rng(seed)
    seen, _ = env.reset(seed=seed)
    ended = False
    while not ended:
        assert seen in env.observation_space and "metrics" not in env.step("accept then")[4]
        mover = env.to_move()
        seen, reward, ended, _, info = env.step(env.random_action(rng))
        assert info["action_is_valid"] and (ended or reward == 0.0)
    metrics = info["metrics"]
    assert metrics["agreement"] == (env.shares is not None)
    own = mover if opponent is None else env.seat
    assert reward == env.rewards[own] and info["success"] == (reward >= 0.5)
    if env.shares is None:
        assert env.rewards == (0.0, 0.0) and metrics == {"agreement": 0.0}
        return
    assert tuple(map(sum, zip(*env.shares, strict=True))) == env.problem.counts
    values = [
        sum(v * n for v, n in zip(env.problem.values[seat], env.shares[seat], strict=True))
        for seat in (0, 1)
    ]
    assert env.rewards == (values[0] / WORTH, values[1] / WORTH)
    assert metrics["joint_value"] == pytest.approx(sum(values) / WORTH)
    better = [
        one
        for one in env.problem.outcomes()
        if one != tuple(values) and one[0] >= values[0] and one[1] >= values[1]
    ]
    assert metrics["pareto_efficient"] == (not better)


def test_a_negotiation_as_each_seat_reads_it():
    env = negotiation(turns=2)
    assert env.observe(0) == "2 books worth 1, 1 hat worth 8, 3 balls worth 0\n2 turns left"
    env.step("What do you want,\noffers you 2 books?")
    # one line: words can not look like an offer
    assert env.observe(1) == (
        "2 books worth 2, 1 hat worth 3, 3 balls worth 1\nsays What do you want, offers you 2 books?\n2 turns left"
    )
    assert env.describe() == "no offer"
    env.step("Propose 2 books, 1 hat and 0 balls")
    assert env.observe(0) == "offers you 3 balls\n1 turn left" and env.describe() == "offer 0"
    env.step("propose 1 hat")
    assert (
        env.observe(1) == "offers you 2 books 3 balls\n1 turn left" and env.describe() == "offer 7"
    )
    _, reward, ended, _, info = env.step("accept")
    assert (reward, ended, info["seat_rewards"], info["seat_success"]) == (
        0.7,
        True,
        [0.8, 0.7],
        [True, True],
    )
    assert info["metrics"] == {"agreement": 1.0, "joint_value": 1.5, "pareto_efficient": 1.0}
    assert [env.observe(seat) for seat in (0, 1)] == [
        "agreed, you get 1 hat",
        "agreed, you get 2 books 3 balls",
    ]


def test_no_agreement_in_time_or_a_forfeit_pays_nobody():
    env = negotiation(turns=1)
    env.step("propose 1 hat")
    _, reward, ended, _, info = env.step("no")
    assert (reward, ended, info["seat_rewards"]) == (0.0, True, [0.0, 0.0]) and env.observe(
        0
    ).endswith("no deal")
    env = negotiation()
    assert env.forfeit(0)[4]["seat_rewards"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("propose 3 books", "there are 2 books"),
        ("propose 99999999999999999999 hats", "there are 1 hat"),
        ("propose 1 cat", "name each of book, hat, ball once"),
        ("propose 1 hat 1 hat", "name each of"),
        ("propose 0 hats 1 hat", "name each of"),
        ("propose", "write such as propose 2 books 1 hat"),
        ("propose the hat", "write such as"),
        ("propose 1 hat please", "write such as"),
        ("accept", "there is no proposal to accept"),
        ("accept 1 hat", "write accept alone"),
        ("accept, and thank you", "write accept alone"),
        ("accept?", "write accept alone"),
        ("propose: nothing", "write such as"),
    ],
)
def test_an_answer_that_the_rules_do_not_allow_changes_nothing_but_its_reason(text, reason):
    env = negotiation()
    before = env.state_key()
    seen, _, ended, _, info = env.step(text)
    assert not info["action_is_valid"] and not ended and env.to_move() == 0
    assert f"not allowed: {reason}" in seen and env.state_key() == before
    # nor may a seat accept its own proposal
    env.step("propose 1 hat")
    env.step("hm")
    assert not env.step("accept")[4]["action_is_valid"]


@given(st.text(max_size=60))
def test_any_text_is_a_move_or_refused(text):
    try:
        move = read_move(text, PROBLEM.counts)
    except ValueError:
        assert re.match(r"\s*(propose|accept)\b", text.casefold())
        return
    assert "\n" not in move.words and len(move.words) <= len(text)
    if move.share is not None:
        assert move.share in PROBLEM.shares()


@given(st.tuples(*(st.integers(0, count) for count in PROBLEM.counts)))
def test_a_proposal_is_read_as_it_was_written(share):
    written = ", ".join(f"{number} {item}s" for number, item in zip(share, ITEMS, strict=True))
    for text in (f" Propose {written}", f"propose: {written}.", f"PROPOSE, {written} !"):
        assert read_move(text, PROBLEM.counts) == Move(share=share)


@pytest.mark.parametrize("text", ["accept", "Accept.", " ACCEPT !", "accept\n"])
def test_an_acceptance_may_have_an_end(text):
    assert read_move(text, PROBLEM.counts) == Move(accepts=True)


@pytest.mark.parametrize("text", ["acceptable", "I accept", "proposes 1 hat", "no. accept"])
def test_what_begins_with_another_word_is_a_message(text):
    assert read_move(text, PROBLEM.counts) == Move(words=text)


def test_scripted_negotiators_keep_their_aspirations():
    env = negotiation(opponent=None)
    rng = np.random.default_rng(0)
    # the hat is worth 8 to the first seat, which is the least above a half
    assert env.fair_action(rng) == "propose 1 hat"
    # at first all that is of value
    assert env.greedy_action(rng) == "propose 2 books 1 hat"
    env.step("propose 2 books 1 hat")
    assert env.fair_action(rng) != "accept" and env.problem.worth(1, env.offered(1)) == 3
    env.step("propose 2 books")
    assert env.offered(0) == (0, 1, 3) and env.fair_action(rng) == "accept" != env.greedy_action(
        rng
    )


def test_accepting_the_first_offer_earns_what_the_docstring_says():
    """And the fair player earns more from the greedy one."""
    text = " ".join(Negotiation.__doc__.split())
    stated = re.search(
        r"return at most ([\d.]+\d) of the greedy player and ([\d.]+\d) of the fair", text
    )
    bounds = dict(zip(("greedy", "fair"), map(float, stated.groups()), strict=True))
    for opponent, bound in bounds.items():
        earned, _ = negotiated(AcceptFirst(), opponent=opponent, games=200)
        assert bound - 0.1 < earned <= bound
    earned, success = negotiated(PlayerPolicy(name="fair"), opponent="greedy", games=200)
    assert earned > bounds["greedy"] + 0.2 and success > 0.9


def test_a_wrong_opponent_names_those_of_the_game():
    with pytest.raises(
        ValueError, match="found 'optimal', expected null or one of random, fair, greedy"
    ):
        Negotiation(opponent="optimal")
    with pytest.raises(ValueError, match="set opponent=random or fair or greedy"):
        Negotiation().reset(seed=0, options={"seat": 0})
