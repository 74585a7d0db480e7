"""ContextManager: prompts of token ids and image slots, turn after turn.

It owns the chat format, the window of turns and the token budget. Sampled ids are kept as they are; only
text of the environment is encoded, once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from annotated_types import Ge

from ragen_pl.constraints import Contains, Count, Note, checked
from ragen_pl.rollout.chat_template import ChatTemplate, Message, user_message
from ragen_pl.rollout.conversation import NO_IDS, Conversation, Exchange
from ragen_pl.rollout.engine import Prompt
from ragen_pl.rollout.leave_out import LeaveOut
from ragen_pl.trajectory import Observation

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

TEMPLATE_FIELDS = ("observation", "turn", "max_turns", "turns_left", "actions", "last_action")


class ContextManager:
    """Turn observations and responses into prompts.

    Args:
        bundle: tokenizer and processor of the model.
        window: `"all"` for the whole history, or the number of latest turns shown, the present one
            included (1: one turn a sample).
        system_prompt: `"instructions"` for the environment's own rules, another text, or None.
        turn_template: text of the user's block, with the fields {observation}, {turn}, {max_turns},
            {turns_left}, {actions} (all carried out in the episode) and {last_action}.
        max_tokens: longest prompt plus response; a longer conversation is truncated.
        leave_out: shares of a prompt left out before a response is sampled; None for nothing.
    """

    @checked
    def __init__(
        self,
        bundle: ModelBundle,
        *,
        window: Literal["all"] | Annotated[int, Ge(1), Note("the latest turns shown")] = 1,
        system_prompt: str | None = "instructions",
        turn_template: Annotated[str, Contains("{observation}")] = "{observation}",
        max_tokens: Count = 4096,
        leave_out: LeaveOut | Mapping[str, float] | None = None,
    ) -> None:
        unknown = {
            name for _, name, _, _ in Formatter().parse(turn_template) if name is not None
        } - set(TEMPLATE_FIELDS)
        if unknown:
            raise ValueError(
                f"context.turn_template uses unknown fields {sorted(unknown)}; known: {', '.join(TEMPLATE_FIELDS)}"
            )
        self.bundle = bundle
        self.window = window
        self.system_prompt = system_prompt
        self.turn_template = turn_template
        self.max_tokens = max_tokens
        self.template = ChatTemplate(bundle.renderer)
        self.leave_out = LeaveOut(**leave_out) if isinstance(leave_out, Mapping) else leave_out
        if self.leave_out and not self.template.keeps_prefix:
            raise ValueError(
                "context.leave_out: this chat template rewrites its history, no part of it can be left "
                "out; set context.leave_out.patches=0 and context.leave_out.turns=0"
            )
        self._encoded: dict[str, np.ndarray] = {}
        close = self._encode_markup(self.template.close) if self.template.keeps_prefix else NO_IDS
        self._ends = frozenset(bundle.eos_token_ids)
        ends_turn = len(close) and int(close[0]) in self._ends
        self._close_after_end = close[1:] if ends_turn else close
        self._close_after_length_limit = close

    @property
    def grows(self) -> bool:
        """Whether each prompt of an episode begins with the one before it."""
        return self.window == "all" and not (self.leave_out and self.leave_out.turns)

    def start(self, instructions: str) -> Conversation:
        """Open a conversation in an environment with these instructions."""
        system = instructions if self.system_prompt == "instructions" else self.system_prompt
        keeps_prefix = self.template.keeps_prefix
        ids = self._encode_markup(self.template.head(system)) if keeps_prefix else NO_IDS
        return Conversation(system=system, system_prompt_ids=ids)

    def observe(
        self, conversation: Conversation, observation: Observation, *, max_turns: int
    ) -> Prompt:
        """Add an observation and return the prompt of the response to it."""
        text = self._fill(conversation, observation, max_turns)
        shown_ids, unexpanded_ids = self._shown_ids(text, observation.images)
        exchange = Exchange(
            shown_ids=shown_ids,
            unexpanded_ids=unexpanded_ids,
            text=text,
            images=observation.images,
        )
        conversation.exchanges.append(exchange)
        return self._prompt(conversation)

    def candidates(self, conversation: Conversation) -> list[np.ndarray]:
        """Return the parts of the present prompt that may be left out: positions of old turns, then of patches."""
        assert self.leave_out is not None
        positions = self._positions(conversation)
        old = positions[:-1] if self.leave_out.dropped_turns([0.0] * (len(positions) - 1)) else []
        if not self.leave_out.patches:
            return old
        slots = conversation.exchanges[-1].shown_ids == self.bundle.image_token_id
        return [*old, *positions[-1][slots][:, None]]

    def narrow(self, conversation: Conversation, scores: np.ndarray) -> Prompt:
        """Return the present prompt without the parts that score lowest; see `LeaveOut`.

        Args:
            conversation: a conversation after `observe`.
            scores: `[candidates]`, one for each candidate, in order.
        """
        assert self.leave_out is not None
        present, old = conversation.exchanges[-1], len(self._window(conversation)) - 1
        num_turns = old if self.leave_out.dropped_turns([0.0] * old) else 0
        if self.leave_out.patches and present.images:
            slot_scores = np.zeros(len(present.shown_ids))
            slot_scores[present.shown_ids == self.bundle.image_token_id] = scores[num_turns:]
            present.shown_ids, present.patches = self.leave_out.drop_patches(
                present.shown_ids,
                slot_scores,
                slot=self.bundle.image_token_id,
                patches=[self.bundle.num_image_tokens(image) for image in present.images],
            )
        left_out = self.leave_out.dropped_turns(scores[:num_turns].tolist())
        return self._prompt(conversation, left_out=left_out)

    def response(
        self, conversation: Conversation, *, ids: np.ndarray, text: str, actions: Sequence[str]
    ) -> None:
        """Record the response to the latest observation and the actions carried out."""
        exchange = conversation.exchanges[-1]
        exchange.response_ids, exchange.response_text = ids, text
        conversation.actions.extend(actions)

    def encode_response(self, text: str) -> np.ndarray:
        """Return the ids of a written response, its end-of-turn token included."""
        return np.append(
            self._cached("response:" + text, text, split_special_tokens=True),
            self.bundle.end_of_turn_id,
        )

    def pieces(self, ids: np.ndarray) -> list[str]:
        """Return the text of each token of a response; the pieces join to the response's text.

        A character of several tokens belongs to the last of them.
        """
        kept = [token for token in ids.tolist() if token not in self._ends]
        pieces = [self.bundle.piece(token) for token in kept]
        if any("\ufffd" in piece for piece in pieces):
            decode = self.bundle.tokenizer.decode
            texts = [
                str(decode(kept[: end + 1], skip_special_tokens=False)) for end in range(len(kept))
            ]
            lengths = [0, *(len(text.rstrip("\ufffd")) for text in texts)]
            lengths[-1] = len(texts[-1])
            ends = np.maximum.accumulate(lengths)
            pieces = [texts[-1][a:b] for a, b in pairwise(ends)]
        return pieces + [""] * (len(ids) - len(kept))

    def _fill(self, conversation: Conversation, observation: Observation, max_turns: int) -> str:
        turn = len(conversation.exchanges) + 1
        return self.turn_template.format(
            observation=observation.text,
            turn=turn,
            max_turns=max_turns,
            turns_left=max_turns - turn + 1,
            actions=" ".join(conversation.actions) or "none",
            last_action=conversation.actions[-1] if conversation.actions else "none",
        )

    def _window(self, conversation: Conversation) -> list[Exchange]:
        """Return the turns in the window."""
        exchanges = conversation.exchanges
        return exchanges if self.window == "all" else exchanges[-int(self.window) :]

    def _prompt(self, conversation: Conversation, *, left_out: Collection[int] = ()) -> Prompt:
        """Return the prompt of the window's turns, without those left out (indices in the window)."""
        window = self._window(conversation)
        shown = [exchange for number, exchange in enumerate(window) if number not in left_out]
        images = [image for exchange in shown for image in exchange.images]
        if not self.template.keeps_prefix:
            rendering = self._render(conversation, shown)
            expanded = self.bundle.expand_image_slots(rendering, images)
            return Prompt(
                ids=self._encode_markup(expanded),
                unexpanded_ids=self._encode_markup(rendering),
                images=images,
            )
        unexpanded = [self._block(exchange, exchange.unexpanded_ids) for exchange in shown]
        first = len(conversation.exchanges) - len(window)
        return Prompt(
            ids=np.concatenate(
                [
                    conversation.system_prompt_ids,
                    *(self._block(turn, turn.shown_ids) for turn in shown),
                ]
            ),
            unexpanded_ids=np.concatenate([conversation.system_prompt_ids, *unexpanded]),
            images=images,
            patches=self._patches(shown),
            left_out=tuple(first + number for number in sorted(left_out)),
        )

    def _positions(self, conversation: Conversation) -> list[np.ndarray]:
        """Return the positions in the prompt of each turn in the window."""
        window = self._window(conversation)
        sizes = [len(self._block(exchange, exchange.shown_ids)) for exchange in window]
        ends = len(conversation.system_prompt_ids) + np.cumsum(sizes)
        return [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def _block(self, exchange: Exchange, shown_ids: np.ndarray) -> np.ndarray:
        """Return the ids of a turn; those of an old turn include the response and the text that closes it."""
        if exchange.response_ids is None:
            return shown_ids
        ended = len(exchange.response_ids) and int(exchange.response_ids[-1]) in self._ends
        close = self._close_after_end if ended else self._close_after_length_limit
        return np.concatenate([shown_ids, exchange.response_ids, close])

    def _patches(self, shown: Sequence[Exchange]) -> list[np.ndarray] | None:
        if all(exchange.patches is None for exchange in shown):
            return None
        patches: list[np.ndarray] = []
        for exchange in shown:
            all_patches = [
                np.arange(self.bundle.num_image_tokens(image)) for image in exchange.images
            ]
            patches += all_patches if exchange.patches is None else exchange.patches
        return patches

    def _render(self, conversation: Conversation, shown: Sequence[Exchange]) -> str:
        """Return the text of the window, rendered as a whole for a template that rewrites its history."""
        messages: list[Message] = self.template.system_messages(conversation.system)
        for exchange in shown:
            messages.append(user_message(self._plain(exchange.text), images=len(exchange.images)))
            if exchange.response_ids is not None:
                messages.append(
                    {"role": "assistant", "content": self._plain(exchange.response_text)}
                )
        return self.template.render(messages)

    def _plain(self, text: str) -> str:
        """Return a text without the tokenizer's control tokens."""
        control_tokens, before = tuple(self.bundle.special_tokens.values()), None
        # removing one token may join the halves of another
        while text != before:
            before = text
            for token in control_tokens:
                text = text.replace(token, "")
        return text

    def _shown_ids(self, text: str, images: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a user's block with image slots expanded, and with one token for each image."""
        if not self.template.keeps_prefix:
            return NO_IDS, NO_IDS
        before, after = self.template.around_user(len(images))
        expanded = self._encode_markup(self.bundle.expand_image_slots(before, images))
        rest = [self._encode_words(text), self._encode_markup(after)]
        return np.concatenate([expanded, *rest]), np.concatenate(
            [self._encode_markup(before), *rest]
        )

    def _encode_markup(self, text: str) -> np.ndarray:
        return self._cached("markup:" + text, text, split_special_tokens=False)

    def _encode_words(self, text: str) -> np.ndarray:
        """Return the ids of an environment's text; a control token's name in it is plain letters."""
        return self._cached("words:" + text, text, split_special_tokens=True)

    def _cached(self, key: str, text: str, *, split_special_tokens: bool) -> np.ndarray:
        if key not in self._encoded:
            if len(self._encoded) > 20_000:
                self._encoded.clear()
            ids = self.bundle.tokenizer(
                text, add_special_tokens=False, split_special_tokens=split_special_tokens
            )["input_ids"]
            self._encoded[key] = np.asarray(ids, dtype=np.int64)
        return self._encoded[key]
