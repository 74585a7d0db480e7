"""The knowledge base: its wiki, its search, what an answer and its source are worth, and what guesses earn."""

from __future__ import annotations

import numpy as np
import pytest
from support.episodes.players import play

import envs.wiki
from envs.knowledge_base import KnowledgeBase
from envs.tools import call_text
from envs.wiki import AMOUNTS, CITIES, bm25, draw_wiki, words

LARGE = {"hops": 3, "people": 12, "notes": 4, "results": 8, "amended_fraction": 0.5}


@pytest.mark.parametrize("settings", [{}, LARGE, {"people": 2, "hops": 3, "notes": 4}])
def test_the_reader_who_follows_the_facts_succeeds_within_ten_turns(settings):
    base, rng, difficulties = KnowledgeBase(**settings), np.random.default_rng(0), set()
    for seed in range(150):
        base.reset(seed=seed)
        difficulties.add(base.difficulty())
        assert play(base, lambda base: base.optimal_action(rng), limit=10)[:2] == (1.0, True)
    assert difficulties == set(range(1, base.max_hops + 2))


def test_pages_state_the_facts_and_notes_have_the_last_word():
    changed = 0
    for seed in range(60):
        wiki = draw_wiki(np.random.default_rng(seed), people=6, notes=4)
        for fact, value in wiki.facts.items():
            page = wiki.pages[wiki.sources[fact]]
            assert page.states[fact] == value and value.casefold() in words(page.text)
            if page.title.startswith("notes "):
                (old,) = (each for each in wiki.pages.values() if each.title == fact[0])
                assert old.states[fact] != value
                changed += 1
        assert sorted(wiki.pages) == sorted({page.id for page in wiki.pages.values()})
    assert changed > 60


def test_bm25_is_that_of_its_equation():
    # two documents of 1 and 3 words, mean 2; "owl" once in the second: idf = ln(1 + 1.5 / 1.5)
    (first, second) = bm25(["owl"], [["fox"], ["owl", "fox", "fox"]])
    assert first == 0
    assert second == pytest.approx(np.log(2) * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 1.5)))


def test_rare_words_count_more_and_unknown_ones_nothing():
    wiki = draw_wiki(np.random.default_rng(0), people=4, notes=2)
    name = next(iter(wiki.kinds))
    assert wiki.search(f"is in team {name}", count=1)[0].title in (name, f"notes {name}")
    assert wiki.search("zebra !?", count=3) == []
    assert len(wiki.search("is in", count=3)) == 3


def solved(base: KnowledgeBase, seed: int) -> tuple[str, str]:
    """Begin an episode, read the right source, and return the right answer and this source."""
    base.reset(seed=seed)
    fact = base.chain[-1]
    source = base.wiki.sources[fact]
    base.step(call_text("read", page=source))
    return base.wiki.facts[fact], source


@pytest.mark.parametrize(
    ("change", "reward"),
    [
        (lambda text, source: (text, source), 1.0),
        (lambda text, source: (f" {text.upper()}. ", source), 1.0),
        (lambda text, source: (text, "p0"), 0.5),
        (lambda text, source: ("nobody", source), 0.0),
        (lambda text, source: (f"{text} or nobody", source), 0.0),
        (lambda text, source: (" ".join((*CITIES, *AMOUNTS, text)), source), 0.0),
        (lambda text, source: (text, f"{source} p0"), 0.5),
        (lambda text, source: ("", source), 0.0),
    ],
)
def test_the_source_counts_with_the_right_answer_only(change, reward):
    base = KnowledgeBase()
    for seed in range(20):
        text, source = change(*solved(base, seed))
        _, earned, over, _, info = base.step(call_text("answer", text=text, source=source))
        assert (earned, over, info["success"]) == (reward, True, reward == 1)
        assert sum(info["reward_parts"].values()) == earned


def test_a_source_that_was_not_read_does_not_count():
    base = KnowledgeBase()
    base.reset(seed=0)
    fact = base.chain[-1]
    call = call_text("answer", text=base.wiki.facts[fact], source=base.wiki.sources[fact])
    assert base.step(call)[1] == 0.5


def test_the_page_that_notes_have_overtaken_is_no_answer():
    base = KnowledgeBase(amended_fraction=1.0)
    for seed in range(20):
        base.reset(seed=seed)
        fact = base.chain[-1]
        if not base.is_amended():  # a wiki whose notes change nothing
            continue
        (old,) = (page for page in base.wiki.pages.values() if page.title == fact[0])
        base.step(call_text("read", page=old.id))
        assert base.step(call_text("answer", text=old.states[fact], source=old.id))[1] == 0


@pytest.mark.parametrize(
    "choose",
    [
        *(
            lambda base, guess=guess: call_text("answer", text=guess, source="p1")
            for guess in ("Rome", "20", "Kim", "red", "Acme", "", "unknown")
        ),
        lambda base: call_text("search", query=base.question()),
        lambda base: call_text("read", page="p1"),
        # the first page that a search for the question shows, and the last word in it
        lambda base: (
            call_text("search", query=base.question())
            if not base.shown
            else call_text("read", page=min(base.shown))
            if not base.read_ids
            else call_text(
                "answer",
                text=words(base.wiki.pages[min(base.read_ids)].text)[-1],
                source=min(base.read_ids),
            )
        ),
    ],
)
def test_guesses_earn_little(choose):
    base, totals = KnowledgeBase(), []
    for seed in range(200):
        base.reset(seed=seed)
        totals.append(play(base, choose, limit=12).reward)
    assert np.mean(totals) < 0.15


def test_calls_that_find_nothing_change_nothing():
    base = KnowledgeBase()
    base.reset(seed=0)
    before = base.state_key()
    for call in (call_text("search", query="zebra"), call_text("read", page="p99")):
        text, _, over, _, info = base.step(call)
        assert text.startswith("error: ") and not over and not info["action_is_effective"]
    assert base.state_key() == before


@pytest.mark.parametrize("setting", [{"hops": 4}, {"people": 1}, {"notes": 5}, {"results": 0}])
def test_settings_out_of_range_raise(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        KnowledgeBase(**setting)


def test_doctests():
    import doctest

    assert doctest.testmod(envs.wiki).failed == 0
