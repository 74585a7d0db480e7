"""The support desk: what the database and what is said are worth, and what trivial players earn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from support.episodes.desks import LARGE, granted, say
from support.episodes.players import begin, play

from envs.support_desk import SupportDesk
from envs.support_desk_policy import Rule
from envs.tools import call_text


def saying(text: str) -> Callable[[SupportDesk], str]:
    return lambda _: say(text)


def calls(*texts: str) -> Callable[[SupportDesk], str]:
    rest = iter(texts)
    return lambda _: next(rest)


def late(desk: SupportDesk) -> bool:
    return desk.broken_rules(desk.requests[0]) == [Rule.LATE] and Rule.CODE not in desk.policy


@pytest.mark.parametrize("settings", [{}, LARGE], ids=["small", "large"])
def test_the_clerk_who_follows_the_policy_earns_all(settings):
    desk, rng = SupportDesk(**settings), np.random.default_rng(0)
    difficulties = set()
    for seed in range(300):
        desk.reset(seed=seed)
        difficulties.add(desk.difficulty())
        total, success, parts = play(desk, lambda desk: desk.optimal_action(rng))
        assert success and total == pytest.approx(1.0)
        assert parts == pytest.approx({"database": 0.5, "said": 0.5})
    assert difficulties == set(range(2, desk.max_rules + 1))


def test_every_rule_forbids_something_and_half_is_granted():
    desk, reasons, moves = SupportDesk(rules=7), Counter(), 0
    for seed in range(600):
        desk.reset(seed=seed)
        reasons.update(map(str, desk.broken_rules(desk.requests[0])[:1] or ["none"]))
        moves += desk.requests[0].city is not None
    assert set(reasons) == set(map(str, set(Rule) - {Rule.USED})) | {"none"}
    assert 0.4 < reasons["none"] / 600 < 0.6 and 0.2 < moves / 600 < 0.3


def always_refund(desk: SupportDesk) -> str:
    """Pay the full price without a look at the policy."""
    order = desk.order_of(desk.requests[0])
    if not desk.tables.refunds:
        return call_text("refund", order=order.id, amount=order.price)
    return say(f"refunded {order.price}")


def refuse_by_the_policy(desk: SupportDesk) -> str:
    """Refuse with the first rule of the policy that may apply, without a look at the order."""
    city = desk.requests[0].city is not None
    applies = [
        rule for rule in desk.policy if (rule is Rule.SENT) == city and rule is not Rule.USED
    ]
    return say(f"refused {(applies or list(desk.policy))[0]}")


@pytest.mark.parametrize(
    "choose",
    [
        *(saying(f"refused {reason}") for reason in Rule),
        saying("refused"),
        saying("refused late price kind gift code sent"),
        saying("refunded refused moved"),
        saying("refunded 10 20 30 40 50 60 70 80 90"),
        saying("hello"),
        saying("code"),
        refuse_by_the_policy,
        always_refund,
        lambda _: "null",
    ],
)
@pytest.mark.parametrize(("wrong_cost", "most"), [(0.5, 0.0), (0.1, 0.2)])
def test_trivial_players_earn_little(choose, wrong_cost, most):
    desk, totals, successes = SupportDesk(wrong_cost=wrong_cost), [], 0
    for seed in range(300):
        desk.reset(seed=seed)
        total, success, _ = play(desk, choose, limit=6)
        totals.append(total)
        successes += success
    assert np.mean(totals) <= most and successes / 300 < 0.3


def test_a_wrong_change_costs_at_once_and_spoils_the_episode():
    desk = begin(SupportDesk(), late)
    order = desk.order_of(desk.requests[0])
    _, reward, over, _, info = desk.step(call_text("refund", order=order.id, amount=order.price))
    assert (reward, over) == (-0.5, False) and info["reward_parts"] == {"database": -0.5}
    total, success, parts = play(desk, saying("refused late"))
    assert (total, parts, success) == (-0.5, {"database": 0.0, "said": -0.5}, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("I am sorry: refused, it is late.", 0.5),
        ("REFUSED LATE", 0.5),
        ("refused", -0.5),
        ("refused late price", -0.5),
        ("refused gift", -0.5),
        ("refunded 20, not refused late", -0.5),
    ],
)
def test_a_refusal_names_one_true_reason(text, said):
    desk = begin(SupportDesk(), late)
    look = call_text("find", item=desk.requests[0].item)
    _, success, parts = play(desk, calls(look, say(text)))
    assert parts == {"database": max(said, 0), "said": said} and success == (said > 0)


def test_a_reason_is_not_known_before_the_order_is():
    desk = begin(SupportDesk(), late)
    assert play(desk, saying("refused late")).parts == {"database": 0.0, "said": -0.5}


def test_orders_may_be_found_before_their_requests():
    """A reason that was read before the request comes is a true one."""
    desk, played = SupportDesk(requests=2, grant_fraction=0.0), 0
    for seed in range(40):
        desk.reset(seed=seed)
        broken = [desk.broken_rules(request) for request in desk.requests]
        if not all(broken) or any(Rule.CODE in rules for rules in broken):
            continue
        looks = [call_text("find", item=request.item) for request in desk.requests]
        refusals = [say(f"refused {rules[0]}") for rules in broken]
        _, success, parts = play(desk, calls(*looks, *refusals))
        assert success and parts == pytest.approx({"database": 0.5, "said": 0.5})
        played += 1
    assert played > 5


def test_half_of_a_price_may_be_within_the_limit():
    desk = SupportDesk(rules=7)

    def halved(desk):
        order = desk.order_of(desk.requests[0])
        limit = int(desk.policy.get(Rule.PRICE) or 0)
        half = Rule.USED in desk.policy and order.used and not desk.requests[0].city
        return half and order.price // 2 <= limit < order.price

    begin(desk, halved)
    assert Rule.PRICE not in desk.broken_rules(desk.requests[0])


def test_saying_that_money_was_paid_does_not_pay_it():
    desk = begin(SupportDesk(), granted)
    amount = desk.order_of(desk.requests[0]).price
    assert play(desk, saying(f"refunded {amount}")).reward == -0.5
    desk = begin(SupportDesk(), granted)
    order = desk.order_of(desk.requests[0])
    pay = call_text("refund", order=order.id, amount=amount)
    for told, total in ((f"I refunded {amount}.", 1.0), ("refunded 7", 0.0), ("refunded", 0.0)):
        desk = begin(SupportDesk(), granted)
        assert play(desk, calls(pay, say(told))).reward == total


def test_changes_before_the_code_are_wrong():
    def coded(desk):
        return Rule.CODE in desk.policy and not desk.broken_rules(desk.requests[0])

    desk, rng = begin(SupportDesk(), coded), np.random.default_rng(0)
    desk.requests[0].heard_code = desk.requests[0].found = True
    hasty = desk.optimal_action(rng)
    desk.requests[0].heard_code = False
    assert desk.step(hasty)[1] == -0.5
    assert not play(desk, lambda desk: desk.optimal_action(rng)).success


def test_a_wrong_address_can_be_corrected():
    def moves(desk):
        request = desk.requests[0]
        return (
            request.city == "Rome"
            and not desk.broken_rules(request)
            and Rule.CODE not in desk.policy
        )

    desk = begin(SupportDesk(), moves)
    order = desk.order_of(desk.requests[0]).id
    wrong, right = (call_text("move", order=order, city=city) for city in ("Oslo", "Rome"))
    rewards = [desk.step(call)[1] for call in (wrong, right, say("moved to Rome"))]
    assert rewards == [-0.5, 0.5, 1.0]


def test_a_customer_who_insists_gets_the_same_answer():
    desk = begin(SupportDesk(insist_fraction=1.0), late)
    refuse = say("refused late")
    assert "exception" in desk.step(refuse)[0]
    assert desk.step(refuse)[2]


def test_calls_that_cannot_be_carried_out_change_nothing():
    desk = begin(SupportDesk(), granted)
    order = desk.order_of(desk.requests[0])
    for call in (
        call_text("refund", order="A9", amount=1),
        call_text("refund", order=order.id, amount=order.price + 1),
        call_text("move", order=order.id, city="Atlantis"),
        call_text("find", item="yacht"),
    ):
        before = desk.state_key()
        text, reward, over, _, info = desk.step(call)
        assert text.startswith("error: ") and not over and reward == 0 and info["action_is_valid"]
        assert not info["action_is_effective"] and desk.state_key() == before
    for call in ('{"name": "refund", "arguments": {"order": "A1", "amount": "20"}}', "refund A1"):
        assert not desk.step(call)[4]["action_is_valid"]


@pytest.mark.parametrize("setting", [{"rules": 8}, {"rules": 0}, {"requests": 7}, {"orders": 1.5}])
def test_settings_out_of_range_raise(setting):
    with pytest.raises((TypeError, ValueError), match=next(iter(setting))):
        SupportDesk(**setting)
