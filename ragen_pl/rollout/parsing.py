"""Reading a reply: `<think>…</think><answer>Up || Right</answer>` into reasoning and actions.

A reply is untrusted text: whatever it holds, `parse_reply` returns and never raises. Nothing here
knows about tokens but `label_tokens`, which carries the character spans over to them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ragen_pl.trajectory import Span

_TAG = re.compile(r"</?(?:think|answer)>")
_WITH_THINK = re.compile(
    r"\s*<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL
)
_ANSWER_ONLY = re.compile(r"\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)


@dataclass(kw_only=True, slots=True)
class ParsedReply:
    """What a reply says. `actions` is empty exactly where the reply is not valid."""

    think: str | None = None
    actions: list[int] = field(default_factory=list)
    think_span: tuple[int, int] | None = None  # characters of the think block's content
    answer_span: tuple[int, int] | None = None  # characters of the answer block's content

    @property
    def valid(self) -> bool:
        """Whether the reply has the required form and names known actions only."""
        return bool(self.actions)


def parse_reply(
    text: str,
    action_names: Sequence[str],
    *,
    max_actions: int = 1,
    require_think: bool = True,
    separator: str = "||",
) -> ParsedReply:
    """Parse a reply strictly: one think block (if required), one answer block, nothing else.

    Names are compared without regard to case and outer blanks. More actions than `max_actions`
    are cut to the first ones, as in RAGEN. An unknown name makes the whole reply invalid.

    Examples:
        >>> parse_reply("<think>ice</think><answer>Up || Left</answer>", ["Up", "Left"], max_actions=2).actions
        [0, 1]
        >>> parse_reply("Up", ["Up", "Left"]).valid
        False
    """
    match = _WITH_THINK.fullmatch(text)
    if match is None and not require_think:
        match = _ANSWER_ONLY.fullmatch(text)
    if match is None or any(_TAG.search(part) for part in match.groupdict().values()):
        return ParsedReply()
    has_think = "think" in match.groupdict()
    parsed = ParsedReply(
        think=match["think"].strip() if has_think else None,
        think_span=match.span("think") if has_think else None,
        answer_span=match.span("answer"),
    )
    index = {name.casefold(): number for number, name in enumerate(action_names)}
    names = [part.strip().casefold() for part in match["answer"].split(separator)]
    if all(name in index for name in names):
        parsed.actions = [index[name] for name in names[:max_actions]]
    return parsed


def label_tokens(parsed: ParsedReply, ends: Sequence[int], *, end_sampled: bool) -> np.ndarray:
    """Label the tokens of a reply by the span that their last character lies in.

    Args:
        parsed: the reply's parse.
        ends: for each token, the number of characters of the reply up to and including it.
        end_sampled: whether the last token is the end-of-turn token.

    Returns:
        int8 `[reply]` of `Span` values. A reply without the required form is `OTHER` throughout.
    """
    ends_array = np.asarray(ends, dtype=np.int64)
    labels = np.full(len(ends_array), Span.OTHER, dtype=np.int8)
    if parsed.answer_span is not None:
        labels[:] = Span.TAG
        for span, label in ((parsed.think_span, Span.THINK), (parsed.answer_span, Span.ACTION)):
            if span is not None:
                labels[(ends_array > span[0]) & (ends_array <= span[1])] = label
    if end_sampled and len(labels):
        labels[-1] = Span.END
    return labels
