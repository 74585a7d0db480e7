"""The support desk's customer as a seat: the scripted one makes no error, and each kind of error is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.episodes.desks import LARGE, granted, say
from support.episodes.players import begin

from envs.policies import NoisyPolicy, OptimalPolicy
from envs.support_desk import CLERK, CUSTOMER, SupportDesk
from envs.support_desk_policy import CITIES, CUSTOMERS, ITEMS
from envs.support_desk_user import Cue, UserError, plain_text, user_errors
from envs.tools import call_text


def clerk_steps(desk: SupportDesk, policy, *, seed: int):
    """Play an episode; return what the clerk saw and earned, the success, and the errors of the user."""
    seen, _ = desk.reset(seed=seed)
    rng, rest = np.random.default_rng(seed), np.random.default_rng(0)
    steps, errors, over = [], [], False
    while not over:
        if desk.to_move() == CUSTOMER:
            seen, reward, over, _, info = desk.step(OptimalPolicy().act(desk, rest))
            errors.append(info["user_errors"])
            assert reward == 0.0 and info["seat_rewards"] == [0.0, 0.0]
            continue
        before = seen
        seen, reward, over, _, info = desk.step(policy.act(desk, rng))
        steps.append((before, pytest.approx(reward)))
    return steps, info["success"], errors


@pytest.mark.parametrize("settings", [{}, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_scripted_user_in_a_seat_makes_no_error_and_changes_nothing_for_the_clerk(
    settings, noise
):
    policy, successes = NoisyPolicy(noise=noise, base="optimal"), 0
    for seed in range(40):
        expected, success, _ = clerk_steps(SupportDesk(**settings), policy, seed=seed)
        desk = SupportDesk(user="seat", **settings)
        steps, success_too, errors = clerk_steps(desk, policy, seed=seed)
        assert (steps, success_too) == (expected, success) and desk.seats == 2
        assert errors and not any(errors)
        successes += success
    assert successes == 40 if noise == 0.0 else 0 < successes < 40


def refund(desk: SupportDesk) -> bool:
    """Tell whether a refund is asked for, with a day and with two requests, the first of which insists."""
    first, second = desk.requests
    return (
        first.city is None and second.city is not None and first.insists and first.day is not None
    )


def desk_of_two() -> SupportDesk:
    settings = {"requests": 2, "insist_fraction": 1.0, "lie_fraction": 1.0, "move_fraction": 0.5}
    return begin(SupportDesk(user="seat", **settings), refund)


def wish(desk: SupportDesk) -> str:
    return f"please refund my {desk.requests[0].item}, it is day {desk.requests[0].day}"


def other(values, *used):
    return next(value for value in values if value not in used)


def errors_of(desk: SupportDesk, *texts: str) -> list[str]:
    """Return the errors of the last text: the clerk's turns are calls, the user's are not."""
    for text in texts:
        _, reward, _, _, info = desk.step(text)
    assert reward == -len(info["user_errors"]) == info["seat_rewards"][CUSTOMER]
    return info["user_errors"]


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (lambda d: wish(d), []),
        (lambda d: wish(d).upper(), []),
        (lambda d: f"{wish(d)}. I am {d.customer}", []),
        # ---- other facts
        (lambda d: f"{wish(d)} {other(ITEMS, *(r.item for r in d.requests))}", ["fact"]),
        (lambda d: f"{wish(d)} in {d.requests[1].city}", ["fact"]),
        (lambda d: f"{wish(d)}, {other(CUSTOMERS, d.customer)} said", ["fact"]),
        (lambda d: f"{wish(d)} of order A1", ["fact"]),
        (lambda d: f"{wish(d)} 77", ["fact"]),
        (lambda d: f"refund my {d.requests[0].item}, day {d.requests[0].day + 1}", ["fact"]),
        # ---- something else
        (lambda d: f"{wish(d)} and move it", ["goal"]),
        (lambda d: f"{wish(d)} and the {d.requests[1].item}", ["goal"]),
        (lambda d: f"{wish(d)} please make an exception", ["goal"]),
        # ---- too early, or too little
        (lambda d: f"{wish(d)}, code {d.requests[0].code}", ["reveal"]),
        (lambda d: f"{wish(d)}, {d.requests[0].code}", ["reveal"]),
        (lambda d: f"{wish(d)} bye", ["early_end"]),
        (lambda d: "hello", ["omission"]),
        (lambda d: f"my {d.requests[0].item}, it is day {d.requests[0].day}", ["omission"]),
        (lambda d: f"refund my {d.requests[0].item}", ["omission"]),
        (lambda d: f"move it, bye, {d.requests[0].code}", ["goal", "reveal", "early_end"]),
    ],
)
def test_errors_of_a_request(text, errors):
    desk = desk_of_two()
    assert errors_of(desk, text(desk)) == errors
    # a goodbye ends the episode, and nothing else does
    over = "early_end" in errors
    assert desk.to_move() == (CUSTOMER if over else CLERK)
    if over:
        with pytest.raises(RuntimeError, match="the episode has ended"):
            desk.step("hello")
    else:
        assert desk.observe(CLERK).endswith(f"{desk.customer}: {text(desk)}")
        assert desk.observe(CLERK).startswith("policy: ")


@pytest.mark.parametrize(
    ("calls", "text", "errors"),
    [
        (["which code?"], "code {code}", []),
        (["which code?"], "it is {code}.", []),
        (["which code?"], "code {wrong}", ["fact"]),
        (["which code?"], "I won't tell", ["omission"]),
        (["hello"], "yes", []),
        (["hello"], "code {code}", ["reveal"]),
        # asked before
        (["which code?", ("code {code}", "hello")], "code {code}", []),
        (["refused late"], "please make an exception", []),
        (["refused late"], "well", ["omission"]),
        (["refunded 10"], "please make an exception and move my {next} to {city} on day {day}", ["goal"]),
        (["refunded 10"], "thanks. move my {next} to {city}, day {day}", []),
        (["refunded 10"], "thanks for the refund of the {item}. move {next} {city} day is {day}", []),
        (["refunded 10"], "move my {next} to {elsewhere}, day {day}", ["fact"]),
        (["refunded 10"], "bye", ["early_end"]),
        (["which code?", ("{code}", "refunded 10")], "move {next} {city} day {day} code {second}", ["reveal"]),
        (["refunded 10", ("move {next} {city} day {day}", "moved")], "bye", []),
        (["refunded 10", ("move {next} {city} day {day}", "code?"), ("{second}", "moved")], "bye {second}", []),
        (["refunded 10", ("move {next} {city} day {day}", "moved")], "thanks", ["no_end"]),
        (["refunded 10", ("move {next} {city} day {day}", "moved")], "bye, {wrong}", ["fact"]),
    ],
)  # fmt: skip
def test_errors_of_answers(calls, text, errors):
    desk = desk_of_two()
    first, second = desk.requests
    words = {
        "item": first.item,
        "code": first.code,
        "wrong": other(range(1, 10), first.code, second.code),
        "next": second.item,
        "city": second.city,
        "elsewhere": other(CITIES, second.city),
        "day": second.day,
        "second": second.code,
    }
    desk.step(wish(desk))
    for call in calls:
        answer, said = (None, call) if isinstance(call, str) else call
        if answer is not None:
            assert errors_of(desk, answer.format(**words)) == []
        desk.step(say(said))
    expected = "reveal" if errors == ["reveal"] and second.code == first.code else None
    found = errors_of(desk, text.format(**words))
    assert found == ([expected] if expected else errors)


def test_the_clerk_is_judged_by_the_instruction_and_both_seats_share_success():
    desk = begin(SupportDesk(user="seat", move_fraction=0.0), granted)
    wrong = other(ITEMS, desk.requests[0].item)
    assert errors_of(desk, f"refund my {wrong}") == ["fact"]
    assert desk.step(call_text("find", item=wrong))[0] == "error: no such item"
    rng = np.random.default_rng(0)
    while desk.to_move() == CLERK:
        _, reward, over, _, info = desk.step(desk.optimal_action(rng))
    # the outcome is told, and the customer has the last word
    assert (reward, over) == (1.0, False) and info["seat_success"] == [True, True]
    _, reward, over, _, info = desk.step("thanks")
    assert (over, info["user_errors"], info["seat_success"]) == (True, ["no_end"], [True, True])
    desk = begin(SupportDesk(user="seat", user_error_cost=0.25), granted)
    assert desk.step("bye")[1:3] == (-0.25, True)


def test_each_seat_sees_its_own_and_forfeits_its_own():
    desk = desk_of_two()
    first, second = desk.requests
    seen = desk.observe(CUSTOMER)
    assert seen == (
        f"you are {desk.customer}: refund {first.item} day {first.day} code {first.code} insist; then move "
        f"{second.item} {second.city} day {second.day} code {second.code} insist"
    )
    assert "policy" not in seen and "insist" not in desk.observe(CLERK)
    desk.step(wish(desk))
    desk.step(call_text("find", item=first.item))
    assert "code" in desk.observe(CLERK) and desk.observe(CUSTOMER) == seen
    desk.step(say("hello\n\x07there"))
    assert desk.observe(CUSTOMER) == "clerk: hello there"
    before = desk.state_key()
    _, reward, over, _, info = desk.step("...")
    assert (reward, over, info["action_is_valid"]) == (0.0, False, False)
    assert desk.state_key() == before and "user_errors" not in info
    _, reward, over, _, info = desk.forfeit(CUSTOMER)
    assert (reward, over, info["seat_rewards"]) == (-1.0, True, [0.0, -1.0])
    assert SupportDesk().seats == 1 and desk.seat_instructions(CLERK) is None
    assert "customer" in desk.seat_instructions(CUSTOMER)


def test_an_episode_begins_in_the_same_state_whoever_plays_the_customer():
    keys = []
    for user in ("scripted", "seat"):
        desk = SupportDesk(user=user, **LARGE)
        desk.reset(seed=3)
        keys.append(desk.state_key())
    assert keys[0] == keys[1]
    desk.step("hello")
    assert desk.state_key() != keys[1]
    desk.reset(seed=3)
    desk.forfeit(CUSTOMER)
    assert desk.state_key() != keys[1]


def test_validation_has_its_own_user():
    desk = SupportDesk(user="seat")
    desk.reset(seed=0, options={"held_out": True})
    assert desk.seats == 1 and desk.user == "scripted"
    desk = SupportDesk(validation_user="seat")
    desk.reset(seed=0, options={"held_out": True})
    assert desk.seats == 2
    with pytest.raises(ValueError, match="user: found 'robot', expected one of scripted, seat"):
        SupportDesk(user="robot")


ODD_WORDS = (
    "refund move code day is bye exception A1 \ud800 ９ ß policy: </answer> 99999999999999999999"
)
WORDS = st.sampled_from(
    [*ITEMS, *CITIES, *CUSTOMERS, *map(str, range(12)), *ODD_WORDS.split(), "\n"]
)
TEXTS = st.one_of(st.text(max_size=60), st.lists(WORDS, max_size=12).map(" ".join))


@given(text=TEXTS, cue=st.sampled_from(list(Cue)), asked=st.booleans())
def test_any_text_has_its_errors(text, cue, asked):
    desk = DESKS[0]
    about = {"customer": desk.customer, "requests": desk.requests, "at": 0, "asked": asked}
    errors = user_errors(text, cue=cue, **about)
    assert len(set(errors)) == len(errors) and set(errors) <= set(UserError)
    assert UserError.OMISSION not in errors or errors == [UserError.OMISSION]
    # repetition does not count, and a foreign fact is always found
    assert user_errors(f"{text} \n {text}", cue=cue, **about) == errors
    wrong = other(CUSTOMERS, desk.customer)
    assert UserError.FACT in user_errors(f"{text} {wrong}", cue=cue, **about)


@given(texts=st.lists(TEXTS, max_size=4))
def test_any_text_keeps_the_protocol(texts):
    desk = SupportDesk(user="seat")
    desk.reset(seed=0)
    over = False
    for text in texts:
        mover = desk.to_move()
        action = text if mover == CUSTOMER else say("code")
        seen, reward, over, truncated, info = desk.step(action)
        assert seen in desk.observation_space and "\n" not in seen and not truncated
        assert reward == info["seat_rewards"][mover] and info["success"] is False
        if mover == CUSTOMER and info["action_is_valid"]:
            assert reward == -len(info["user_errors"])
            assert over == (desk.to_move() == CUSTOMER)
        if over:
            break


def test_a_text_is_one_line_of_printable_ascii():
    assert plain_text("a\r\nb\u2028c\ud800 \x1b[31m") == "a b c [31m"


DESKS = [desk_of_two()]
