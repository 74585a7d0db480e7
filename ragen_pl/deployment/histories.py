"""Recorded requests with their responses, which later requests continue. Bounded, and separated by key."""

from __future__ import annotations

import json
from collections import deque

from ragen_pl.prompts.conversation import Conversation
from ragen_pl.prompts.histories import RecordedCall


class Histories:
    """Recorded calls of each key; the oldest are dropped.

    A request whose history was dropped is rendered as a whole, as a stateless server renders all of them.

    Args:
        max_calls: Calls that are kept, of all keys together.
        max_bytes: Bytes of their ids, images and messages.
    """

    def __init__(self, *, max_calls: int, max_bytes: int) -> None:
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self._calls: dict[str, list[RecordedCall]] = {}
        # keys and sizes in the order of recording, which is that of each key's calls too
        self._recorded: deque[tuple[str, int]] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._recorded)

    def conversation(self, key: str) -> Conversation:
        """Return a conversation that knows the calls of a key, and no others."""
        return Conversation(system=None, calls=self._calls.setdefault(key, []))

    def recorded(self, key: str) -> None:
        """Note that a call was added to a key's, and drop the oldest calls where there are too many."""
        size = _size(self._calls[key][-1])
        self._recorded.append((key, size))
        self.bytes += size
        while len(self._recorded) > self._max_calls or self.bytes > self._max_bytes:
            oldest, size = self._recorded.popleft()
            self.bytes -= size
            # in place: requests under way have the same list
            del self._calls[oldest][0]


def _size(call: RecordedCall) -> int:
    prompt = call.prompt
    arrays = (prompt.ids, prompt.unexpanded_ids, call.response_ids, *prompt.images)
    messages = (call.request.messages, call.request.tools, call.message)
    return sum(array.nbytes for array in arrays) + sum(len(json.dumps(each)) for each in messages)
