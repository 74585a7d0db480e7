"""ContextManager: prompts of token ids and image slots, turn after turn.

It owns the chat format, the window of turns and the token budget. Sampled ids are kept as they are; only
text of the environment is encoded, once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from annotated_types import Ge

from ragen_pl.checked import checked
from ragen_pl.constraints import Count, Note, TurnTemplate
from ragen_pl.engines.occlusion import LeaveOut
from ragen_pl.engines.protocol import Prompt
from ragen_pl.models.chat_template import History, Message, user_message
from ragen_pl.prompts.conversation import (
    Conversation,
    Exchange,
    check_template,
    fill_template,
    system_text,
)
from ragen_pl.trajectory import Observation

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle


class ContextManager:
    """Turn observations and responses into prompts.

    Args:
        bundle: tokenizer and processor of the model.
        window: `"all"` for the whole history, or the number of latest turns shown, the present one
            included (1: one turn a sample).
        system_prompt: `"instructions"` for the environment's own rules, another text, or None for the
            chat template's default.
        turn_template: text of the user's block, with the fields {observation}, {turn}, {max_turns},
            {turns_left}, {actions} (all carried out in the episode) and {last_action}.
        max_tokens: longest prompt plus response; a longer conversation is truncated.
        leave_out: fractions of a prompt left out before a response is sampled; None for nothing.
        template_kwargs: values of the chat template's own variables, such as `enable_thinking`; None for its
            defaults.
        keep_thoughts: whether think blocks stay in the history where the chat template strips them. An
            episode is then one sample, and its prompts differ from the template's by these blocks.
    """

    @checked
    def __init__(
        self,
        bundle: ModelBundle,
        *,
        window: Literal["all"] | Annotated[int, Ge(1), Note("the latest turns shown")] = 1,
        system_prompt: str | None = "instructions",
        turn_template: TurnTemplate = "{observation}",
        max_tokens: Count = 4096,
        leave_out: LeaveOut | Mapping[str, float] | None = None,
        template_kwargs: dict[str, bool | int | float | str] | None = None,
        keep_thoughts: bool = False,
    ) -> None:
        check_template(turn_template, key="context.turn_template")
        self.bundle = bundle
        self.window = window
        self.system_prompt = system_prompt
        self.turn_template = turn_template
        self.max_tokens = max_tokens
        self.keep_thoughts = keep_thoughts
        self.template = bundle.chat_template(template_kwargs)
        self.leave_out = LeaveOut(**leave_out) if isinstance(leave_out, Mapping) else leave_out
        if self.leave_out and not self.joins:
            raise ValueError(
                "context.leave_out: this chat template rewrites its history, no part of it can be left "
                "out; set context.leave_out.patches=0 and context.leave_out.turns=0"
                f"{self._or_keep_thoughts()}"
            )
        if self.leave_out and not bundle.facts.plain_positions:
            raise ValueError(
                f"context.leave_out: in {bundle.facts.family} the positions or the attention of a token depend on the "
                "whole image, no part of it can be left out; set context.leave_out.patches=0 and "
                "context.leave_out.turns=0"
            )
        self._encoded: dict[tuple[str, str], np.ndarray] = {}
        self._splits: dict[str, tuple[str, str]] = {}
        self._ends = frozenset(bundle.eos_token_ids)
        added = bundle.tokenizer.added_tokens_decoder.values()
        takes_blanks = {str(token) for token in added if token.lstrip or token.rstrip}
        self._control_tokens = _any_of(bundle.special_tokens.values())
        self._inner = _any_of(self.template.inner)
        self._borders = _any_of(set(bundle.special_tokens.values()) - takes_blanks)
        # the end-of-turn token with what the template writes before it, and the text after it
        self._end = str(bundle.tokenizer.decode([bundle.end_of_turn_id]))
        if self._cached(("start", self._end), self._end).tolist() != [bundle.end_of_turn_id]:
            raise ValueError(
                f"the tokenizer does not read {self._end!r}, which ends a response, as one token; set its eos_token "
                "to the token that ends a response and save it"
            )
        before, found, after = self.template.response_suffix.partition(self._end)
        self._ending, self._after_end = (before + found, after) if found else (self._end, before)

    def _or_keep_thoughts(self) -> str:
        strips = self.template.history is History.WITHOUT_THOUGHTS and self.template.is_static
        return ", or context.keep_thoughts=true" if strips else ""

    @property
    def joins(self) -> bool:
        """Whether prompts are the sampled ids with template text around them.

        Otherwise the window is rendered as a whole in every turn, as a template needs that strips or rewrites
        the responses of earlier turns.
        """
        history = self.template.history
        kept = history in (History.KEPT, History.TRIMMED)
        thoughts_kept = history is History.WITHOUT_THOUGHTS and self.keep_thoughts
        return self.template.is_static and (self.window == 1 or kept or thoughts_kept)

    @property
    def grows(self) -> bool:
        """Whether each prompt of an episode begins with the one before it and its response."""
        drops_turns = self.leave_out and self.leave_out.turns
        return self.joins and self.window == "all" and not drops_turns

    @property
    def opening(self) -> str:
        """Think tag at the end of a prompt, with which every response begins; empty in most templates."""
        return self.template.opening

    def start(self, instructions: str) -> Conversation:
        """Open a conversation in an environment with these instructions."""
        system = system_text(self.system_prompt, instructions)
        if not self.template.is_static:
            self.template.system_messages(system)
            return Conversation(system=system)
        head = self.template.head(system)
        return Conversation(system=system, head=head, system_prompt_ids=self._encode(head))

    def observe(
        self, conversation: Conversation, observation: Observation, *, max_turns: int
    ) -> Prompt:
        """Add an observation and return the prompt of the response to it."""
        text = fill_template(self.turn_template, conversation, observation, max_turns=max_turns)
        conversation.exchanges.append(Exchange(text=text, images=observation.images))
        return self._prompt(conversation)

    def candidates(self, conversation: Conversation) -> list[np.ndarray]:
        """Return the parts of the present prompt that may be left out: positions of old turns, then of patches."""
        assert self.leave_out is not None
        ids, starts = self._joined(conversation, self._window(conversation))
        positions = np.split(np.arange(len(ids)), starts)[1:]
        old = positions[:-1] if self.leave_out.dropped_turns([0.0] * (len(positions) - 1)) else []
        if not self.leave_out.patches:
            return old
        slots = ids[positions[-1]] == self.bundle.image_token_id
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
            ids, starts = self._joined(conversation, self._window(conversation))
            ids = ids[starts[-1] :]
            slot_scores = np.zeros(len(ids))
            slot_scores[ids == self.bundle.image_token_id] = scores[num_turns:]
            _, present.patches = self.leave_out.drop_patches(
                ids,
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
        conversation.respond(ids=ids, text=text, actions=actions)

    def words_start(self, text: str) -> int:
        """Return the index at which the words of a response begin: after the last control token before an answer."""
        return max((found.end() for found in self._inner.finditer(text)), default=0)

    def encode_response(self, text: str) -> np.ndarray:
        """Return the ids of a written response as the policy would sample it, its end-of-turn token included."""
        opening = self.template.opening.strip()
        text = self.template.response_prefix + (text.removeprefix(opening) if opening else text)
        return self._encode_around(self.template.header, text, self._ending, continues=True)

    def pieces(self, ids: np.ndarray) -> list[str]:
        """Return the text of each token of a response; the pieces join to the response's text.

        A character of several tokens belongs to the last of them.
        """
        kept = [token for token in ids.tolist() if token not in self._ends]
        pieces = [self.bundle.piece(token) for token in kept]
        if any("\ufffd" in piece for piece in pieces):
            texts = [self.bundle.decode(kept[: end + 1]) for end in range(len(kept))]
            lengths = [0, *(len(text.rstrip("\ufffd")) for text in texts)]
            lengths[-1] = len(texts[-1])
            ends = np.maximum.accumulate(lengths)
            pieces = [texts[-1][a:b] for a, b in pairwise(ends)]
        return pieces + [""] * (len(ids) - len(kept))

    def _window(self, conversation: Conversation) -> list[Exchange]:
        """Return the turns in the window."""
        return conversation.latest(self.window)

    def _prompt(self, conversation: Conversation, *, left_out: Collection[int] = ()) -> Prompt:
        """Return the prompt of the window's turns, without those left out (indices in the window)."""
        window = self._window(conversation)
        shown = [exchange for number, exchange in enumerate(window) if number not in left_out]
        images = [image for exchange in shown for image in exchange.images]
        if self.bundle.images is not None:
            self.bundle.images.check_together(images)
        if not self.joins:
            text = self._render(conversation, shown)
            return Prompt(
                ids=self._encode(self.bundle.expand_image_slots(text, images)),
                unexpanded_ids=self._encode(text),
                images=images,
            )
        first = len(conversation.exchanges) - len(window)
        ids, _ = self._joined(conversation, shown)
        unexpanded_ids, _ = self._joined(conversation, shown, expand=False) if images else (ids, [])
        return Prompt(
            ids=ids,
            unexpanded_ids=unexpanded_ids,
            images=images,
            patches=self._patches(shown),
            left_out=tuple(first + number for number in sorted(left_out)),
        )

    def _joined(
        self, conversation: Conversation, shown: Sequence[Exchange], *, expand: bool = True
    ) -> tuple[np.ndarray, list[int]]:
        """Return the ids of turns one after the other, and the position at which each turn starts.

        A turn is encoded together with the template's text before it, because a token may reach over the border.
        """
        parts: list[np.ndarray] = []
        starts, length = [], 0
        before = conversation.head
        for exchange in shown:
            first = not parts
            ids = self._block(conversation, exchange, before, first=first, expand=expand)
            previous = self._encode(before, continues=not first)
            starts.append(length + _common_length(previous, ids))
            parts.append(ids)
            response_ids = exchange.response_ids
            if response_ids is not None:
                parts.append(response_ids)
                ended = len(response_ids) and int(response_ids[-1]) in self._ends
                before = self._after_end if ended else self.template.response_suffix
            length = sum(map(len, parts))
        return np.concatenate(parts), starts

    def _block(
        self,
        conversation: Conversation,
        exchange: Exchange,
        before: str,
        *,
        first: bool,
        expand: bool,
    ) -> np.ndarray:
        """Return the ids of a turn up to its response, with those of the template's text before it."""
        count = len(exchange.images)
        user_text = self.template.user_text(count)
        start = user_text.before
        if first:
            start = self.template.before_first(conversation.system, images=count)
        if expand:
            start = self.bundle.expand_image_slots(start, exchange.images)
        ids = self._encode_around(
            before + start, user_text.shown(exchange.text), user_text.after, continues=not first
        )
        if not expand or exchange.patches is None:
            return ids
        slots = np.flatnonzero(ids == self.bundle.image_token_id)
        shown, end = [], 0
        for image, patches in zip(exchange.images, exchange.patches, strict=True):
            shown.append(slots[end + patches])
            end += self.bundle.num_image_tokens(image)
        return np.delete(ids, np.setdiff1d(slots, np.concatenate(shown)))

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
        """Return the text of the window, rendered as a whole."""
        messages: list[Message] = self.template.system_messages(conversation.system)
        for exchange in shown:
            messages.append(user_message(self._plain(exchange.text), images=len(exchange.images)))
            if exchange.response_ids is not None:
                words = exchange.response_text[self.words_start(exchange.response_text) :]
                response = self.template.opening + self._plain(words)
                messages.append({"role": "assistant", "content": response})
        return self.template.render(messages)

    def _plain(self, text: str) -> str:
        """Return a text without the tokenizer's control tokens."""
        before = None
        # removing one token may join the halves of another
        while text != before:
            before, text = text, self._control_tokens.sub("", text)
        return text

    def _encode_around(self, left: str, text: str, right: str, *, continues: bool) -> np.ndarray:
        """Return the ids of a text between template text; a control token's name in it is plain letters."""
        # the template's text up to its last control token is the same in many prompts
        fixed, left = self._split(left)
        parts = [self._encode(fixed, continues=continues)] if fixed else []
        words = self._control_tokens.split(text)
        words[0] = left + words[0]
        words[-1] += right
        parts.append(self._encode(words[0], continues=continues or bool(fixed)))
        names = self._control_tokens.findall(text)
        for name, word in zip(names, words[1:], strict=True):
            parts += [self._spelled(name), self._encode(word, continues=True)]
        return np.concatenate(parts)

    def _split(self, text: str) -> tuple[str, str]:
        """Split a text after its last control token, over which no other token reaches."""
        if text not in self._splits:
            if len(self._splits) > 1000:
                self._splits.clear()
            ends = [match.end() for match in self._borders.finditer(text)]
            end = ends[-1] if ends else 0
            self._splits[text] = (text[:end], text[end:])
        return self._splits[text]

    def _encode(self, text: str, *, continues: bool = False) -> np.ndarray:
        """Return the ids of a text; where it `continues` another, tokenizers add no blank at its start."""
        if continues:
            return self._cached(("continues", text), self._end + text)[1:]
        ids = self._cached(("start", text), text)
        bos = self.template.bos_token_id
        return ids if bos is None else np.append([bos], ids)

    def _spelled(self, name: str) -> np.ndarray:
        """Return the ids of a control token's name in letters."""
        before = self._cached(("spelled", ""), "\n", split_special_tokens=True)
        ids = self._cached(("spelled", name), "\n" + name, split_special_tokens=True)
        return ids[len(before) :]

    def _cached(
        self, key: tuple[str, str], text: str, *, split_special_tokens: bool = False
    ) -> np.ndarray:
        if key not in self._encoded:
            if len(self._encoded) > 20_000:
                self._encoded.clear()
            ids = self.bundle.tokenizer(
                text, add_special_tokens=False, split_special_tokens=split_special_tokens
            )["input_ids"]
            self._encoded[key] = np.asarray(ids, dtype=np.int64)
        return self._encoded[key]


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of these names, longer ones first."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Return how many ids at the start of two sequences are the same."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
