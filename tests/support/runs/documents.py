"""The README and the pages of docs/: their blocks, the files that these describe, and their commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from ragen_pl.config import config_dir
from ragen_pl.config.composition import group_names
from ragen_pl.config.overrides import key_of

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:`(?P<name>[\w.-]+\.jsonl)`[^\n]*:?[^\n]*\n\n)?"
    r"(?:<!-- not run: (?P<reason>[^>]+?) -->\n)?^```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: its language.
        body: its text.
        reason: why its commands are not run; None where they are.
        name: file of JSON lines that the sentence before it names.
    """

    language: str
    body: str
    reason: str | None
    name: str | None = None


def blocks(page: Path) -> list[Block]:
    """Return a page's fenced blocks in order."""
    return [
        Block(match["language"], match["body"], match["reason"], match["name"])
        for match in BLOCK.finditer(page.read_text())
    ]


def commands(body: str) -> list[str]:
    """Return the lines of a shell block, continued ones joined."""
    lines = body.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def write_files(block: Block, folder: Path) -> None:
    """Write the file that a block is: its first line is a comment with the name, or the sentence before has it."""
    named = re.match(r"# ([\w./-]+\.(?:py|ya?ml))\n", block.body)
    if block.language in ("python", "yaml") and named:
        (folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
        # without the name: Hydra reads `# @package` in the first line only
        (folder / named[1]).write_text(block.body.removeprefix(named[0]))
    elif block.language == "json" and block.name is not None:
        (folder / block.name).write_text(block.body)


def has_value(cfg: DictConfig, line: str) -> bool:
    """Return whether a configuration has what an override sets; the options of groups are not looked at."""
    key = key_of(line)
    override = OverridesParser.create().parse_override(line)
    found = OmegaConf.select(cfg, key)
    if override.is_delete():
        return found is None
    if override.is_sweep_override() or key.replace(".", "/") in group_names(config_dir()):
        return True
    return _holds(
        OmegaConf.to_container(found) if OmegaConf.is_config(found) else found, override.value()
    )


def _holds(found: Any, given: Any) -> bool:
    """Return whether a value is the given one; a mapping may have more keys."""
    if isinstance(given, Mapping):
        names = {str(name): value for name, value in given.items()}
        return isinstance(found, Mapping) and all(
            _holds(found.get(name), names[name]) for name in names
        )
    if isinstance(given, list):
        return (
            isinstance(found, list) and len(found) == len(given) and all(map(_holds, found, given))
        )
    if isinstance(found, Mapping) and "share" in found:
        # an environment of a mixture is given by its share, or by settings
        return _holds(found["share"], given)
    # strings that the parser keeps quoted have a text of their own
    return bool(found == given) or str(found) == str(getattr(given, "text", given))
