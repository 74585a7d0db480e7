"""Prompts of the requests of agent programs: recorded ids continued where the history is the recorded one.

A request holds its whole history as messages. What was sampled is never encoded again: where the history begins with
a recorded request and its response, the prompt is the ids of both and the text after them. Another history is rendered
as a whole, and begins a new sample.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ragen_pl.chat_formats.messages import Message, content_parts
from ragen_pl.chat_formats.tool_template import ARGUMENT, NoToolsError, first_of
from ragen_pl.engines.protocol import Prompt
from ragen_pl.prompts.conversation import Conversation, Exchange
from ragen_pl.prompts.encoding import TextEncoder
from ragen_pl.prompts.histories import RecordedCall, difference, longest
from ragen_pl.prompts.native import NativeFormat, mapped
from ragen_pl.trajectory import FIRST, JOINED, ChatRequest

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

# lists of tools whose templates are kept
_MAX_FORMATS = 64
_MARKER = "@Last Response@"


class RequestRefusedError(ValueError):
    """A program's request has no prompt. The program is told the reason, and may go on.

    Args:
        code: Code of the reason, as OpenAI's API has them.
        message: The reason.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RequestPrompts:
    """Make the prompts of programs' requests.

    Args:
        bundle: Tokenizer and processor of the model.
        encoder: Encodes texts.
        arguments: Values of the chat template's own variables.
        max_tokens: Longest prompt plus response. Prompts that are much longer are refused before they are encoded.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        encoder: TextEncoder,
        arguments: Mapping[str, Any] | None,
        *,
        max_tokens: int,
    ) -> None:
        self._bundle, self._encoder, self._arguments = bundle, encoder, arguments
        self._max_tokens = max_tokens
        self._ends = frozenset(bundle.eos_token_ids)
        self._formats: OrderedDict[str, NativeFormat] = OrderedDict()

    def observe(
        self, conversation: Conversation, request: ChatRequest, images: Sequence[np.ndarray]
    ) -> Prompt:
        """Add a request with its images to a conversation and return its prompt.

        Raises:
            RequestRefusedError: The chat template cannot show the request, or it is far too long.
        """
        if images and self._bundle.images is None:
            raise RequestRefusedError("unsupported_image", "the model reads text only")
        # a bound of the work only, as is that of the tools
        characters = sum(len(_text_of(message)) for message in request.messages)
        if characters > self._encoder.max_characters:
            raise self._too_long(f"the messages, {characters} characters, have", "the messages")
        native = conversation.native = self._format(request.tools)
        before = longest(conversation.calls, request)
        new = images[0 if before is None else len(before.prompt.images) :]
        if before is None:
            latest = conversation.calls[-1] if conversation.calls else None
            conversation.history = FIRST if latest is None else difference(latest, request)
            messages = request.messages
            rendering = self._render(native, self._shown(messages))
        else:
            conversation.history = JOINED
            messages = request.messages[len(before.request.messages) + 1 :]
            rendering = self._after(native, before, messages)
        prompt = self._prompt(rendering, new, before)
        text = "\n".join(filter(None, map(_text_of, messages)))
        conversation.exchanges.append(Exchange(text=text, images=[*new]))
        return prompt

    def _format(self, tools: Sequence[Mapping[str, Any]]) -> NativeFormat:
        key = json.dumps(tools, ensure_ascii=False)
        if key not in self._formats:
            # a bound of the work only: a chat template may show less of a schema than its JSON, up to half of it
            if self._encoder.exceeds(key, self._max_tokens):
                raise self._too_long("the schemas of the tools have", "the schemas")
            try:
                template = self._bundle.chat_template(
                    self._arguments, mapped([*tools], self._encoder.escape_control_tokens)
                )
                self._formats[key] = NativeFormat(template, self._bundle.end_texts)
            except NoToolsError as error:
                raise RequestRefusedError("unsupported_tools", str(error)) from error
            # a template may raise any exception
            except Exception as error:
                raise RequestRefusedError(
                    "unsupported_tools",
                    f"the model's chat template cannot show these tools: {error}",
                ) from error
            while len(self._formats) > _MAX_FORMATS:
                self._formats.popitem(last=False)
        return self._formats[key]

    def _prompt(
        self, rendering: str, new: Sequence[np.ndarray], before: RecordedCall | None
    ) -> Prompt:
        """Return the prompt of a rendering, which is the part after a recorded response where there is one."""
        images = [*([] if before is None else before.prompt.images), *new]
        encoder = self._bundle.images
        try:
            if encoder is not None:
                for image in new:
                    encoder.check_encodes(image)
                encoder.check_together(images)
            expanded = self._bundle.expand_image_slots(rendering, new)
        except ValueError as error:
            raise RequestRefusedError(
                "unsupported_image",
                f"the {len(new)} images of the request cannot be shown: {error}",
            ) from error
        # a bound of the work only: who plays the episode refuses any prompt that does not fit
        if self._encoder.exceeds(rendering, self._max_tokens):
            raise self._too_long("the prompt has", "the messages")
        encode = partial(self._encoder.encode_rendered, continues=before is not None)
        ids = encode(expanded)
        unexpanded = encode(rendering) if new else ids
        if before is not None:
            ids = np.concatenate([before.prompt.ids, before.response_ids, ids])
            unexpanded = np.concatenate(
                [before.prompt.unexpanded_ids, before.response_ids, unexpanded]
            )
        return Prompt(ids=ids, unexpanded_ids=unexpanded, images=images)

    def _too_long(self, found: str, remedy: str) -> RequestRefusedError:
        return RequestRefusedError(
            "context_length_exceeded",
            f"{found} more than the {self._max_tokens} tokens of the context; shorten {remedy}",
        )

    def _after(
        self, native: NativeFormat, before: RecordedCall, messages: Sequence[Message]
    ) -> str:
        """Return the text after a recorded response up to the next one.

        The history is rendered with a marker at the end of the response. What follows the template's first end token
        after the marker is the text, whatever the template does to the response itself.
        """
        response: Message = {"role": "assistant", "content": _MARKER}
        if calls := before.message.get("tool_calls"):
            marked = [{**call, "arguments": {ARGUMENT: _MARKER}} for call in calls]
            response = {"role": "assistant", "content": "", "tool_calls": marked}
        shown = self._shown([*before.request.messages, response, *messages])
        _, found, after = self._render(native, shown).rpartition(_MARKER)
        first_end = first_of(native.ends, after)
        if not found or first_end is None:
            raise RequestRefusedError(
                "template_error", "the model's chat template leaves out the response before"
            )
        place, end = first_end
        after = after[place + len(end) :]
        last = int(before.response_ids[-1])
        # a response that was cut has no end; Gemma's ends another way after calls than after words, and after words any
        # of the model's ends will do, as in environments
        ended = last in self._ends and (not calls or self._bundle.piece(last) == end)
        return after if ended else end + after

    def _render(self, native: NativeFormat, messages: list[Message]) -> str:
        try:
            return native.template.render(messages)
        # a template may raise any exception
        except Exception as error:
            raise RequestRefusedError(
                "template_error", f"the model's chat template cannot show these messages: {error}"
            ) from error

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as chat templates take them, control tokens escaped."""
        return [self._shown_message(message) for message in messages]

    def _shown_message(self, message: Message) -> Message:
        escape = self._encoder.escape_control_tokens
        shown: Message = {"role": message["role"], "content": _content(message["content"], escape)}
        for name in ("reasoning_content", "name", "tool_call_id"):
            if message.get(name):
                shown[name] = escape(message[name])
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [
                {
                    "id": escape(call["id"]),
                    "type": "function",
                    "function": {
                        "name": call["name"],
                        "arguments": mapped(call["arguments"], escape),
                    },
                }
                for call in calls
            ]
        return shown


def _content(content: Any, escape: Any) -> Any:
    if isinstance(content, str):
        return escape(content)
    return [
        {"type": "text", "text": escape(part["text"])}
        if part["type"] == "text"
        else {"type": "image"}
        for part in content
    ]


def _text_of(message: Message) -> str:
    """Return the words of a message for a reader."""
    content = "".join(part.get("text", "") for part in content_parts(message["content"]))
    calls = [f"{call['name']}({call['arguments']})" for call in message.get("tool_calls") or ()]
    return f"{message['role']}: {' '.join(filter(None, [content, *calls]))}"
