"""Web shop: find a product that has everything a customer asks for, choose its options, and buy it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from annotated_types import Interval

from .base import Probability, Reward, checked_arguments
from .tools import ToolEnvironment, ToolError, call_text, tool
from .wiki import words

T = TypeVar("T")
KINDS = ("shirt", "coat", "hat", "belt", "shoes", "gloves")
MATERIALS = ("wool", "linen", "denim", "felt")
COLORS = ("red", "blue", "green", "black", "white")
SIZES = ("S", "M", "L")
PRICES = tuple(range(10, 100, 10))
STARS = (1, 2, 3, 4, 5)
OPTIONS = {"color": COLORS, "size": SIZES}


@dataclass(frozen=True, slots=True)
class Product:
    """Product of the catalogue. `options` holds the values on offer, by option."""

    id: str
    kind: str
    material: str
    price: int
    stars: int
    options: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return f"{self.id} {self.material} {self.kind} {self.price} {self.stars}*"

    def words(self) -> set[str]:
        """Return the words that a search finds it by."""
        values = [value for offered in self.options.values() for value in offered]
        return {word.casefold() for word in (self.kind, self.material, *values)}


@dataclass(frozen=True, slots=True)
class Request:
    """Conditions of the customer; None where there is none. `prices` are the lowest and the highest one."""

    kind: str
    prices: tuple[int, int]
    material: str | None = None
    stars: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        size = f", size {self.options['size']}" if "size" in self.options else ""
        stars = f", at least {self.stars}*" if self.stars else ""
        named = [self.options.get("color"), self.material, self.kind]
        return f"{' '.join(filter(None, named))}{size}{stars}, {self.prices[0]} to {self.prices[1]}"

    def query(self) -> str:
        """Return the words of a search for it."""
        named = [self.options.get("color"), self.material, self.kind, self.options.get("size")]
        return " ".join(filter(None, named))

    def bounds(self) -> str:
        """Return the bounds of price and stars."""
        return f"{self.prices[0]} to {self.prices[1]}" + (f" {self.stars}*" if self.stars else "")

    def conditions(self, product: Product, chosen: Mapping[str, str]) -> list[bool]:
        """Return which conditions a product with the options chosen meets, beyond its kind."""
        met = [self.prices[0] <= product.price <= self.prices[1]]
        met += [product.material == self.material] if self.material else []
        met += [product.stars >= self.stars] if self.stars else []
        return met + [chosen.get(name) == value for name, value in self.options.items()]

    def fits(self, product: Product) -> bool:
        """Tell whether a product has all that is asked for once its options are chosen."""
        offered = {n: v for n, v in self.options.items() if v in product.options[n]}
        return product.kind == self.kind and all(self.conditions(product, offered))


class WebShop(ToolEnvironment):
    """Search a catalogue, open a product, choose its options, and buy it.

    Each word of the request has products that lack only this one, and each page has products with all the words that
    are too cheap, too dear or rated too low. The first place of a page is sold to the dearest product that fits the
    words. It is dearer than the request allows. Among the others the right product is as likely the cheapest as the
    dearest.

    ## Trivial Policies
    Who searches for the request, chooses its options, and buys the cheapest, the dearest, the best rated or the first
    result has success at most 0.45 and return at most 0.4 with the shipped settings.

    ## Rewards
    `right`: 1 for a product with everything that was asked for. Otherwise `wrong`: minus `wrong_cost`, and `partial`:
    `partial` times the fraction of conditions that are met, if the kind is right.

    ## Episode End
    Terminated by a purchase.

    ## Arguments
    - `conditions`: largest number of conditions beside the kind, from 1 to 5; the number is drawn. One is the price.
    - `products`: number of products. `results`: number of results that a search shows.
    - `wrong_cost`, `partial`: see Rewards.
    """

    needs_trust = ()

    rules = (
        "You buy one product in a web shop for a customer, who says what it has to be. Search for it by words: its "
        "kind, material, color and size. A result shows the product's id, material, kind, price and stars. The "
        "first result is an advertisement, and the others are in no order if they fit the words equally well. Open a "
        "result to see its colors and sizes, choose the color and the size that were asked for, and buy. Go back to "
        "see the results again. You can buy once."
    )

    frequent_words = (
        '{"name": "', '", "arguments": {"', '", "arguments": {}}', '": "', '", "', '"}}', "want", "search", "query",
        "open", "item", "choose", "option", "value", "back", "buy", "bought", *OPTIONS, "to", "at least", "fits",
        "no", "ready", "error", *KINDS, *MATERIALS, *COLORS,
        *(f"p{number}" for number in (*range(10, 25), *range(1, 10))), *map(str, PRICES), *(f"{n}*" for n in STARS),
    )  # fmt: skip

    @checked_arguments
    def __init__(
        self,
        *,
        conditions: Annotated[int, Interval(ge=1, le=5)] = 3,
        products: Annotated[int, Interval(ge=12, le=99)] = 24,
        results: Annotated[int, Interval(ge=3, le=8)] = 4,
        wrong_cost: Reward = 0.1,
        partial: Probability = 0.0,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(max_observation_length=1000, render_mode=render_mode)
        self.max_conditions, self.product_count, self.result_count = conditions, products, results
        self.wrong_cost, self.partial = wrong_cost, partial
        self.products: dict[str, Product] = {}
        self.results: list[str] = []
        self.opened: Product | None = None
        self.chosen: dict[str, str] = {}

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Draw a request and a catalogue."""
        self._begin(seed=seed, options=options)
        self.request = self._draw_request()
        self.products = self._draw_products()
        self.results, self.opened, self.chosen, self._calls = [], None, {}, 0
        return f"want: {self.request}", {}

    @tool
    def search(self, query: str) -> str:
        """List the products that fit most words of a query."""
        wanted = set(words(query))
        counts = {id: len(wanted & product.words()) for id, product in self.products.items()}
        ranked = sorted(self.products, key=lambda id: -counts[id])
        best = [id for id in ranked if counts[id] == counts[ranked[0]] > 0]
        if not best:
            raise ToolError("no product has these words")
        advertised = max(best, key=lambda id: self.products[id].price)
        ranked = [advertised, *(id for id in ranked if id != advertised and counts[id])]
        self.results, self.opened = ranked[: self.result_count], None
        return self._page()

    @tool
    def open(self, item: str) -> str:
        """Open a result by its id and show its colors and sizes."""
        if self.opened is not None or item not in self.results:
            raise ToolError("no such result here")
        self._calls += 1
        self.opened, self.chosen = self.products[item], {}
        offered = (f"{name} {' '.join(offer)}" for name, offer in self.opened.options.items())
        return f"{self.opened}, {', '.join(offered)}"

    @tool
    def choose(self, option: Literal["color", "size"], value: str) -> str:
        """Choose a color or a size of the open product."""
        if value not in self._open_product().options[option]:
            raise ToolError(f"no such {option}")
        self._calls += 1
        self.chosen[option] = value
        return f"{option} {value}"

    @tool
    def back(self) -> str:
        """Go back to the results."""
        self._open_product()
        self.opened = None
        return self._page()

    @tool
    def buy(self) -> str:
        """Buy the open product with the options chosen; this ends the task."""
        product = self._open_product()
        self._calls += 1
        met = self.request.conditions(product, self.chosen)
        right = product.kind == self.request.kind and all(met)
        met_fraction = (
            float(np.mean(met)) if product.kind == self.request.kind and not right else 0.0
        )
        wrong = 0.0 if right else -self.wrong_cost
        self.end(success=right, right=right, wrong=wrong, partial=self.partial * met_fraction)
        return f"bought {product.id}"

    def describe(self) -> str:
        """Describe the request, or compare the results or the open product with its conditions, one by one.

        Results are compared up to the first that fits: `30 to 40, p7 90 no, p4 30 1* no, p12 40 fits`.
        """
        bounds = self.request.bounds()
        if self.opened is not None:
            missing = " ".join(self.missing_options(self.opened))
            fitting = f"{missing} open" if missing else "ready"
            verdict = fitting if self.request.fits(self.opened) else "no"
            return f"{bounds}, {self._compared(self.opened)} {verdict}"
        if self.results:
            found = self._fitting()
            worse = self.results[: self.results.index(found)] if found else self.results
            compared = [f"{self._compared(self.products[id])} no" for id in worse]
            compared += [f"{self._compared(self.products[found])} fits"] if found else []
            return ", ".join([bounds, *compared])
        return self.request.query()

    def state_key(self) -> str:
        """Return the request, the catalogue, the present page and choices, and the number of calls."""
        catalogue = [(str(product), product.options) for product in self.products.values()]
        shown = f"{self.results} {self.opened and self.opened.id} {self.chosen} {self._calls}"
        return f"{self.request} {catalogue} {shown}"

    def difficulty(self) -> int:
        """Return the number of conditions beside the kind."""
        asked = (self.request.prices, self.request.material, self.request.stars)
        return sum(value is not None for value in asked) + len(self.request.options)

    def optimal_action(self, rng: np.random.Generator) -> str:
        """Return the next step of a buyer who searches for all words and opens a product that fits."""
        if self.opened is not None:
            if not self.request.fits(self.opened):
                return call_text("back")
            for option in self.missing_options(self.opened):
                return call_text("choose", option=option, value=self.request.options[option])
            return call_text("buy")
        fitting = self._fitting()
        if fitting is None:
            return call_text("search", query=self.request.query())
        return call_text("open", item=fitting)

    def argument_values(self, argument: str) -> list[Any]:
        """Return the ids that are shown, words of the shop, and the values of options."""
        values: dict[str, list[Any]] = {
            "query": [*KINDS, *MATERIALS, self.request.query()],
            "item": self.results or list(self.products),
            "value": [*COLORS, *SIZES],
        }
        return values[argument]

    def _page(self) -> str:
        self._calls += 1
        self.chosen = {}
        return ", ".join(str(self.products[id]) for id in self.results)

    def _open_product(self) -> Product:
        if self.opened is None:
            raise ToolError("no product is open")
        return self.opened

    def _compared(self, product: Product) -> str:
        """Return the product's price and, if that is within its bounds, stars and a material that is not asked for."""
        request, (low, high) = self.request, self.request.prices
        parts = [product.id, str(product.price)]
        if low <= product.price <= high:
            if request.stars:
                parts.append(f"{product.stars}*")
            if request.material and product.material != request.material:
                parts.append(product.material)
        return " ".join(parts)

    def _fitting(self) -> str | None:
        """Return the first result that has all that is asked for."""
        return next((id for id in self.results if self.request.fits(self.products[id])), None)

    def missing_options(self, product: Product) -> list[str]:
        """Return the options that have not been chosen as asked."""
        asked = self.request.options
        return [name for name, value in asked.items() if self.chosen.get(name) != value]

    def _draw_request(self) -> Request:
        count = int(self.np_random.integers(self.max_conditions))
        asked = self._pick_some(("material", "stars", *OPTIONS), count)
        return Request(
            kind=self._pick(KINDS),
            prices=self._draw_prices(),
            material=self._pick(MATERIALS) if "material" in asked else None,
            stars=self._pick(STARS[1:]) if "stars" in asked else None,
            options={name: self._pick(values) for name, values in OPTIONS.items() if name in asked},
        )

    def _draw_prices(self) -> tuple[int, int]:
        """Draw a range that some products are below and some above."""
        inner = PRICES[1:-1]
        low = int(self.np_random.integers(len(inner)))
        return inner[low], self._pick(inner[low : low + 3])

    def _draw_products(self) -> dict[str, Product]:
        """Draw the product that fits, near misses, and products that lack a word of the request."""
        request, numbers = self.request, range(1, self.product_count + 1)
        ids = [f"p{number}" for number in self._pick_some(numbers, len(numbers))]
        low, high = request.prices
        right = self._draw_like(ids.pop(), request)
        # its place by price among the results is as likely to be any, so that no place is a good guess
        others = self.result_count - 2
        cheaper = int(self.np_random.integers(others + 1))
        sides = [tuple(range(PRICES[0], right.price, 10))] * cheaper
        sides += [tuple(range(right.price + 10, PRICES[-1] + 1, 10))] * (others - cheaper)
        products = [right, self._draw_like(ids.pop(), request, prices=(PRICES[-1],))]
        for prices in sides:
            within = [price for price in prices if low <= price <= high]
            outside = [price for price in prices if price not in within]
            rated_low = bool(request.stars and within and self.np_random.random() < 0.5)
            fault = "stars" if rated_low else None
            products.append(
                self._draw_like(
                    ids.pop(), request, fault=fault, prices=within if rated_low else outside
                )
            )
        lacking = ["material"] if request.material else []
        for fault in [*lacking, *request.options]:
            products.append(self._draw_like(ids.pop(), request, fault=fault))
        asked = set(words(request.query()))
        while ids:
            product = self._draw_product(ids[-1])
            # one with all the words could take the place of the one that fits
            if not asked <= product.words():
                products.append(product)
                ids.pop()
        return {product.id: product for product in self._pick_some(products, len(products))}

    def _draw_product(self, id: str) -> Product:
        kind, material = self._pick(KINDS), self._pick(MATERIALS)
        options = {name: _in_order(self._pick_some(OPTIONS[name], 2), name) for name in OPTIONS}
        return Product(id, kind, material, self._pick(PRICES), self._pick(STARS), options)

    def _draw_like(
        self,
        id: str,
        request: Request,
        *,
        fault: str | None = None,
        prices: Sequence[int] | None = None,
    ) -> Product:
        """Draw a product that a request asks for, or one with a single fault; by default at a price that is right."""
        options = {}
        for name, values in OPTIONS.items():
            asked = request.options.get(name)
            offered = self._pick_some([value for value in values if value != asked], 2)
            if asked is not None and fault != name:
                offered[0] = asked
            options[name] = _in_order(offered, name)
        material = request.material or self._pick(MATERIALS)
        if fault == "material":
            material = self._pick([other for other in MATERIALS if other != material])
        low, min_stars = fault == "stars", request.stars or 1
        lowest, highest = request.prices
        price = self._pick(prices or [price for price in PRICES if lowest <= price <= highest])
        stars = self._pick([stars for stars in STARS if (stars < min_stars) == low])
        return Product(id, request.kind, material, price, stars, options)

    def _pick(self, values: Sequence[T]) -> T:
        return values[int(self.np_random.integers(len(values)))]

    def _pick_some(self, values: Sequence[T], count: int) -> list[T]:
        """Return `count` of the values in an order by chance."""
        return [values[place] for place in self.np_random.permutation(len(values))[:count].tolist()]


def _in_order(offered: Sequence[str], name: str) -> tuple[str, ...]:
    return tuple(value for value in OPTIONS[name] if value in offered)
