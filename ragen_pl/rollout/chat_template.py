"""A chat template taken apart: the fixed ids around what a user or the policy says.

The parts are found by rendering conversations of marker words, so that any chat template works,
and so that a template that does not keep its prefix (one that rewrites or strips earlier responses)
is recognised at start-up instead of corrupting samples later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SYSTEM, _USER = "@SYSTEM@", "@USER@"
# blanks inside and outside, so that a template that rewrites them is found out
_REPLY = " <think>@REASON@\n\n  @MORE@</think>\n<answer>@ANSWER@</answer>\n"

Message = dict[str, Any]


def user_message(text: str, *, images: int) -> Message:
    """Return a user's message with its images before its text, as vision-language templates expect."""
    if not images:
        return {"role": "user", "content": text}
    content: list[dict[str, str]] = [{"type": "image"} for _ in range(images)]
    return {"role": "user", "content": [*content, {"type": "text", "text": text}]}


def _in_parts(message: Message) -> Message:
    """Return a message whose content is a list of parts, as some templates expect it of all messages."""
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, str)
        else message
    )


@dataclass(slots=True)
class ChatTemplate:
    """Renders conversations and their parts with a tokenizer's (or processor's) chat template.

    Attributes:
        keeps_prefix: whether a conversation's rendering starts with that of its earlier turns, responses
            verbatim. Where it is False every turn must be rendered, and trained, as a sample of its own.
    """

    renderer: PreTrainedTokenizerBase
    keeps_prefix: bool = field(init=False)
    _parts: dict[int, tuple[str, str]] = field(init=False, default_factory=dict)
    _close: str = field(init=False, default="")
    _parted: bool = field(init=False, default=False)  # content is always a list of parts
    _has_system: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        if not getattr(self.renderer, "chat_template", None):
            raise ValueError(
                "the model's tokenizer has no chat template; set tokenizer.chat_template to a Jinja "
                "template and save the tokenizer again"
            )
        self._parted = not self._shows(_USER)
        if self._parted and not self._shows(_USER):
            raise ValueError(
                "the model's chat template leaves out what a user says; set tokenizer.chat_template to another one"
            )
        self._has_system = self._shows(_USER, system=_SYSTEM)
        self.keeps_prefix = self._take_apart(0)

    def render(self, messages: list[Message], *, prompt: bool = True) -> str:
        """Return the text of `messages`, with the header of the next response where `prompt` is set."""
        if self._parted:
            messages = [_in_parts(message) for message in messages]
        text = self.renderer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        assert isinstance(text, str)
        return text

    def head(self, system: str | None) -> str:
        """Return the text before the first user's turn."""
        before, after = self.around_user(0)
        text = self.render([*self.system_messages(system), user_message(_USER, images=0)])
        return text.removesuffix(before + _USER + after)

    def around_user(self, images: int) -> tuple[str, str]:
        """Return the texts before and after a user's words, its images' slots and the response's header included."""
        if images not in self._parts and not self._take_apart(images):
            raise ValueError(
                f"the chat template has no place for a message with {images} images before its text"
            )
        return self._parts[images]

    @property
    def close(self) -> str:
        """The text between a response and the next turn, an end-of-turn token at its start included."""
        return self._close

    def system_messages(self, system: str | None) -> list[Message]:
        """Return the conversation's first messages.

        Raises:
            ValueError: there is a system message, and the template has no place for one.
        """
        if system and not self._has_system:
            raise ValueError(
                "context.system_prompt: the model's chat template has no place for a system message; set null"
            )
        return [{"role": "system", "content": system}] if system else []

    def _shows(self, said: str, *, system: str | None = None) -> bool:
        """Return whether what is said is in the rendering, of the system too where one is given."""
        messages: list[Message] = [{"role": "user", "content": said}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        try:
            text = self.render(messages)
        except Exception:  # a template may raise what it likes
            if system:
                return False
            raise
        return said in text and (system or "") in text

    def _take_apart(self, images: int) -> bool:
        response: Message = {"role": "assistant", "content": _REPLY}
        system = _SYSTEM if self._has_system else None
        first = [*self.system_messages(system), user_message(_USER + "0", images=images)]
        opened = self.render(first)
        closed = self.render([*first, response], prompt=False)
        second = self.render([*first, response, user_message(_USER, images=images)])
        if not (closed.startswith(opened + _REPLY) and second.startswith(closed)):
            return False
        block = second[len(closed) :]
        before, _, after = block.partition(_USER)
        if not opened.endswith(before + _USER + "0" + after):
            return False
        self._close = closed[len(opened + _REPLY) :]
        self._parts[images] = (before, after)
        return True
