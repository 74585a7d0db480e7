"""Keys of a composed configuration with their meanings, and the page that lists them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ragen_pl.base.constraints import expectation, options, shown
from ragen_pl.config.check import HYDRA, Settings, fields_of_node
from ragen_pl.config.docstrings import description_of, summary_of
from ragen_pl.config.signatures import Parameter

_HEAD = """# Keys

The keys of `{command}`, with the values that each accepts and the one that it has there. Other options of a group have
keys of their own: `python -m ragen_pl.keys env=bandit algorithm=grpo` writes the page of another configuration.
`python -m ragen_pl.keys > docs/keys.md` writes this one; edit the docstrings of the classes instead.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """A setting of a configuration.

    Attributes:
        name: Its full name.
        meaning: Its description.
        accepted: The values that it accepts, in words.
        value: Its value, or the key that it refers to.
    """

    name: str
    meaning: str
    accepted: str
    value: str


def keys_of(cfg: DictConfig) -> Iterator[Key]:
    """Yield the keys of a composed configuration in its order."""
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    return _keys(values, raw, Settings, prefix="", parent={}, root=values)


def _keys(
    node: Mapping[str, Any], raw: Any, annotation: Any, *, prefix: str, parent: Any, root: Any
) -> Iterator[Key]:
    fields = fields_of_node(node, annotation, parent=parent, root=root)
    for name, value in node.items():
        key, child = f"{prefix}{name}", fields.parameters.get(name, Parameter())
        if name == "_target_":
            yield Key(key, summary_of(str(value)) or "class to build", "a class path", str(value))
        elif isinstance(value, dict) and value:
            # a node that refers to another one has its values
            inner = raw[name] if isinstance(raw[name], dict) else value
            yield from _keys(
                value, inner, child.annotation, prefix=f"{key}.", parent=node, root=root
            )
        elif name not in HYDRA:
            # a component that is off has no description of its own
            meaning = description_of(str(name), child.documented_in) or (
                "none" if value is None else ""
            )
            yield Key(key, meaning, _accepted(child.annotation), shown(raw[name]))


def _accepted(annotation: Any) -> str:
    is_any = any(option is Any for option in options(annotation))
    return "any value" if is_any else expectation(annotation)


def page_of(cfg: DictConfig, *, command: str) -> str:
    """Return the keys of a configuration as a Markdown page.

    Args:
        cfg: The configuration.
        command: The command that has it.
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
