"""Links of the pages of docs/, and the site that `make site` makes of them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.servers.browser import in_browser, watched

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
# of the site; parts of generated pages are none
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if not page.stem.endswith("_notes")),
]
_FENCED = re.compile(r"^( *)(```+).*?^\1\2$", re.M | re.S)


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def links() -> ModuleType:
    return loaded("links")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", _FENCED.sub("", page.read_text()), re.M):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return names


def dead_links(pages: list[Path]) -> list[tuple[str, str]]:
    """Return the links between pages, and to files and anchors, that lead nowhere, each with its page."""
    dead = []
    for page in pages:
        text = re.sub(r"`[^`\n]*`", "", _FENCED.sub("", page.read_text()))
        for target in re.findall(r"\]\(([^()\s]+)\)", text):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if "://" in target:
                continue
            # a folder is no file of the site
            if not file.is_file() or (anchor and anchor not in anchors(file)):
                dead.append((page.name, target))
    return dead


def test_links_between_pages_resolve() -> None:
    """Those to anchors and files of the repository too."""
    assert dead_links([*PAGES, ROOT / "benchmarks" / "README.md"]) == []


def test_dead_links_of_pages_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A `b` c\n## A b-c\n## A b-c\n[1](#a-b-c) [2](b.md#d) [3](#d) [4](c.md) [5](.) [6](#a-b-c-2)\n"
        "```md\n# D\n[7](e.md)\n```\n[8](https://a.org/b.md#c) [9](#a-b-c-1) [10](../a.md#d)\n"
    )
    (tmp_path / "b.md").write_text("# D\n")
    found = [target for _, target in dead_links([tmp_path / "a.md", tmp_path / "b.md"])]
    assert found == ["#d", "c.md", ".", "../a.md#d"]


def test_navigation_has_every_page_once() -> None:
    """A page that docs/site/index.md does not name is in the last section."""
    names = [str(page.relative_to(ROOT).with_suffix("")) for page in PAGES]
    text = loaded("conf").with_other_pages((SITE / "index.md").read_text(), [*names, "docs/new"])
    found = re.findall(r"^(?:.*<)?/([\w/-]+)>?$", text, re.M)
    assert sorted(found) == sorted([*names, "docs/new", "docs/api/ragen_pl/index"])
    assert "/docs/new\n" in text.partition(":caption: More")[2]


def test_problems_of_a_site_are_found(links: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    (folder / "b").mkdir(parents=True)
    (tmp_path / "outside.html").touch()
    (folder / "index.html").write_text(
        '<a href="b/c.html#x%20y">1</a> <a href="b/c.html#z">2</a> <a href="b/d.html">3</a> <a href="b">4</a>'
        '<a href="https://a.org">5</a> <a href="../outside.html">6</a> <a href="#">7</a>'
        '<img src="b/no.png"><script src="https://a.org/b.js"></script><link href="//a.org/c.css">'
        '<img src="data:image/png;base64,">'
    )
    (folder / "b" / "c.html").write_text('<p id="x y"><a href="../index.html#">1</a>')
    assert list(links.problems(folder)) == [
        "index.html loads https://a.org/b.js",
        "index.html loads //a.org/c.css",
        "index.html: b/c.html#z has no such anchor",
        "index.html: there is no b/d.html",
        "index.html: there is no b",
        "index.html: there is no ../outside.html",
        "index.html: there is no b/no.png",
    ]
    assert list(links.problems(tmp_path / "empty")) == [f"{tmp_path / 'empty'} has no page"]


@in_browser
@pytest.mark.soak
@pytest.mark.skipif(
    not (ROOT / ".venv-site" / ".installed").exists(), reason="`make site` installs Sphinx"
)
def test_site_works_from_a_folder_without_a_network(links: ModuleType, tmp_path: Path) -> None:
    """Warnings and dead links fail the build. In a browser no page has an error or loads a file from elsewhere."""
    site = tmp_path / "moved"
    command = ["make", "--no-print-directory", "site", f"SITE={tmp_path / 'site'}"]
    done = subprocess.run(
        [*command, f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "site").rename(site)
    assert list(links.problems(site)) == []
    places = [str(page.relative_to(ROOT).with_suffix(".html")) for page in PAGES]
    module = "docs/api/ragen_pl/algorithms/advantages/bilevel/index.html"
    addresses = [(site / place).as_uri() for place in ("index.html", *places, module)]
    # the first one leads to the README
    shows = "document.readyState === 'complete' && document.body.innerText.length > 500"
    visited = watched(addresses, profile=tmp_path / "profile", shows=shows)
    root = f"{site.as_uri()}/"
    for address, page in visited.items():
        assert page.errors == [], address
        assert [one for one in page.requests if not one.startswith((root, "data:"))] == [], address
    texts = {address.removeprefix(root): page.text for address, page in visited.items()}
    assert texts["index.html"] == texts["README.html"]
    assert "gamma_turn" in texts[module] and "Initial state 0" in texts["docs/gallery.html"]
    search = f"{root}search.html?q=bilevel_gae"
    found = watched(
        [search],
        profile=tmp_path / "profile",
        shows="document.querySelector('#search-results li')",
    )[search]
    assert found.errors == [] and "ragen_pl.algorithms.advantages.bilevel" in found.text
