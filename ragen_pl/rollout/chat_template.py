"""The fixed text of a chat template around the messages of the user and the policy.

It is found by rendering conversations of marker words, which works with any template. A template that
rewrites or strips earlier responses does not keep its prefix; it is recognized when the template is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SYSTEM, _USER = "@SYSTEM@", "@USER@"
# with whitespace that a template might rewrite
_RESPONSE = " <think>@REASON@\n\n  @MORE@</think>\n<answer>@ANSWER@</answer>\n"

Message = dict[str, Any]


def user_message(text: str, *, images: int) -> Message:
    """Return a user message with its images before its text, as vision-language templates expect."""
    if not images:
        return {"role": "user", "content": text}
    content: list[dict[str, str]] = [{"type": "image"} for _ in range(images)]
    return {"role": "user", "content": [*content, {"type": "text", "text": text}]}


def _with_content_parts(message: Message) -> Message:
    """Return a message whose content is a list of parts, as some templates expect."""
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, str)
        else message
    )


@dataclass(slots=True)
class ChatTemplate:
    """Chat template of a tokenizer or processor.

    Attributes:
        renderer: tokenizer or processor.
        keeps_prefix: whether a conversation's rendering starts with that of its earlier turns, responses
            verbatim. Otherwise each turn is rendered and trained as a separate sample.
    """

    renderer: PreTrainedTokenizerBase
    keeps_prefix: bool = field(init=False)
    _user_text: dict[int, tuple[str, str]] = field(init=False, default_factory=dict)
    _close: str = field(init=False, default="")
    _content_parts: bool = field(init=False, default=False)
    _has_system: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        if not getattr(self.renderer, "chat_template", None):
            raise ValueError(
                "the model's tokenizer has no chat template; set tokenizer.chat_template to a Jinja "
                "template and save the tokenizer again"
            )
        self._content_parts = not self._shows(_USER)
        if self._content_parts and not self._shows(_USER):
            raise ValueError(
                "the model's chat template leaves out the user's text; set tokenizer.chat_template to another one"
            )
        self._has_system = self._shows(_USER, system=_SYSTEM)
        self.keeps_prefix = self._find_fixed_text(0)

    def render(self, messages: list[Message], *, prompt: bool = True) -> str:
        """Return the text of messages; with `prompt`, the header of the next response follows."""
        if self._content_parts:
            messages = [_with_content_parts(message) for message in messages]
        text = self.renderer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        assert isinstance(text, str)
        return text

    def head(self, system: str | None) -> str:
        """Return the text before the first user message."""
        before, after = self.around_user(0)
        text = self.render([*self.system_messages(system), user_message(_USER, images=0)])
        return text.removesuffix(before + _USER + after)

    def around_user(self, images: int) -> tuple[str, str]:
        """Return the text before (with image slots) and after (with the response's header) the user's text."""
        if images not in self._user_text and not self._find_fixed_text(images):
            raise ValueError(
                f"the chat template has no place for a message with {images} images before its text"
            )
        return self._user_text[images]

    @property
    def close(self) -> str:
        """Text between a response and the next turn, starting with the end-of-turn token where there is one."""
        return self._close

    def system_messages(self, system: str | None) -> list[Message]:
        """Return the messages of a system prompt.

        Raises:
            ValueError: the template has no place for a system message.
        """
        if system and not self._has_system:
            raise ValueError(
                "context.system_prompt: the model's chat template has no place for a system message; set null"
            )
        return [{"role": "system", "content": system}] if system else []

    def _shows(self, text: str, *, system: str | None = None) -> bool:
        """Return whether the rendering holds the user's text and, where given, the system's."""
        messages: list[Message] = [{"role": "user", "content": text}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        try:
            rendering = self.render(messages)
        # a template may raise any exception
        except Exception:
            if system:
                return False
            raise
        return text in rendering and (system or "") in rendering

    def _find_fixed_text(self, images: int) -> bool:
        """Find the text around user messages with this many images; return whether the prefix is kept."""
        response: Message = {"role": "assistant", "content": _RESPONSE}
        system = _SYSTEM if self._has_system else None
        first = [*self.system_messages(system), user_message(_USER + "0", images=images)]
        opened = self.render(first)
        closed = self.render([*first, response], prompt=False)
        second = self.render([*first, response, user_message(_USER, images=images)])
        if not (closed.startswith(opened + _RESPONSE) and second.startswith(closed)):
            return False
        block = second[len(closed) :]
        before, _, after = block.partition(_USER)
        if not opened.endswith(before + _USER + "0" + after):
            return False
        self._close = closed[len(opened + _RESPONSE) :]
        self._user_text[images] = (before, after)
        return True
