"""Keys of a composed configuration with their meanings, and the page that lists them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ragen_pl.config.check import Settings, fields_of_node
from ragen_pl.constraints import expectation, options, shown

# keys of Hydra itself
_OF_HYDRA = ("_partial_", "_recursive_", "_convert_")
_HEAD = """# Keys

The keys of `{command}`, with the values that each accepts and the one that it has there. Other options of a group have
keys of their own: `python -m ragen_pl.keys env=bandit algorithm=grpo` writes the page of another configuration.
`python -m ragen_pl.keys > docs/keys.md` writes this one; edit the docstrings of the classes instead.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """A setting of a configuration.

    Attributes:
        name: its full name.
        meaning: its description.
        accepted: the values that it accepts, in words.
        value: its value, or the key that it refers to.
    """

    name: str
    meaning: str
    accepted: str
    value: str


def keys_of(cfg: DictConfig) -> Iterator[Key]:
    """Yield the keys of a composed configuration in its order."""
    return _keys(cfg, Settings, prefix="", root=cfg)


def _keys(node: DictConfig, annotation: Any, *, prefix: str, root: DictConfig) -> Iterator[Key]:
    fields = fields_of_node(node, annotation, root=root)
    raw: Any = OmegaConf.to_container(node, resolve=False)
    for name in map(str, node):
        if name in _OF_HYDRA:
            continue
        key, value = f"{prefix}{name}", node[name]
        if name == "_target_":
            yield Key(key, fields.summary or "class to build", "a class path", str(value))
            continue
        child = fields.parameters.get(name, Any)
        if isinstance(value, DictConfig) and len(value):
            yield from _keys(value, child, prefix=f"{key}.", root=root)
        else:
            # a component that is off has no description of its own
            meaning = fields.descriptions.get(name, "none" if value is None else "")
            yield Key(key, meaning, _accepted(child), shown(raw[name]))


def _accepted(annotation: Any) -> str:
    is_any = any(option is Any for option in options(annotation))
    return "any value" if is_any else expectation(annotation)


def page_of(cfg: DictConfig, *, command: str) -> str:
    """Return the keys of a configuration as a Markdown page.

    Args:
        cfg: the configuration.
        command: the command that has it.
    """
    parts = [_HEAD.format(command=command)]
    single = [key for key in keys_of(cfg) if "." not in key.name]
    others = [key for key in keys_of(cfg) if "." in key.name]
    parts.append(_table("General", single))
    for group, keys in groupby(others, key=lambda key: key.name.partition(".")[0]):
        parts.append(_table(f"`{group}`", list(keys)))
    return "\n".join(parts)


def _table(title: str, keys: list[Key]) -> str:
    rows = [
        f"| `{key.name}` | {_cell(key.meaning)} | {_cell(key.accepted)} | `{_cell(key.value)}` |"
        for key in keys
    ]
    head = [f"## {title}", "", "| key | meaning | accepts | value |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
