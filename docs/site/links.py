"""Check a built site: `python docs/site/links.py FOLDER` prints its dead links, and what it loads from elsewhere.

Links to pages of other sites are not followed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes by which a page loads a file, by tag; `href` of `a` is a link that a reader follows.
_LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href"), ("source", "src")}


class Page(HTMLParser):
    """Anchors, links and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element has."""
        for name, value in attrs:
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.append(value or "")
            elif (tag, name) in _LOADS:
                self.loaded.append(value or "")


def problems(site: Path) -> Iterator[str]:
    """Yield the dead links of a folder of pages, and what a page loads from outside of it."""
    site = site.resolve()
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} has no page"
    for file, page in pages.items():
        for target in page.loaded:
            if urlsplit(target).scheme not in ("", "data") or urlsplit(target).netloc:
                yield f"{file.relative_to(site)} loads {target}"
        for target in [*page.links, *page.loaded]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            named = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not (named.is_file() and named.is_relative_to(site)):
                yield f"{file.relative_to(site)}: there is no {target}"
                continue
            anchors = pages[named].anchors if named in pages else None
            if parts.fragment and anchors is not None and unquote(parts.fragment) not in anchors:
                yield f"{file.relative_to(site)}: {target} has no such anchor"


def main() -> None:
    """Print the problems of a site."""
    found = list(problems(Path(sys.argv[1])))
    sys.exit("\n".join(found) if found else None)


if __name__ == "__main__":
    main()
