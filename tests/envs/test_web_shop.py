"""The web shop: its search, what a purchase is worth, and what trivial buyers earn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.episodes.players import begin, play

from envs.tools import call_text
from envs.web_shop import OPTIONS, SIZES, WebShop

LARGE = {"conditions": 5, "products": 99, "results": 8}
SMALL = {"conditions": 5, "products": 12, "results": 3}


def asks_for_all(shop: WebShop) -> bool:
    return shop.difficulty() == 5


@pytest.mark.parametrize("settings", [{}, LARGE, SMALL], ids=["shipped", "large", "small"])
def test_the_buyer_who_checks_every_condition_succeeds_within_five_turns(settings):
    shop, rng, difficulties = WebShop(**settings), np.random.default_rng(0), set()
    for seed in range(100):
        observation, _ = shop.reset(seed=seed)
        assert observation == f"want: {shop.request}"
        assert sorted(shop.products) == sorted(f"p{n + 1}" for n in range(shop.product_count))
        difficulties.add(shop.difficulty())
        assert play(shop, lambda shop: shop.optimal_action(rng), limit=5)[:2] == (1.0, True)
    assert difficulties == set(range(1, shop.max_conditions + 1))


def test_each_condition_has_products_that_miss_only_it():
    shop = WebShop(conditions=5)
    for seed in range(100):
        shop.reset(seed=seed)
        request, missed = shop.request, set()
        for product in shop.products.values():
            faults = [
                *([] if request.prices[0] <= product.price <= request.prices[1] else ["price"]),
                *(["material"] if request.material not in (None, product.material) else []),
                *(["stars"] if product.stars < (request.stars or 1) else []),
                *(n for n, v in request.options.items() if v not in product.options[n]),
            ]
            assert shop.request.fits(product) == (not faults and product.kind == request.kind)
            if product.kind == request.kind and len(faults) == 1:
                missed.add(faults[0])
        words = {"price", *request.options, *(["material"] if request.material else [])}
        assert missed >= words


def test_search_ranks_by_words_and_advertises_the_dearest_first():
    shop = begin(WebShop(), lambda shop: bool(shop.request.options))
    shop.search(shop.request.query())
    shown = [shop.products[id] for id in shop.results]
    asked = set(shop.request.query().casefold().split())
    assert len(shown) == 4 and all(asked <= product.words() for product in shown)
    assert shown[0].price == max(product.price for product in shown) > shop.request.prices[1]
    # words that no product has change nothing, so the request itself is a query
    page = list(shop.results)
    shop.search(str(shop.request).upper())
    assert shop.results == page


def test_the_product_that_fits_is_in_any_place_but_the_first():
    shop, places = WebShop(), np.zeros(4, int)
    for seed in range(300):
        shop.reset(seed=seed)
        shop.search(shop.request.query())
        places += [shop.request.fits(shop.products[id]) for id in shop.results]
    assert places[0] == 0 and places[1:].sum() == 300 and (places[1:] > 75).all()


def result(place: int, *, chooses: bool) -> Callable[[WebShop], str]:
    """Return a buyer of the result in a place, whatever its price and stars."""

    def choose(shop: WebShop) -> str:
        if not shop.results:
            return call_text("search", query=shop.request.query())
        if shop.opened is None:
            return call_text("open", item=shop.results[place])
        for option in shop.missing_options(shop.opened) if chooses else ():
            if shop.request.options[option] in shop.opened.options[option]:
                return call_text("choose", option=option, value=shop.request.options[option])
        return call_text("buy")

    return choose


@pytest.mark.parametrize(
    ("choose", "most"),
    [
        (result(0, chooses=True), -0.09),
        (result(0, chooses=False), -0.09),
        # right where no option is asked for, and the place is by chance
        (result(1, chooses=False), 0.1),
        (result(-1, chooses=True), 0.35),
        (lambda _: call_text("buy"), 0.0),
        (lambda shop: call_text("open", item=next(iter(shop.products))), 0.0),
        (lambda shop: call_text("search", query=shop.request.query()), 0.0),
        (lambda _: "null", 0.0),
    ],
)
def test_buyers_who_do_not_look_earn_little(choose, most):
    shop, totals = WebShop(), []
    for seed in range(200):
        shop.reset(seed=seed)
        totals.append(play(shop, choose, limit=6).reward)
    assert np.mean(totals) <= most


@pytest.mark.parametrize(("partial", "total"), [(0.0, -0.1), (0.5, -0.1 + 0.5 * 3 / 5)])
def test_what_is_missing_makes_a_purchase_wrong(partial, total):
    shop, rng = (
        begin(WebShop(conditions=5, partial=partial), asks_for_all),
        np.random.default_rng(0),
    )
    for _ in range(2):
        shop.step(shop.optimal_action(rng))
    # neither color nor size is chosen
    _, reward, over, _, info = shop.step(call_text("buy"))
    assert over and not info["success"] and reward == pytest.approx(total)
    assert set(info["reward_parts"]) == {"right", "wrong", "partial"}


def test_a_product_of_another_kind_earns_no_part():
    shop = begin(WebShop(partial=1.0), lambda shop: shop.request.kind != "hat")
    shop.step(call_text("search", query="hat"))
    shop.step(call_text("open", item=shop.results[0]))
    assert shop.step(call_text("buy"))[1] == -0.1


def test_a_choice_can_be_corrected_and_belongs_to_one_product():
    shop, rng = begin(WebShop(conditions=5), asks_for_all), np.random.default_rng(0)
    for _ in range(2):
        shop.step(shop.optimal_action(rng))
    product = shop.opened
    for value in product.options["size"]:
        assert shop.step(call_text("choose", option="size", value=value))[0] == f"size {value}"
    page = shop.step(call_text("back"))[0]
    assert page.split(", ")[0].startswith(shop.results[0])
    shop.step(call_text("open", item=product.id))
    assert shop.chosen == {}
    assert play(shop, lambda shop: shop.optimal_action(rng), limit=6)[:2] == (1.0, True)


def test_calls_that_cannot_be_carried_out_change_nothing():
    shop = begin(WebShop(), lambda shop: "size" in shop.request.options)
    before = shop.state_key()
    first = next(iter(shop.products))
    calls = [call_text("search", query="zebra !?"), call_text("open", item=first)]
    calls += [call_text("back"), call_text("buy")]
    calls += [call_text("choose", option="size", value=size) for size in SIZES]
    for call in calls:
        text, reward, over, _, info = shop.step(call)
        assert text.startswith("error: ") and not over and reward == 0 and info["action_is_valid"]
        assert not info["action_is_effective"] and shop.state_key() == before
    shop.step(call_text("search", query=shop.request.query()))
    shop.step(call_text("open", item=shop.results[1]))
    (absent,) = set(SIZES) - set(shop.opened.options["size"])
    for call in (
        call_text("choose", option="size", value=absent),
        call_text("choose", option="size", value=OPTIONS["color"][0]),
        call_text("open", item=shop.results[2]),
    ):
        before = shop.state_key()
        assert shop.step(call)[0].startswith("error: ") and shop.state_key() == before
    assert not shop.step(call_text("choose", option="price", value="10"))[4]["action_is_valid"]


@pytest.mark.parametrize(
    "setting", [{"conditions": 6}, {"products": 11}, {"results": 2}, {"partial": 1.5}]
)
def test_settings_out_of_range_raise(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        WebShop(**setting)
