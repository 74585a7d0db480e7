"""The catalog of environments plays them as shipped and keeps what it says of others."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def environment_catalog(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import environment_catalog

    return environment_catalog


def test_the_page_has_a_line_and_a_section_of_each_environment(
    environment_catalog, tmp_path, monkeypatch
):
    monkeypatch.setattr(environment_catalog, "IMAGES", tmp_path / "environments")
    monkeypatch.setattr(environment_catalog, "PAGE", tmp_path / "page.md")
    page = tmp_path / "page.md"

    def run(*names):
        arguments = ["--only", *names, "--episodes", "20", "--page", str(page)]
        monkeypatch.setattr(sys, "argv", ["environment_catalog.py", *arguments])
        environment_catalog.main()
        return page.read_text()

    text = run("blackjack", "frozenlake_visual")
    lake = next(line for line in text.splitlines() if line.startswith("| [`frozenlake_visual`]"))
    assert "images of 64 by 64 | 4 names" in lake and "| 1.00 [0.84, 1.00] |" in lake
    assert (tmp_path / "environments" / "frozenlake_visual.png").exists()
    assert "> you 20 hard" not in text and "## blackjack" in text and "> Stand" in text
    # another environment is added, and the others stay as they are
    more = run("support_desk")
    assert set(text.splitlines()) <= set(more.splitlines())
    assert "tools: find" in more and '> {"name": "' in more
