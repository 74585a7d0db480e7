"""Chat templates: the text around the messages of the user and the policy, and the treatment of old responses.

Both are found by rendering conversations of marker words, which works with any template. The fixed text lets a
prompt be the sampled ids with template text around them. A template may trim, strip or rewrite the responses of
earlier turns; `History` says which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from jinja2 import nodes

from ragen_pl.chat_formats.messages import (
    END_OF_THOUGHT,
    THINK,
    History,
    Message,
    UserText,
    content_parts,
    kept_header,
    user_message,
)
from ragen_pl.chat_formats.template_source import parsed, template_source, variables, with_clock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# what `strftime_now` of a template reads; Llama 3.2 falls back to this day
_CLOCK, _OTHER_CLOCK = datetime(2024, 7, 26), datetime(1999, 12, 31)

_SYSTEM = "@System@"
_USERS = ("@First User@", "@Second User@", "@Third User@")
_WORDS = "@Some Words@ and @Other Words@"
_THOUGHTS = f"{THINK}\n@Thought@\n{END_OF_THOUGHT}\n\n@Answer@"
# as the prompt formats write them, with blanks that a template might rewrite
_INNER = "@First@\n\n  @Second@ <answer>@Third@</answer>"
_THOUGHTFUL = f"{THINK}@Thought@\n\n  @More@{END_OF_THOUGHT}<answer>@Answer@</answer>"
# a response in words, and how templates take its thoughts
_MESSAGES_WITH_THOUGHTS: tuple[Message, ...] = (
    {},
    *({name: "@Thought@"} for name in ("thinking", "reasoning", "reasoning_content")),
    {
        "content": [
            {"type": "thinking", "thinking": "@Thought@"},
            {"type": "text", "text": _WORDS},
        ]
    },
)
# a template may trim newlines only
_BLANKS = ("\n ", " \n")


@dataclass(slots=True)
class ChatTemplate:
    """Chat template of a tokenizer or processor.

    Attributes:
        renderer: Tokenizer or processor.
        tokenizer: The tokenizer.
        arguments: Values of the template's own variables, such as `enable_thinking`.
        image_counts: Numbers of images in a message for which the fixed text is looked up at once.
        tools: Schemas of the tools that the template shows, in the format of OpenAI's API; empty for none.
        history: What the template does to old responses.
        is_static: Whether the text around messages is the same in every turn. Otherwise a conversation can only be
            rendered as a whole.
        response_suffix: Text after a response, with the end-of-turn token first in most templates.
        response_prefix: Blanks that the template writes before a response.
        opening: Think tag at the end of a prompt, with which a response therefore begins.
        header: Control tokens and words that the template writes between a prompt and the words of a response, such as
            the channel of gpt-oss; empty in most templates.
        inner: Control tokens that the template writes before the words of a response, with or without thoughts.
        pinned: Date that the template shows in place of today's; None if it shows none.
        bos_token_id: Id that precedes a rendering, as the processor adds it; None for none.

    Raises:
        ValueError: There is no template, it does not show the user's text, or it does not read an argument.
    """

    renderer: Any
    tokenizer: PreTrainedTokenizerBase
    arguments: Mapping[str, Any] = field(default_factory=dict)
    image_counts: tuple[int, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    history: History = field(init=False)
    is_static: bool = field(init=False)
    response_suffix: str = field(init=False)
    response_prefix: str = field(init=False)
    opening: str = field(init=False)
    header: str = field(init=False)
    inner: frozenset[str] = field(init=False)
    pinned: str | None = field(init=False)
    bos_token_id: int | None = field(init=False)
    _source: str = field(init=False)
    _user_texts: dict[int, UserText | None] = field(init=False, default_factory=dict)
    # text before the first user's text by system prompt and number of images
    _firsts: dict[tuple[str | None, int], str] = field(init=False, default_factory=dict)
    # the response in conversations of marker words
    _response: str = field(init=False, default=_WORDS)
    _content_parts: bool = field(init=False, default=False)
    _has_system: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        source = template_source(self.renderer)
        if not source:
            raise ValueError(
                "the model's tokenizer has no chat template; set tokenizer.chat_template to a Jinja "
                "template and save the tokenizer again"
            )
        tree = parsed(source)
        self._check_arguments(tree)
        self._source = with_clock(source, tree, _CLOCK)
        self._find_content_format()
        self.bos_token_id = self._missing_bos()
        message = [user_message(_USERS[0], images=0)]
        opening = re.search(rf"{THINK}\s*\Z", self.render(message))
        self.opening = opening[0] if opening else ""
        other_source = with_clock(source, tree, _OTHER_CLOCK)
        dates = [
            self._apply(message, prompt=True, source=clocked)
            for clocked in (self._source, other_source)
        ]
        self.pinned = None if dates[0] == dates[1] else f"{_CLOCK:%d %b %Y}"
        self.response_suffix = self._find_close()
        self.header, self.inner = self._find_header()
        self.is_static = self._find_fixed_text()
        words = self._user_texts[0]
        self.response_prefix = words.response_prefix if words else ""
        self.history = self._find_history(words) if words else History.REWRITTEN

    def render(self, messages: list[Message], *, prompt: bool = True) -> str:
        """Return the text of messages; with `prompt`, the header of the next response follows."""
        return self._apply(messages, prompt=prompt, source=self._source)

    def head(self, system: str | None) -> str:
        """Return the text before the first user message."""
        before_user = self.user_text(0).before
        return self._before_first(system, images=0).removesuffix(before_user)

    def before_first(self, system: str | None, *, images: int) -> str:
        """Return the text between the head and the user's text in a conversation's first message."""
        return self._before_first(system, images=images).removeprefix(self.head(system))

    def user_text(self, images: int) -> UserText:
        """Return the text that the template writes around that of a user message with this many images.

        Raises:
            ValueError: The template has no place for the images, or no fixed text.
        """
        if images not in self._user_texts:
            self._user_texts[images] = self._find_user_text(images)
        user_text = self._user_texts[images]
        if user_text is None:
            raise ValueError(
                f"the chat template has no place for a message with {images} images before its text"
            )
        return user_text

    def system_messages(self, system: str | None) -> list[Message]:
        """Return the messages of a system prompt.

        Raises:
            ValueError: The template has no place for a system message.
        """
        if system and not self._has_system:
            raise ValueError(
                "context.system_prompt: the model's chat template has no place for a system message; set null"
            )
        return [{"role": "system", "content": system}] if system else []

    def _apply(self, messages: list[Message], *, prompt: bool, source: str) -> str:
        if self._content_parts:
            messages = [
                {**message, "content": content_parts(message["content"])} for message in messages
            ]
        # templates such as LFM 2.5's read another name; transformers 5.20 and before leave it to the caller
        messages = [
            {"thinking": message["reasoning_content"], **message}
            if "reasoning_content" in message
            else message
            for message in messages
        ]
        text = self.renderer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=prompt,
            chat_template=source,
            tools=[*self.tools] or None,
            **self.arguments,
        )
        assert isinstance(text, str)
        return text

    def _check_arguments(self, tree: nodes.Template) -> None:
        known = sorted(variables(tree) - set(self.tokenizer.SPECIAL_TOKENS_ATTRIBUTES))
        for name in self.arguments:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                raise ValueError(
                    f"context.template_kwargs.{name}: the model's chat template reads {', '.join(known) or 'none'}"
                    + (f"; did you mean {close[0]}?" if close else "")
                )

    def _find_content_format(self) -> None:
        """Find out whether the template takes plain text, and system messages."""
        self._content_parts = not self._shows(_USERS[0])
        if self._content_parts and not self._shows(_USERS[0]):
            raise ValueError(
                "the model's chat template leaves out the user's text; set tokenizer.chat_template to another one"
            )
        self._has_system = self._shows(_USERS[0], system=_SYSTEM)

    def _shows(self, text: str, *, system: str | None = None) -> bool:
        """Return whether the rendering holds the user's text and, where given, the system's."""
        messages = [user_message(text, images=0)]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        try:
            rendering = self.render(messages).casefold()
        # a template may raise any exception
        except Exception:
            if system or not self._content_parts:
                return False
            raise
        return text.casefold() in rendering and (system or "").casefold() in rendering

    def _find_close(self) -> str:
        """Return the text after a response, without an end of text that only the last message has."""
        user, next_user, _ = _USERS
        closed = (self._rendered((user, 0), _WORDS, prompt=False) or "").partition(_WORDS)[2]
        followed = (self._rendered((user, 0), _WORDS, (next_user, 0)) or "").partition(_WORDS)[2]
        shorter = [closed.removesuffix(name) for name in self._control_tokens()]
        fitting = [text for text in (closed, *shorter) if text and followed.startswith(text)]
        return max(fitting, key=len, default=closed)

    def _find_header(self) -> tuple[str, frozenset[str]]:
        """Return the text with control tokens before the words of a response, and all control tokens there."""
        user = user_message(_USERS[0], images=0)
        start = self.render([user])
        headers: list[str] = []
        for thoughts in _MESSAGES_WITH_THOUGHTS:
            message = {"role": "assistant", "content": _WORDS} | thoughts
            try:
                text = self.render([user, message], prompt=False)
            # a template may raise any exception
            except Exception:
                continue
            if text.startswith(start) and _WORDS in text:
                headers.append(text.removeprefix(start).partition(_WORDS)[0])
            elif not thoughts:
                break
        names = self._control_tokens()
        inner = {name for header in headers for name in names if name in header}
        plain = headers[0] if headers else ""
        return (plain if any(name in plain for name in names) else ""), frozenset(inner)

    def _control_tokens(self) -> set[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        return {str(token) for token in added if token.special} | {
            *self.tokenizer.all_special_tokens
        }

    def _missing_bos(self) -> int | None:
        """Return the id that a processor adds to a rendering that does not begin with it."""
        bos = self.tokenizer.bos_token
        if self.renderer is self.tokenizer or bos is None:
            return None
        added = self.tokenizer("")["input_ids"][:1] == [self.tokenizer.bos_token_id]
        begins = self.render([user_message(_USERS[0], images=0)]).startswith(bos)
        return int(self.tokenizer.bos_token_id) if added and not begins else None

    def _rendered(self, *turns: str | tuple[str, int], prompt: bool = True) -> str | None:
        """Return the text of users' texts, each with a number of images, and responses; None if that fails."""
        messages = self.system_messages(_SYSTEM if self._has_system else None)
        for turn in turns:
            if isinstance(turn, str):
                messages.append({"role": "assistant", "content": turn})
            else:
                messages.append(user_message(turn[0], images=turn[1]))
        try:
            return self.render(messages, prompt=prompt)
        # a template may raise any exception
        except Exception:
            return None

    def _before_first(self, system: str | None, *, images: int) -> str:
        key = (system, images)
        if key not in self._firsts:
            if len(self._firsts) > 1000:
                self._firsts.clear()
            messages = [*self.system_messages(system), user_message(_USERS[0], images=images)]
            self._firsts[key] = self.render(messages).partition(_USERS[0])[0]
        return self._firsts[key]

    def _find_fixed_text(self) -> bool:
        """Find the text around messages; return whether it is the same in all turns."""
        for self._response in (_WORDS, _THOUGHTS):
            self._user_texts = {}
            for images in (0, *self.image_counts):
                self._user_texts[images] = self._find_user_text(images)
            if self._user_texts[0] is not None:
                break
        return None not in self._user_texts.values()

    def _find_user_text(self, images: int) -> UserText | None:
        """Return the text around a user message, None if it is not the same in all turns."""
        first, second, _ = _USERS
        response = self._response.removeprefix(self.opening)
        opened = self._rendered((first, images))
        text = self._rendered((first, images), self._response, (second, images))
        if opened is None or text is None:
            return None
        left, shown, after = opened.partition(first)
        header, answered, rest = text.removeprefix(left + first).partition(response)
        before, _, last = rest.removeprefix(self.response_suffix).partition(second)
        kept, prefix = kept_header(header, after)
        places = (
            shown and answered and text.startswith(left) and rest.startswith(self.response_suffix)
        )
        words = self._user_texts.get(0)
        if not places or last != after or kept is None or (words and words.before == before):
            return None
        start = text[: len(text) - len(second + after)]
        for trims in ((False, False), (True, True), (True, False), (False, True)):
            user_text = UserText(
                before=before, after=after, kept=kept, response_prefix=prefix, trims=trims
            )
            edges = [_with_blanks(second, blanks) for blanks in _BLANKS]
            texts = [
                self._rendered((first, images), self._response, (edge, images)) for edge in edges
            ]
            if texts == [start + user_text.shown(edge) + after for edge in edges]:
                return user_text if self._is_static_text(user_text, images=images) else None
        return None

    def _is_static_text(self, found: UserText, *, images: int) -> bool:
        """Return whether the fixed text gives three turns as rendered, with and without images in the second."""
        first, second, third = map(_with_blanks, _USERS)
        opened = self._rendered((_USERS[0], images)) or ""
        left = opened.partition(_USERS[0])[0] + found.shown(first) + self._old_response(found)
        right = found.before + found.shown(third) + found.after
        for middle, count in ((found, images), (self._user_texts.get(0) or found, 0)):
            turns = ((first, images), self._response, (second, count), self._response)
            expected = left + middle.before + middle.shown(second) + self._old_response(middle)
            if self._rendered(*turns, (third, images)) != expected + right:
                return False
        return True

    def _old_response(self, user: UserText) -> str:
        """Return the text from the end of a user's text to the end of an old response."""
        return (
            user.kept
            + user.response_prefix
            + self._response.removeprefix(self.opening)
            + self.response_suffix
        )

    def _find_history(self, words: UserText) -> History:
        inner = self._as_old(_INNER, words)
        edges = [self._as_old(_with_blanks(_WORDS, blanks), words) for blanks in _BLANKS]
        thoughtful = self._as_old(_THOUGHTFUL, words)
        if self._response == _THOUGHTS:
            # this template gives an empty think block to a response without one
            inner, edges = _INNER, []
        if inner is None or thoughtful is None or inner.strip() != _INNER:
            return History.REWRITTEN
        if words.kept != words.after or thoughtful.strip() == _without_thoughts(_THOUGHTFUL):
            return History.WITHOUT_THOUGHTS
        if _without_blanks(thoughtful) != _THOUGHTFUL:
            return History.REWRITTEN
        blank = [_with_blanks(_WORDS, blanks) for blanks in _BLANKS]
        kept = (inner, thoughtful, edges) == (_INNER, _THOUGHTFUL, blank)
        return History.KEPT if kept else History.TRIMMED

    def _as_old(self, response: str, words: UserText) -> str | None:
        """Return a response as a later prompt shows it, None if the text around it changes too."""
        first, second, _ = _USERS
        opened, text = self._rendered((first, 0)), self._rendered((first, 0), response, (second, 0))
        if opened is None or text is None:
            return None
        left = opened.removesuffix(words.after) + words.kept
        right = self.response_suffix + words.before + second + words.after
        if not (text.startswith(left) and text.endswith(right)):
            return None
        opening = self.opening if words.kept == words.after else ""
        return opening + text[len(left) : len(text) - len(right)].removeprefix(
            words.response_prefix
        )


def _with_blanks(text: str, blanks: str = _BLANKS[0]) -> str:
    """Return a text twice, with blanks between and at the edges."""
    return f"{blanks}{text}\n\n  {text}{blanks[::-1]}"


def _without_blanks(text: str) -> str:
    """Return a text without blanks at its edges and around think tags."""
    return re.sub(rf"\s*({THINK}|{END_OF_THOUGHT})\s*", r"\1", text.strip())


def _without_thoughts(text: str) -> str:
    """Return the text behind a think block."""
    return text.partition(END_OF_THOUGHT)[2]
