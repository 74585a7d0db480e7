"""Generator of a small company wiki: people, teams, projects, contracts and meeting notes; and its full-text search."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

PEOPLE = ("Kim", "Lee", "Ana", "Bob", "Eve", "Max", "Zoe", "Ivo", "Uma", "Joe", "Mia", "Tom")
TEAMS = ("red", "blue", "green", "gold", "pink", "gray")
PROJECTS = ("fox", "owl", "bear", "wolf", "crow", "seal")
CLIENTS = ("Acme", "Bolt", "Cora", "Dune", "Echo", "Fuji")
CITIES = ("Rome", "Oslo", "Bern", "Lima")
AMOUNTS = ("10", "20", "30", "40", "50", "60", "70", "80", "90")

# relation: kind of page that states it, kind of its value
RELATIONS = {
    "team": ("person", "team"),
    "city": ("person", ""),
    "lead": ("team", "person"),
    "project": ("team", "project"),
    "client": ("project", "client"),
    "budget": ("project", ""),
    "contact": ("client", "person"),
    "notice": ("client", ""),
}
AMENDABLE = ("budget", "notice")
_TEXTS = {
    "person": "{entity} works in team {team} and sits in {city}.",
    "team": "Team {entity} is led by {lead} and builds {project}.",
    "project": "Project {entity} is for {client}, its budget is {budget}.",
    "client": "Contract with {entity}: contact {contact}, notice {notice} days.",
}
_REMARKS = ("all is on time.", "no decision.")
# of BM25 (Robertson and Zaragoza, 2009): saturation of a word's count and influence of a page's length
_K1, _B = 1.2, 0.75


class Page(NamedTuple):
    """Page of the wiki. `states` holds the facts of its text: value by entity and relation."""

    id: str
    title: str
    text: str
    states: dict[tuple[str, str], str]


@dataclass(slots=True)
class Wiki:
    """Pages and current facts.

    Attributes:
        pages: Pages by id.
        kinds: Kind of each entity.
        facts: Current value by entity and relation; meeting notes change what other pages state.
        sources: Id of the page that states the current value.
        documents: Words of each page, in the order of the pages.
    """

    pages: dict[str, Page] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    facts: dict[tuple[str, str], str] = field(default_factory=dict)
    sources: dict[tuple[str, str], str] = field(default_factory=dict)
    documents: list[list[str]] = field(default_factory=list)

    def search(self, query: str, *, count: int) -> list[Page]:
        """Return the best pages by BM25, of equal ones the first; none that lacks all words of the query."""
        pages = list(self.pages.values())
        scores = bm25(words(query), self.documents)
        order = sorted(range(len(pages)), key=lambda index: -scores[index])
        return [pages[index] for index in order[:count] if scores[index] > 0]


def words(text: str) -> list[str]:
    """Return the words of a text in lower case.

    >>> words("Notice: 30 days.")
    ['notice', '30', 'days']
    """
    return re.findall(r"[^\W_]+", text.casefold())


def bm25(query: Sequence[str], documents: Sequence[Sequence[str]]) -> list[float]:
    """Return the BM25 score of each document.

    >>> [score > 0 for score in bm25(["owl"], [["owl", "fox"], ["fox"]])]
    [True, False]
    """
    mean_length = sum(map(len, documents)) / max(len(documents), 1)
    scores = [0.0] * len(documents)
    for word in dict.fromkeys(query):
        counts = [document.count(word) for document in documents]
        containing = sum(count > 0 for count in counts)
        rarity = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
        for index, count in enumerate(counts):
            length = len(documents[index]) / mean_length
            saturation = count / (count + _K1 * (1 - _B + _B * length)) if count else 0
            scores[index] += rarity * saturation * (_K1 + 1)
    return scores


def draw_wiki(rng: np.random.Generator, *, people: int, notes: int) -> Wiki:
    """Draw a wiki with `people` persons, half as many teams, projects and contracts, and `notes` meeting notes."""
    wiki, half = Wiki(), max(2, people // 2)
    pools = {"person": PEOPLE, "team": TEAMS, "project": PROJECTS, "client": CLIENTS}
    chosen = {
        kind: [str(name) for name in rng.permutation(pool)[: people if kind == "person" else half]]
        for kind, pool in pools.items()
    }
    wiki.kinds = {name: kind for kind, names in chosen.items() for name in names}
    for relation, (kind, target) in RELATIONS.items():
        values = chosen.get(target) or (CITIES if relation == "city" else AMOUNTS)
        for name in chosen[kind]:
            wiki.facts[name, relation] = values[int(rng.integers(len(values)))]
    drafts = [_entity_page(wiki, name) for name in wiki.kinds]
    noted = rng.permutation(chosen["project"] + chosen["client"])[:notes]
    drafts += [_notes_page(wiki, str(name), rng) for name in noted]
    ids = {int(place): f"p{number}" for number, place in enumerate(rng.permutation(len(drafts)), 1)}
    # Notes come last and so change what the other pages state.
    for place, draft in enumerate(drafts):
        wiki.facts.update(draft.states)
        wiki.sources.update(dict.fromkeys(draft.states, ids[place]))
    wiki.pages = {id: drafts[place]._replace(id=id) for place, id in ids.items()}
    wiki.documents = [words(f"{page.title} {page.text}") for page in wiki.pages.values()]
    return wiki


def _entity_page(wiki: Wiki, entity: str) -> Page:
    facts = {(of, relation): value for (of, relation), value in wiki.facts.items() if of == entity}
    values = {relation: value for (_, relation), value in facts.items()}
    text = _TEXTS[wiki.kinds[entity]].format(entity=entity, **values)
    return Page("", entity, text, facts)


def _notes_page(wiki: Wiki, entity: str, rng: np.random.Generator) -> Page:
    """Return meeting notes about an entity; half of them change a number."""
    title = f"notes {entity}"
    if rng.random() < 0.5:
        remark = _REMARKS[int(rng.integers(len(_REMARKS)))]
        return Page("", title, f"Meeting on {entity}: {remark}", {})
    relation = "budget" if wiki.kinds[entity] == "project" else "notice"
    others = [amount for amount in AMOUNTS if amount != wiki.facts[entity, relation]]
    value = others[int(rng.integers(len(others)))]
    text = f"Meeting on {entity}: {relation} is now {value}."
    return Page("", title, text, {(entity, relation): value})
