"""Messages of conversations as chat templates take them, and the text that a template writes around one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
THINK, END_OF_THOUGHT = "<think>", "</think>"


class History(StrEnum):
    """Treatment of the responses of earlier turns by a chat template."""

    KEPT = "kept"
    TRIMMED = "trimmed"
    """Blanks at the edges of a response or of its think block are removed or added."""
    WITHOUT_THOUGHTS = "without_thoughts"
    """Think blocks are removed."""
    REWRITTEN = "rewritten"
    """Other text changes."""


def user_message(text: str, *, images: int) -> Message:
    """Return a user message with its images before its text, as vision-language templates expect."""
    if not images:
        return {"role": "user", "content": text}
    content: list[dict[str, str]] = [{"type": "image"} for _ in range(images)]
    return {"role": "user", "content": [*content, {"type": "text", "text": text}]}


@dataclass(frozen=True, kw_only=True, slots=True)
class UserText:
    """Text that a template writes around that of a user message.

    Attributes:
        before: Text before it in a later turn, image slots included.
        after: Text after it, the header of the response included.
        kept: The part of `after` that stays when the response is old: all but an empty think block.
        response_prefix: Blanks between the header and an old response.
        trims: Whether blanks at the left and at the right edge of the text are removed.
    """

    before: str
    after: str
    kept: str
    response_prefix: str
    trims: tuple[bool, bool]

    def shown(self, text: str) -> str:
        """Return a text as the template writes it."""
        left, right = self.trims
        text = text.lstrip() if left else text
        return text.rstrip() if right else text


def kept_header(header: str, after: str) -> tuple[str | None, str]:
    """Return the part of the text between a user's text and an old response that stays, and the blanks that follow.

    Args:
        header: That text when the response is old.
        after: That text in the prompt of the response.
    """
    if header.startswith(after) and not header[len(after) :].strip():
        return after, header[len(after) :]
    think_block = rf"{THINK}\s*(?:{END_OF_THOUGHT}\s*)?"
    if after.startswith(header) and re.fullmatch(think_block, after[len(header) :]):
        return header, ""
    return None, ""


def content_parts(content: str | Sequence[Message]) -> Sequence[Message]:
    """Return the parts of a content, of a text one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def tool_message(call: Message, text: str, *, images: int) -> Message:
    """Return the message of a call's result."""
    content: Any = text
    if images:
        content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
    name = call["function"]["name"]
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def owners_of_images(counts: Sequence[int]) -> str:
    """Return words that say which tool result each image of a later message belongs to, none for a single result.

    Args:
        counts: Number of images of each result.

    >>> owners_of_images([1, 0, 2])
    'Image 1 belongs to result 1 of 3. Image 2 belongs to result 3 of 3. Image 3 belongs to result 3 of 3.'
    """
    if len(counts) < 2:
        return ""
    owners = [number for number, count in enumerate(counts, start=1) for _ in range(count)]
    return " ".join(
        f"Image {image} belongs to result {owner} of {len(counts)}."
        for image, owner in enumerate(owners, start=1)
    )


def call_message(number: int, name: str, arguments: Mapping[str, Any]) -> Message:
    """Return a call as the messages of OpenAI's API have it, with its arguments as a dict.

    Args:
        number: Number of the call in its conversation, for its id.
        name: Name of the tool.
        arguments: Its arguments.
    """
    function = {"name": name, "arguments": dict(arguments)}
    # Mistral's templates take ids of nine letters and digits
    return {"id": f"call{number:05d}", "type": "function", "function": function}
