"""Compaction of a history that fills the context: the policy writes a summary, and the conversation starts anew.

A conversation goes GROWING → FULL → GROWING. It is FULL when the next turn may not fit beside a summary. Its latest
observation then asks for the summary, and a new conversation begins with the task, the summary and that observation.

Example:
    `context.max_tokens=200`, responses of 40 and summaries of 30 tokens, turns of at most 60::

        turn  prompt  state
        1     50      GROWING
        2     105     FULL: 105 + 40 + 60 + 30 + the request > 200; the response is a summary
        2     90      GROWING: task, summary and the observation of turn 2
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from string import Formatter

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count
from ragen_pl.prompts.conversation import Conversation, Exchange

_FIELDS = {"task", "summary", "observation"}


@checked
@dataclass(frozen=True, kw_only=True, slots=True)
class Compaction:
    """Settings of a compaction, with `context.window=all`.

    Attributes:
        max_summary_tokens: Longest summary.
        request: Text that asks for the summary, after the latest observation.
        template: Text of the new conversation's first message, with the fields {task}, {summary} and {observation}.

    Raises:
        ValueError: The template has other fields, or lacks one.
    """

    max_summary_tokens: Count = 128
    request: str = "The conversation is too long. Write down what you need to know to go on."
    template: str = "{task}\nYour notes: {summary}\n{observation}"

    def __post_init__(self) -> None:
        found = {name for _, name, _, _ in Formatter().parse(self.template) if name is not None}
        if found != _FIELDS:
            raise ValueError(
                f"context.compaction.template has the fields {sorted(found)}, expected {sorted(_FIELDS)}"
            )


def is_full(
    conversation: Conversation, *, prompt_tokens: int, reserved_tokens: int, max_tokens: int
) -> bool:
    """Return whether a turn after the present one, as long as the longest so far, may not fit beside a summary.

    Args:
        conversation: The conversation, which keeps the lengths of its prompts.
        prompt_tokens: Length of the present prompt.
        reserved_tokens: Tokens of a response, of the request for a summary and of the summary.
        max_tokens: Longest prompt plus response.
    """
    conversation.prompt_lengths.append(prompt_tokens)
    if len(conversation.exchanges) < 2:
        return False
    longest = max(after - before for before, after in pairwise(conversation.prompt_lengths))
    return prompt_tokens + longest + reserved_tokens > max_tokens


def ask_for_summary(
    conversation: Conversation, settings: Compaction, *, show_latest: bool = True
) -> None:
    """Let the latest observation of a conversation ask for a summary.

    Args:
        conversation: A conversation of at least two turns, whose latest one has no response.
        settings: Has the text of the request.
        show_latest: Whether the latest observation is shown before it.
    """
    *before, latest = conversation.exchanges
    conversation.pending = latest
    shown = [latest.text] if show_latest else []
    request = Exchange(
        text="\n".join([*shown, settings.request]), images=latest.images if show_latest else []
    )
    # results of tool calls are words here: a template has no place for a request beside them
    conversation.answered_calls, before[-1].calls = before[-1].calls, ()
    conversation.exchanges = [*before, request]


def begin_anew(conversation: Conversation, settings: Compaction, summary: str) -> None:
    """Replace a history by its summary.

    Args:
        conversation: A conversation that asked for a summary.
        settings: Has the template of the first message.
        summary: The summary.
    """
    latest = conversation.pending
    assert latest is not None
    if conversation.task is None:
        conversation.task = conversation.exchanges[0]
    task = conversation.task
    text = settings.template.format(task=task.text, summary=summary, observation=latest.text)
    conversation.replaced += len(conversation.exchanges) - 1
    conversation.exchanges = [Exchange(text=text, images=[*task.images, *latest.images])]
    conversation.pending = None
    conversation.summaries += 1


def withdraw(conversation: Conversation) -> None:
    """Show the latest observation again in place of the request for a summary."""
    latest = conversation.pending
    assert latest is not None
    conversation.exchanges[-1] = latest
    conversation.exchanges[-2].calls = conversation.answered_calls
    conversation.pending = None
