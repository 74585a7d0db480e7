"""Parsing of responses such as `<think>…</think><answer>Up || Right</answer>` into reasoning, statements and actions.

A response is untrusted text: `parse_response` returns for any input and never raises. Only `label_tokens`
deals with tokens: it carries character spans over to them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ragen_pl.base.prompt_formats import ANSWER, BLOCKS, REASONING, THINK, PromptFormat
from ragen_pl.trajectory import Span


@dataclass(kw_only=True, slots=True)
class ParsedResponse:
    """Contents of a response. One that is not valid has no actions, except well-formed calls beside a malformed one.

    Attributes:
        think: The reasoning: the text of the reasoning block, or of a free think block.
        statements: Texts of the blocks that describe the environment, by block.
        actions: Indices of named actions, or one free text.
        spans: Blocks with the character ranges of their texts.
        calls: Tool calls, those that are not carried out included; in the native format.
        problem: Reason why a response in the native format is not valid, where it has one.
        refused: Whether this is no response but the reason why a program's request has none.
    """

    think: str | None = None
    statements: dict[str, str] = field(default_factory=dict)
    actions: list[int | str] = field(default_factory=list)
    spans: list[tuple[Span, int, int]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None
    refused: bool = False

    @property
    def valid(self) -> bool:
        """Whether the response has the required form and names known actions only."""
        return bool(self.actions) and self.problem is None


def parse_response(
    text: str,
    action_names: Sequence[str] | None,
    *,
    max_actions: int = 1,
    prompt_format: PromptFormat = PromptFormat.FREE_THINK,
    separator: str = "||",
    start: int = 0,
) -> ParsedResponse:
    """Parse a response strictly: the blocks of its format in order, whitespace between them, nothing else.

    Action names are compared without regard to case and outer whitespace. Of more actions than
    `max_actions` the first ones count, as in RAGEN. An unknown name makes the whole response invalid,
    as does a tag of the format inside a block.

    Where `action_names` is None, actions are free text: the whole answer is one action and is never split. An empty
    answer is invalid; the environment judges any other.

    What stands before the character `start` is left out, such as what a model writes in a channel for its thoughts.

    Examples:
        >>> parse_response("<think>ice</think><answer>Up || Left</answer>", ["Up", "Left"], max_actions=2).actions
        [0, 1]
        >>> parse_response("<think>or</think><answer>a || b</answer>", None).actions
        ['a || b']
        >>> parse_response("Up", ["Up", "Left"]).valid
        False
    """
    match = _pattern(prompt_format).fullmatch(text, start)
    if match is None:
        return ParsedResponse()
    blocks = {name: content.strip() for name, content in match.groupdict().items()}
    parsed = ParsedResponse(
        think=blocks.get(REASONING, blocks.get(THINK)),
        statements={name: blocks[name] for name in prompt_format.statements},
        spans=[(BLOCKS[name].span, *match.span(name)) for name in blocks],
    )
    parsed.actions = named_actions(
        blocks[ANSWER], action_names, max_actions=max_actions, separator=separator
    )
    return parsed


def named_actions(
    answer: str,
    action_names: Sequence[str] | None,
    *,
    max_actions: int = 1,
    separator: str = "||",
) -> list[int | str]:
    """Return the actions that an answer names, empty for an answer that is not valid; see `parse_response`."""
    answer = answer.strip()
    if action_names is None:
        return [answer] if answer else []
    indices = action_indices(tuple(action_names))
    names = [name.strip().casefold() for name in answer.split(separator)]
    known = all(name in indices for name in names)
    return [indices[name] for name in names[:max_actions]] if known else []


def label_tokens(parsed: ParsedResponse, ends: Sequence[int], *, end_sampled: bool) -> np.ndarray:
    """Label the tokens of a response by the span that their last character lies in.

    Args:
        parsed: The parsed response.
        ends: Number of characters up to and including each token.
        end_sampled: Whether the last token is the end-of-turn token.

    Returns:
        `Span` values, int8 `[response]`; all `OTHER` for a response without the required form.
    """
    ends_array = np.asarray(ends, dtype=np.int64)
    labels = np.full(len(ends_array), int(Span.OTHER), dtype=np.int8)
    if parsed.spans:
        labels[:] = Span.TAG
        for label, start, end in parsed.spans:
            labels[(ends_array > start) & (ends_array <= end)] = label
    if end_sampled and len(labels):
        labels[-1] = Span.END
    return labels


@lru_cache
def action_indices(action_names: tuple[str, ...]) -> dict[str, int]:
    """Return the index of each action by its name without regard to case and outer whitespace."""
    return {name.strip().casefold(): index for index, name in enumerate(action_names)}


@cache
def _pattern(prompt_format: PromptFormat) -> re.Pattern[str]:
    """Return the regular expression of a format.

    A block's text holds none of the format's tags. Any text then has one reading, and the time taken
    grows linearly with its length.
    """
    content = rf"(?:(?!</?(?:{'|'.join(prompt_format.tags)})>).)*"

    def block(name: str) -> str:
        return rf"<{name}>(?P<{name}>{content})</{name}>"

    blank = r"\s*"
    sections = blank.join(block(name) for name in prompt_format.sections)
    think = f"<{THINK}>{blank}{sections}{blank}</{THINK}>" if sections else block(THINK)
    blocks = [think, block(ANSWER)] if prompt_format.thinks else [block(ANSWER)]
    return re.compile(blank + blank.join(blocks) + blank, re.DOTALL)
