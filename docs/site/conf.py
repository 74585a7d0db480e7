"""Settings of Sphinx for `make site`: the README, the pages of docs/, and the API from docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Modules that users call, configure and derive from. The others serve the commands.
PUBLIC = (
    "__init__.py", "api.py", "trajectory.py", "algorithms", "rewards", "data", "modules", "loops", "metrics",
    "callbacks", "engines",
)  # fmt: skip

project = "ragen_pl"
extensions = ["myst_parser", "sphinx.ext.napoleon", "autoapi.extension"]
root_doc = "docs/site/index"
include_patterns = ["README.md", "docs/**"]
exclude_patterns = ["docs/*_notes.md"]  # parts of generated pages

# Headings have the anchors that they have on GitHub.
myst_heading_anchors = 4
# Docstrings have code in single backticks.
default_role = "code"
smartquotes_action = "D"  # dashes, no quotation marks: they belong to texts of episodes

# Sources are read, not imported: the environment of the site has no torch.
autoapi_dirs = [str(ROOT / "ragen_pl")]
autoapi_ignore = [
    f"*/ragen_pl/{path.name}/*" if path.is_dir() else f"*/ragen_pl/{path.name}"
    for path in (ROOT / "ragen_pl").iterdir()
    if path.name not in PUBLIC
]
autoapi_root = "docs/api"
autoapi_add_toctree_entry = False
autoapi_options = ["members", "show-inheritance"]
suppress_warnings = ["autoapi.python_import_resolution"]  # imports of modules that are not public

html_theme = "furo"
html_title = "ragen_pl"
html_extra_path = ["index.html"]  # leads to the README
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False


def with_other_pages(navigation: str, names: Iterable[str]) -> str:
    """Return the text of the navigation with a last section of the pages of docs/ that it does not name.

    Args:
        navigation: Text of `docs/site/index.md`.
        names: Pages, from the root of the repository and without suffix: `docs/training`.
    """
    named = re.findall(r"/(docs/[\w-]+)", navigation)
    others = [
        f"/{name}"
        for name in sorted(names)
        if name not in named and re.fullmatch(r"docs/[\w-]+", name)
    ]
    if not others:
        return navigation
    return "\n".join([navigation, "```{toctree}", ":caption: More", "", *others, "```", ""])


def _read(app: Any, name: str, source: list[str]) -> None:
    if name == root_doc:
        source[0] = with_other_pages(source[0], app.env.found_docs)


def setup(app: Any) -> None:
    """Let new pages appear without an edit."""
    app.connect("source-read", _read)
