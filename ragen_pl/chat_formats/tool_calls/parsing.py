"""Parsing of a response in the model's own chat format into reasoning, content and tool calls.

A response is untrusted text: `parse_message` returns for any text and never raises, in time linear in its length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ragen_pl.chat_formats.tool_calls.gemma import GEMMA
from ragen_pl.chat_formats.tool_calls.hermes import HERMES
from ragen_pl.chat_formats.tool_calls.lfm import LFM
from ragen_pl.chat_formats.tool_calls.llama_json import LLAMA_JSON
from ragen_pl.chat_formats.tool_calls.message import (
    AssistantMessage,
    CallFormat,
    ReasoningTags,
    ToolCall,
)
from ragen_pl.chat_formats.tool_calls.qwen_xml import QWEN_XML
from ragen_pl.chat_formats.tool_calls.scanned import ScannedText
from ragen_pl.chat_formats.tool_calls.syntax import CallBlock, CallSyntax, Tools
from ragen_pl.chat_formats.tool_calls.values import Malformed
from ragen_pl.trajectory import Span

_SYNTAXES: dict[CallFormat, CallSyntax] = {
    CallFormat.HERMES: HERMES,
    CallFormat.QWEN_XML: QWEN_XML,
    CallFormat.LLAMA_JSON: LLAMA_JSON,
    CallFormat.GEMMA: GEMMA,
    CallFormat.LFM: LFM,
}


def parse_message(
    text: str,
    *,
    call_format: CallFormat | None,
    thinks: ReasoningTags | None,
    opened: bool,
    tools: Mapping[str, Mapping[str, Any]],
    names: Collection[str] | None = None,
) -> AssistantMessage:
    """Parse a response without its end-of-turn token.

    Reasoning stands between the tags, anywhere outside of calls; a block without closing tag goes to the end. What
    looks like a call inside of it is reasoning. A call that is not well formed is content; it ends at its closing
    marker or before the next marker. The calls after it count.

    Args:
        text: The response.
        call_format: How calls are written; None where there are no tools, and all but reasoning is content.
        thinks: The tags around reasoning; None if the template writes none.
        opened: Whether the prompt ended with the opening tag.
        tools: JSON schema of the parameters by name of the tool. Formats without types of their own read values by
            it. Calls of other tools count too.
        names: Tools that may be called. A call of another one is not well formed, and its spans are those of a call.
            None for any.

    Examples:
        >>> from ragen_pl.chat_formats.tool_calls.message import THINK_TAGS
        >>> parsed = parse_message(
        ...     'See.</think>On it.<tool_call>{"name": "go", "arguments": {"to": 3}}</tool_call>',
        ...     call_format=CallFormat.HERMES, thinks=THINK_TAGS, opened=True, tools={},
        ... )
        >>> parsed.reasoning, parsed.content, [(call.name, call.arguments) for call in parsed.calls]
        ('See.', 'On it.', [('go', {'to': 3})])
    """
    syntax = None if call_format is None else _SYNTAXES[call_format]
    return _Parser(text, syntax, thinks, tools, names).parse(opened=opened)


class _Parser:
    """Goes through a text once; `_piece` is the start of the text that follows the last marker."""

    def __init__(
        self,
        text: str,
        syntax: CallSyntax | None,
        thinks: ReasoningTags | None,
        tools: Tools,
        names: Collection[str] | None,
    ) -> None:
        self._scanned = ScannedText(text)
        self._text = text
        self._syntax = syntax
        self._thinks = thinks
        self._tools = tools
        self._names = names
        self._piece = 0
        self._contents: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._spans: list[tuple[Span, int, int]] = []
        self._problem: str | None = None

    def parse(self, *, opened: bool) -> AssistantMessage:
        """Return the whole text's message."""
        position = 0
        if self._thinks is not None and opened:
            position = self._reason(0, self._thinks)
        while position < len(self._text):
            position = self._step(position)
        self._end_piece(len(self._text))
        return AssistantMessage(
            reasoning="\n".join(filter(None, self._reasoning)) if self._reasoning else None,
            content="\n".join(self._contents),
            calls=self._calls,
            spans=self._spans,
            problem=self._problem,
        )

    def _step(self, position: int) -> int:
        """Read up to the end of the next call or reasoning block."""
        syntax, length = self._syntax, len(self._text)
        start = length if syntax is None else syntax.find(self._scanned, position)
        thought = self._next_thought(position)
        if thought <= start:
            self._label_text(position, thought)
            if self._thinks is None or thought == length:
                return thought
            self._end_piece(thought)
            inside = thought + len(self._thinks.opening)
            self._label(Span.TAG, thought, inside)
            return self._reason(inside, self._thinks)
        self._label_text(position, start)
        if syntax is None or start == length:
            return length
        try:
            block = syntax.read(self._scanned, start, self._tools)
        except Malformed as fault:
            self._add_problem(fault.reason, fault.position)
            reached = max(fault.reached, start + 1)
            end = syntax.end_of_malformed(self._scanned, reached)
            end = min(end, self._next_thought(reached))
            self._label(Span.OTHER, start, end)
            return end
        if not block.calls:
            self._label_text(start, block.end)
            return block.end
        # labelled as a call whichever tool it names: a policy that invents tools acts
        self._label(Span.TAG, start, block.inside[0])
        self._label(Span.ACTION, *block.inside)
        self._label(Span.TAG, block.inside[1], block.end)
        if (name := self._not_offered(block)) is not None:
            self._add_problem(f"no tool {name[:40]!r} is offered", start)
            return block.end
        self._end_piece(start)
        self._calls += [
            ToolCall(name=name, arguments=arguments, span=(start, block.end))
            for name, arguments in block.calls
        ]
        self._piece = block.end
        return block.end

    def _not_offered(self, block: CallBlock) -> str | None:
        """Return the first tool of a block that may not be called, None without any."""
        if self._names is None:
            return None
        return next((name for name, _ in block.calls if name not in self._names), None)

    def _add_problem(self, reason: str, position: int) -> None:
        """Keep the reason why a call is not well formed, unless an earlier one has its own."""
        if self._problem is None:
            excerpt = self._text[position : position + 40]
            self._problem = f"{reason} at character {position}: {excerpt!r}"

    def _next_thought(self, position: int) -> int:
        if self._thinks is None:
            return len(self._text)
        return self._scanned.find(self._thinks.opening, position)

    def _reason(self, start: int, tags: ReasoningTags) -> int:
        """Read a reasoning block whose text begins at `start`; return the position after it."""
        end = self._scanned.find(tags.closing, start)
        self._reasoning.append(self._text[start:end].strip())
        self._label(Span.THINK, start, end)
        self._piece = min(end + len(tags.closing), len(self._text))
        self._label(Span.TAG, end, self._piece)
        return self._piece

    def _end_piece(self, end: int) -> None:
        """Add the text since the last marker to the content."""
        whole = self._piece == 0 and end == len(self._text)
        piece = self._text[self._piece : end]
        if not whole:
            piece = piece.strip("\r\n")
        if whole or piece.strip():
            self._contents.append(piece)

    def _label_text(self, start: int, end: int) -> None:
        piece = self._text[start:end]
        text = start + len(piece) - len(piece.lstrip())
        blank = max(start + len(piece.rstrip()), text)
        self._label(Span.OTHER, start, text)
        self._label(Span.ACTION, text, blank)
        self._label(Span.OTHER, blank, end)

    def _label(self, label: Span, start: int, end: int) -> None:
        if start == end:
            return
        if self._spans and self._spans[-1][0] == label:
            start = self._spans.pop()[1]
        self._spans.append((label, start, end))
