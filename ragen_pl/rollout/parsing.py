"""Reading a response: `<think>…</think><answer>Up || Right</answer>` into reasoning, statements and actions.

A response is untrusted text: whatever it holds, `parse_response` returns and never raises. Nothing here
knows about tokens but `label_tokens`, which carries the character spans over to them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from ragen_pl.rollout.formats import REASONING, PromptFormat
from ragen_pl.trajectory import Span

_LABELS = {
    "observation": Span.OBSERVATION,
    REASONING: Span.THINK,
    "think": Span.THINK,
    "prediction": Span.PREDICTION,
    "answer": Span.ACTION,
}


@dataclass(kw_only=True, slots=True)
class ParsedResponse:
    """What a response says. `actions` is empty exactly where the response is not valid."""

    think: str | None = None  # the reasoning: the think block's text, or its reasoning block's
    statements: dict[str, str] = field(default_factory=dict)  # observation and prediction
    actions: list[int] = field(default_factory=list)
    spans: dict[Span, tuple[int, int]] = field(
        default_factory=dict
    )  # characters of each block's text

    @property
    def valid(self) -> bool:
        """Whether the response has the required form and names known actions only."""
        return bool(self.actions)

    @property
    def answer_span(self) -> tuple[int, int] | None:
        """The characters of the answer block's text."""
        return self.spans.get(Span.ACTION)


def parse_response(
    text: str,
    action_names: Sequence[str],
    *,
    max_actions: int = 1,
    prompt_format: PromptFormat = PromptFormat.FREE_THINK,
    separator: str = "||",
) -> ParsedResponse:
    """Parse a response strictly: the blocks of its format in their order, blanks between them, nothing else.

    Names are compared without regard to case and outer blanks. More actions than `max_actions`
    are cut to the first ones, as in RAGEN. An unknown name makes the whole response invalid, and so does
    one of the format's own tags inside a block.

    Examples:
        >>> parse_response("<think>ice</think><answer>Up || Left</answer>", ["Up", "Left"], max_actions=2).actions
        [0, 1]
        >>> parse_response("Up", ["Up", "Left"]).valid
        False
    """
    match = _form(prompt_format).fullmatch(text)
    if match is None:
        return ParsedResponse()
    blocks = {name: words.strip() for name, words in match.groupdict().items()}
    parsed = ParsedResponse(
        think=blocks.get(REASONING, blocks.get("think")),
        statements={name: blocks[name] for name in prompt_format.statements},
        spans={_LABELS[name]: match.span(name) for name in blocks},
    )
    index = {name.casefold(): number for number, name in enumerate(action_names)}
    names = [part.strip().casefold() for part in blocks["answer"].split(separator)]
    if all(name in index for name in names):
        parsed.actions = [index[name] for name in names[:max_actions]]
    return parsed


def label_tokens(parsed: ParsedResponse, ends: Sequence[int], *, end_sampled: bool) -> np.ndarray:
    """Label the tokens of a response by the span that their last character lies in.

    Args:
        parsed: the response's parse.
        ends: for each token, the number of characters of the response up to and including it.
        end_sampled: whether the last token is the end-of-turn token.

    Returns:
        int8 `[response]` of `Span` values. A response without the required form is `OTHER` throughout.
    """
    ends_array = np.asarray(ends, dtype=np.int64)
    labels = np.full(len(ends_array), Span.OTHER, dtype=np.int8)
    if parsed.answer_span is not None:
        labels[:] = Span.TAG
        for label, (start, end) in parsed.spans.items():
            labels[(ends_array > start) & (ends_array <= end)] = label
    if end_sampled and len(labels):
        labels[-1] = Span.END
    return labels


@cache
def _form(prompt_format: PromptFormat) -> re.Pattern[str]:
    """Return the expression of a format's responses.

    A block's text holds none of the format's tags, so that there is one way to read any text: the time
    taken grows with its length only, whatever a policy writes.
    """
    words = rf"(?:(?!</?(?:{'|'.join(prompt_format.tags)})>).)*"

    def block(name: str) -> str:
        return rf"<{name}>(?P<{name}>{words})</{name}>"

    blank = r"\s*"
    inside = blank.join(block(name) for name in prompt_format.sections)
    think = f"<think>{blank}{inside}{blank}</think>" if inside else block("think")
    parts = [think, block("answer")] if prompt_format.thinks else [block("answer")]
    return re.compile(blank + blank.join(parts) + blank, re.DOTALL)
