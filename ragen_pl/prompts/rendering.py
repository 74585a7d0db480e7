"""Messages of a conversation's window, for chat templates whose prompts are rendered as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragen_pl.chat_formats.chat_template import ChatTemplate
from ragen_pl.chat_formats.messages import Message, user_message
from ragen_pl.prompts.conversation import Conversation, Exchange
from ragen_pl.prompts.native import NativeFormat


def window_messages(
    template: ChatTemplate,
    conversation: Conversation,
    shown: Sequence[Exchange],
    *,
    plain: Callable[[str], str],
    words_start: Callable[[str], int],
) -> list[Message]:
    """Return the messages of the turns that a prompt shows.

    Args:
        template: The conversation's chat template.
        conversation: The conversation.
        shown: Its turns that are shown.
        plain: Removes control tokens from a text.
        words_start: Returns where the words of a response begin.
    """
    native = conversation.native
    messages: list[Message] = template.system_messages(conversation.system)
    calls: Sequence[Message] = ()
    for exchange in shown:
        if isinstance(native, NativeFormat) and calls:
            messages += native.result_messages(
                calls, exchange.results, images=exchange.result_images, plain=plain
            )
        else:
            messages.append(user_message(plain(exchange.text), images=len(exchange.images)))
        calls = exchange.calls
        if exchange.response_ids is not None:
            words = exchange.response_text[words_start(exchange.response_text) :]
            if isinstance(native, NativeFormat):
                text = template.opening + words
                messages.append(native.assistant_message(text, calls=calls, plain=plain))
            else:
                response = template.opening + plain(words)
                messages.append({"role": "assistant", "content": response})
    return messages
