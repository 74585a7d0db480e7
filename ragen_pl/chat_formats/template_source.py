"""The Jinja source of a chat template: its variables, and a clock that stands still."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser

# arguments that transformers gives to every template
_OWN_ARGUMENTS = {
    "messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now",
}  # fmt: skip


def template_source(renderer: Any) -> str | None:
    """Return the text of a tokenizer's or processor's chat template; of several the default one."""
    template: str | dict[str, str] | None = renderer.chat_template
    return template.get("default") if isinstance(template, dict) else template


class _Generation(jinja2.ext.Extension):
    """Extension with which templates mark the policy's text, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def parsed(source: str) -> nodes.Template:
    """Return the syntax tree of a template.

    Raises:
        ValueError: It is no template.
    """
    environment = jinja2.Environment(extensions=[_Generation, jinja2.ext.loopcontrols])
    try:
        return environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the model's chat template is no Jinja template (line {error.lineno}: {error.message}); "
            "set tokenizer.chat_template to another one"
        ) from error


def variables(tree: nodes.Template) -> set[str]:
    """Return the arguments that a template reads, but for those of `apply_chat_template`.

    A variable that the template assigns before it is read is not one of them.
    """
    read_first: dict[str, bool] = {}
    for name in _names(tree):
        read_first.setdefault(name.name, name.ctx == "load")
    undeclared = jinja2.meta.find_undeclared_variables(tree) - _OWN_ARGUMENTS
    return {name for name in undeclared if read_first[name]}


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    """Yield the names below a node in the order of their evaluation: a value before what it is assigned to."""
    if isinstance(node, nodes.Name):
        yield node
    children = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign | nodes.For):
        target = node.target
        children = [child for child in children if child is not target]
        children.insert(1, target)
    for child in children:
        yield from _names(child)


def with_clock(source: str, tree: nodes.Template, now: datetime) -> str:
    """Return a template for which the time is always `now`.

    Raises:
        ValueError: The template computes the format of the time.
    """
    formats: list[str] = []
    for call in tree.find_all(nodes.Call):
        match call:
            case nodes.Call(
                node=nodes.Name(name="strftime_now"), args=[nodes.Const(value=form), *_]
            ):
                formats.append(form)
            case nodes.Call(node=nodes.Name(name="strftime_now")):
                raise ValueError(
                    "the model's chat template computes the format of the date that it shows; prompts would change "
                    "overnight; set tokenizer.chat_template to another one"
                )
    if not formats:
        return source
    times = {form: now.strftime(form) for form in formats}
    # a newline after a tag is no part of the template
    return (
        f"{{% macro strftime_now(format) %}}{{{{ {times!r}[format] }}}}{{% endmacro %}}\n{source}"
    )
