"""Knowledge base: answer a question in one to three hops from a company wiki, and name the page that says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval

from .base import Probability, checked_arguments
from .tools import CALL_WORDS, ToolEnvironment, ToolError, call_text, tool
from .wiki import (
    AMENDABLE,
    AMOUNTS,
    CITIES,
    CLIENTS,
    PEOPLE,
    PROJECTS,
    RELATIONS,
    TEAMS,
    Wiki,
    draw_wiki,
    words,
)

# draws of a question until it is, or is not, about a fact that notes have changed
_DRAWS = 40


class KnowledgeBase(ToolEnvironment):
    """Search the wiki, read pages, and answer with the page as source.

    ## Rewards
    `answer`: 0.5 for the right answer. `source`: 0.5 more if the source is the page that states it now and has been
    read. Nothing for a wrong answer, whatever its source.

    ## Trivial Policies
    Who reads the first result of a single search has success at most 0.45 with the shipped settings:
    one of three questions has a single hop.

    ## Episode End
    Terminated by an answer.

    ## Arguments
    - `hops`: largest number of facts that lead to the answer, from 1 to 3; the number is drawn, larger ones more often.
    - `people`: number of persons; there are half as many teams, projects and contracts.
    - `notes`: number of meeting notes. `amended_fraction`: fraction of questions about a fact that notes have changed.
    - `results`: number of pages that a search shows.
    """

    needs_trust = ()

    rules = (
        "You answer a question from a company's wiki. It has a page for each person, team, project and contract "
        "with a client, and notes of meetings. Search for pages by their words, read them by their id, and answer "
        "with the name or the number only, together with the id of the page that states it. Notes of a meeting "
        "change what other pages say about budgets and notice; the source is then the page of the notes. A page "
        "counts as a source only if you have read it. You can answer once."
    )

    frequent_words = (
        *CALL_WORDS, "search", "query", "read", "page", "answer", "text", "source", "question", "unknown",
        "works in team", "and sits in", "is led by", "and builds", "is for", "its budget is", "Contract with",
        "contact", "days", "Meeting on", "is now", "all is on time", "no decision", "notes", "Team", "Project",
        "team", "city", "lead", "project", "client", "budget", "notice", *PEOPLE, *TEAMS, *PROJECTS, *CLIENTS, *CITIES,
        *(f"p{number}" for number in (*range(10, 13), *range(1, 10))), *AMOUNTS,
    )  # fmt: skip

    @checked_arguments
    def __init__(
        self,
        *,
        hops: Annotated[int, Interval(ge=1, le=3)] = 2,
        people: Annotated[int, Interval(ge=2, le=12)] = 4,
        notes: Annotated[int, Interval(ge=0, le=4)] = 2,
        amended_fraction: Probability = 0.2,
        results: Annotated[int, Interval(ge=2, le=8)] = 4,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(max_observation_length=1000, render_mode=render_mode)
        self.max_hops, self.people, self.notes = hops, people, notes
        self.amended_fraction, self.results = amended_fraction, results
        self.wiki = Wiki()
        # the facts that lead to the answer, first to last
        self.chain: list[tuple[str, str]] = []
        self.shown: set[str] = set()
        self.read_ids: set[str] = set()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Draw a wiki and a question."""
        self._begin(seed=seed, options=options)
        self.wiki = draw_wiki(self.np_random, people=self.people, notes=self.notes)
        # one hop as often as one in three of up to two: its answer is on the first page
        lots = [hops for hops in range(1, self.max_hops + 1) for _ in range(hops)]
        hops = lots[int(self.np_random.integers(len(lots)))]
        amended = bool(self.np_random.random() < self.amended_fraction)
        for _ in range(_DRAWS):
            self.chain = self._draw_chain(hops)
            if self.is_amended() == amended:
                break
        self.shown, self.read_ids, self._calls = set(), set(), 0
        return f"question: {self.question()}?", {}

    @tool
    def search(self, query: str) -> str:
        """List ids and titles of the pages that fit the words of a query best."""
        pages = self.wiki.search(query, count=self.results)
        if not pages:
            raise ToolError("no page has these words")
        self._calls += 1
        self.shown.update(page.id for page in pages)
        return ", ".join(f"{page.id} {page.title}" for page in pages)

    @tool
    def read(self, page: str) -> str:
        """Show a page by its id."""
        if page not in self.wiki.pages:
            raise ToolError("no such page")
        self._calls += 1
        self.read_ids.add(page)
        return self.wiki.pages[page].text

    @tool
    def answer(self, text: str, source: str) -> str:
        """Answer the question and name the id of the page that states the answer."""
        self._calls += 1
        fact = self.chain[-1]
        right = words(text) == words(self.wiki.facts[fact])
        sourced = right and source == self.wiki.sources[fact] and source in self.read_ids
        self.end(success=sourced, answer=0.5 * right, source=0.5 * sourced)
        return "closed"

    def describe(self) -> str:
        """Describe how far the facts are known: the fact in question, and where it stands."""
        entity, relation = self._fact()
        page = self._page()
        if page is None:
            return f"{entity} {relation} unknown"
        if page in self.read_ids:
            return f"{entity} {relation} {self.wiki.facts[entity, relation]} in {page}"
        return f"{entity} {relation} at {page}"

    def state_key(self) -> str:
        """Return the wiki, the question and the results and pages shown so far."""
        pages = [(page.id, page.text) for page in self.wiki.pages.values()]
        seen = f"{sorted(self.shown)} {sorted(self.read_ids)} {self._calls}"
        return f"{self.question()} {sorted(pages)} {seen}"

    def difficulty(self) -> int:
        """Return the number of facts that lead to the answer, with the change of the last one."""
        return len(self.chain) + self.is_amended()

    def optimal_action(self, rng: np.random.Generator) -> str:
        """Return the next step of a reader who looks for one fact after the other, and for notes about the last."""
        page = self._page()
        if page is None:
            return call_text("search", query=self._fact()[0])
        if page not in self.read_ids:
            return call_text("read", page=page)
        return call_text("answer", text=self.wiki.facts[self.chain[-1]], source=page)

    def argument_values(self, argument: str) -> list[Any]:
        """Return the names, ids and values that the wiki has."""
        names = sorted(self.wiki.kinds)
        values: dict[str, list[Any]] = {
            "query": names,
            "page": list(self.wiki.pages),
            "source": list(self.wiki.pages),
            "text": sorted(set(self.wiki.facts.values())),
        }
        return values[argument]

    def question(self) -> str:
        """Return the question as the observation asks it, without a question mark."""
        relations = [relation for _, relation in reversed(self.chain)]
        return f"{' of '.join(relations)} of {self.chain[0][0]}"

    def is_amended(self) -> bool:
        """Return whether notes of a meeting state the answer, not the entity's own page."""
        entity = self.chain[-1][0]
        return self.wiki.pages[self.wiki.sources[self.chain[-1]]].title != entity

    def _fact(self) -> tuple[str, str]:
        """Return the first fact whose page has not been read, or the last fact."""
        unread = (fact for fact in self.chain[:-1] if self.wiki.sources[fact] not in self.read_ids)
        return next(unread, self.chain[-1])

    def _page(self) -> str | None:
        """Return the page to read for the present fact among those shown; None if a search has to come first.

        The page of an entity comes before notes about it, which count only for numbers that notes can change.
        """
        entity, relation = fact = self._fact()
        titles = {self.wiki.pages[id].title: id for id in sorted(self.shown)}
        page, notes = titles.get(entity), titles.get(f"notes {entity}")
        if page is None or page not in self.read_ids or fact != self.chain[-1]:
            return page
        if notes is not None and relation in AMENDABLE:
            return notes if notes not in self.read_ids else self.wiki.sources[fact]
        return page

    def _draw_chain(self, hops: int) -> list[tuple[str, str]]:
        """Draw relations from the last to the first, each from a kind of page that the next one needs."""
        draw = self.np_random
        relations = [str(draw.choice(list(RELATIONS)))]
        while len(relations) < hops:
            kind = RELATIONS[relations[0]][0]
            before = [name for name, (_, target) in RELATIONS.items() if target == kind]
            relations.insert(0, str(draw.choice(before)))
        kind = RELATIONS[relations[0]][0]
        entity = str(draw.choice([name for name, of in self.wiki.kinds.items() if of == kind]))
        chain = []
        for relation in relations:
            chain.append((entity, relation))
            entity = self.wiki.facts[entity, relation]
        return chain
