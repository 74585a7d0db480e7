"""ContextManager: prompts of token ids and image slots, turn after turn.

It owns the chat format, the window of turns and the token budget. Sampled ids are kept as they are; only
text of the environment is encoded, once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, cast

import numpy as np
from annotated_types import Ge

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, Note, TurnTemplate
from ragen_pl.chat_formats.chat_template import ChatTemplate
from ragen_pl.chat_formats.messages import History, Message
from ragen_pl.engines.protocol import Prompt
from ragen_pl.prompts.conversation import (
    Conversation,
    Exchange,
    Tools,
    check_template,
    fill_template,
    system_text,
)
from ragen_pl.prompts.encoding import TextEncoder, any_of, common_length
from ragen_pl.prompts.leave_out import LeaveOut
from ragen_pl.prompts.rules import ContextRules, cut_problem
from ragen_pl.trajectory import ChatRequest, Observation, Role

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle
    from ragen_pl.prompts.compaction import Compaction
    from ragen_pl.prompts.native import NativeFormat
    from ragen_pl.prompts.requests import RequestPrompts


class ContextManager(ContextRules):
    """Turn observations and responses into prompts.

    Args:
        bundle: Tokenizer and processor of the model.
        window: `"all"` for the whole history, or the number of latest turns shown, the present one
            included (1: one turn a sample).
        system_prompt: `"instructions"` for the environment's own rules, another text, or None for the
            chat template's default.
        turn_template: Text of the user's block, with the fields {observation}, {turn}, {max_turns},
            {turns_left}, {actions} (all carried out in the episode) and {last_action}.
        max_tokens: Longest prompt plus response; a longer conversation is truncated.
        leave_out: Fractions of a prompt left out before a response is sampled; None for nothing.
        template_kwargs: Values of the chat template's own variables, such as `enable_thinking`; None for its
            defaults.
        keep_thoughts: Whether think blocks stay in the history where the chat template strips them. An
            episode is then one sample, and its prompts differ from the template's by these blocks.
        compaction: Summary that replaces the history before it fills `max_tokens`; None where an episode ends there.

    Attributes:
        records_roles: Whether prompts say which of their tokens are text of the environment.
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
        compaction: Compaction | Mapping[str, int | str] | None = None,
    ) -> None:
        check_template(turn_template, key="context.turn_template")
        self.bundle = bundle
        self.window = window
        self.system_prompt = system_prompt
        self.turn_template = turn_template
        self.max_tokens = max_tokens
        self.keep_thoughts = keep_thoughts
        self._arguments = template_kwargs
        self.template = bundle.chat_template(template_kwargs)
        self._native_formats: dict[int, NativeFormat] = {}
        self.leave_out = LeaveOut(**leave_out) if isinstance(leave_out, Mapping) else leave_out
        if isinstance(compaction, Mapping):
            # of runs with summaries only
            from ragen_pl.prompts.compaction import Compaction

            compaction = Compaction(**compaction)  # type: ignore[arg-type]
        self.compaction = compaction
        if self.compaction is not None and (window != "all" or self.leave_out):
            raise ValueError(cut_problem(window))
        self.records_roles = False
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
        self._encoder = TextEncoder(bundle, max_tokens, bos_token_id=self.template.bos_token_id)
        self._template_kwargs = template_kwargs
        self._ends = frozenset(bundle.eos_token_ids)
        self._inner = any_of(self.template.inner)
        # the end-of-turn token with what the template writes before it, and the text after it
        end = self._encoder.end
        before, found, after = self.template.response_suffix.partition(end)
        self._ending, self._after_end = (before + found, after) if found else (end, before)

    def record_roles(self) -> None:
        """Let prompts say which of their tokens are text of the environment; see `Turn.prompt_roles`.

        Raises:
            ValueError: The chat template renders its history as a whole, where roles can't be assigned.
        """
        if not self.joins:
            raise ValueError(
                "algorithm.loss.echo: this chat template rewrites its history, which does not tell text of the "
                f"environment from its own; set algorithm.loss.echo=null{self._or_keep_thoughts()}"
            )
        self.records_roles = True

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
    def generation_prefix(self) -> str:
        """Think tag at the end of a prompt, with which every response begins; empty in most templates."""
        return self.template.opening

    def start(self, instructions: str, *, tools: Tools | None = None) -> Conversation:
        """Open a conversation in an environment with these instructions.

        Args:
            instructions: Rules of the environment.
            tools: Schemas of its tools, empty without any, for a conversation in the model's own format; None for
                responses in tags.

        Raises:
            ValueError: The chat template has no place for the system prompt or for the tools.
        """
        system = system_text(self.system_prompt, instructions)
        native = None if tools is None else self._native_format(tools)
        template = self.template if native is None else native.template
        if not template.is_static:
            template.system_messages(system)
            return Conversation(system=system, native=native)
        head = template.head(system)
        return Conversation(
            system=system, head=head, system_prompt_ids=self._encoder.encode(head), native=native
        )

    def _native_format(self, tools: Tools) -> NativeFormat:
        # of conversations in the model's own format only
        from ragen_pl.prompts.native import NativeFormat

        template = self.bundle.chat_template(self._arguments, tools)
        if id(template) not in self._native_formats:
            if mark := self._encoder.mark_in(json.dumps(tools)):
                raise ValueError(
                    f"env.prompt_format=native: the schemas of the environment's tools hold {mark}, a mark of the chat "
                    "template; write it in another way"
                )
            native = NativeFormat(template, self.bundle.end_texts, is_rendered=not self.joins)
            self._native_formats[id(template)] = native
        return self._native_formats[id(template)]

    def observe(
        self, conversation: Conversation, observation: Observation, *, max_turns: int
    ) -> Prompt:
        """Add an observation and return the prompt of the response to it."""
        text = fill_template(self.turn_template, conversation, observation, max_turns=max_turns)
        exchange = Exchange.of(observation, self._encoder.bounded(text))
        exchange.results = [*map(self._encoder.bounded, exchange.results)]
        conversation.exchanges.append(exchange)
        return self.prompt(conversation)

    @cached_property
    def _requests(self) -> RequestPrompts:
        # of agent programs only
        from ragen_pl.prompts.requests import RequestPrompts

        return RequestPrompts(
            self.bundle, self._encoder, self._template_kwargs, max_tokens=self.max_tokens
        )

    def observe_request(
        self, conversation: Conversation, request: ChatRequest, images: Sequence[np.ndarray]
    ) -> Prompt:
        """Add a program's request and return the prompt of the response to it.

        Raises:
            RequestRefusedError: The chat template cannot show it.
        """
        return self._requests.observe(conversation, request, images)

    def prompt(self, conversation: Conversation, *, left_out: Collection[int] = ()) -> Prompt:
        """Return the prompt of the response to a conversation's latest exchange.

        Args:
            conversation: The conversation.
            left_out: Turns that are not shown, as indices in the window.
        """
        window = self._window(conversation)
        shown = [exchange for number, exchange in enumerate(window) if number not in left_out]
        images = [image for exchange in shown for image in exchange.images]
        if self.bundle.images is not None:
            self.bundle.images.check_together(images)
        if not self.joins:
            # of templates that are rendered as a whole only
            from ragen_pl.prompts.rendering import window_messages

            messages = window_messages(
                self._template(conversation),
                conversation,
                shown,
                plain=self._encoder.strip_control_tokens,
                words_start=self.words_start,
            )
            text = self._template(conversation).render(messages)
            return Prompt(
                ids=self._encoder.encode(self.bundle.expand_image_slots(text, images)),
                unexpanded_ids=self._encoder.encode(text),
                images=images,
            )
        first = len(conversation.exchanges) - len(window)
        ids, _, roles = self._joined(conversation, shown)
        unexpanded_ids = self._joined(conversation, shown, expand=False)[0] if images else ids
        return Prompt(
            ids=ids,
            unexpanded_ids=unexpanded_ids,
            images=images,
            patches=self._patches(shown),
            left_out=tuple(first + number for number in sorted(left_out)),
            roles=roles,
        )

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text within a prompt."""
        return len(self._encoder.encode(text, continues=True))

    def candidates(self, conversation: Conversation) -> list[np.ndarray]:
        """Return the parts of the present prompt that may be left out: positions of old turns, then of patches."""
        assert self.leave_out is not None
        ids, starts, _ = self._joined(conversation, self._window(conversation))
        positions = np.split(np.arange(len(ids)), starts)[1:]
        old = positions[:-1] if self.leave_out.dropped_turns([0.0] * (len(positions) - 1)) else []
        if not self.leave_out.patches:
            return old
        slots = ids[positions[-1]] == self.bundle.image_token_id
        return [*old, *positions[-1][slots][:, None]]

    def narrow(self, conversation: Conversation, scores: np.ndarray) -> Prompt:
        """Return the present prompt without the parts that score lowest; see `LeaveOut`.

        Args:
            conversation: A conversation after `observe`.
            scores: `[candidates]`, one for each candidate, in order.
        """
        assert self.leave_out is not None
        present, old = conversation.exchanges[-1], len(self._window(conversation)) - 1
        num_turns = old if self.leave_out.dropped_turns([0.0] * old) else 0
        if self.leave_out.patches and present.images:
            ids, starts, _ = self._joined(conversation, self._window(conversation))
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
        return self.prompt(conversation, left_out=left_out)

    def words_start(self, text: str) -> int:
        """Return the index at which the words of a response begin: after the last control token before an answer."""
        return max((found.end() for found in self._inner.finditer(text)), default=0)

    def encode_response(self, text: str) -> np.ndarray:
        """Return the ids of a written response as the policy would sample it, its end-of-turn token included."""
        opening = self.template.opening.strip()
        text = self.template.response_prefix + (text.removeprefix(opening) if opening else text)
        return self._encoder.encode_parts(
            [(self.template.header, True), (text, False), (self._ending, True)], continues=True
        )

    def pieces(self, ids: np.ndarray) -> list[str]:
        """Return the text of each token of a response; the pieces join to the response's text.

        A character of several tokens belongs to the last of them.
        """
        return self._encoder.pieces(ids)

    def _window(self, conversation: Conversation) -> list[Exchange]:
        """Return the turns in the window."""
        return conversation.latest(self.window)

    def _joined(
        self, conversation: Conversation, shown: Sequence[Exchange], *, expand: bool = True
    ) -> tuple[np.ndarray, list[int], np.ndarray | None]:
        """Return the ids of turns one after the other, the position at which each turn starts, and the last roles.

        The positions are left out where `leave_out` needs none.
        A turn is encoded together with the template's text before it, because a token may reach over the border.
        """
        parts: list[np.ndarray] = []
        starts, length, roles = [], 0, None
        before = conversation.head
        calls: Sequence[Message] = ()
        for exchange in shown:
            first = not parts
            native = _native(conversation)
            if calls and native is not None:
                end = int(parts[-1][-1])
                texts = self._results(native, exchange, calls, end=end, expand=expand)
                role, marks = Role.RESULT, True
                ids = self._encoder.encode_parts(texts, continues=True, marks=marks)
                starts.append(length)
            else:
                texts = self._texts(conversation, exchange, before, first=first, expand=expand)
                role, marks = Role.OBSERVATION, native is not None
                ids = self._encoder.encode_parts(texts, continues=not first, marks=marks)
                if expand:
                    ids = self._with_patches(ids, exchange)
                # for what may be left out
                if self.leave_out:
                    previous = self._encoder.encode(before, continues=not first)
                    starts.append(length + common_length(previous, ids))
            if self.records_roles and expand and exchange is shown[-1]:
                own = self._encoder.own_text(texts, continues=not first, marks=marks)
                roles = np.where(own[-len(ids) :], role, Role.TEMPLATE).astype(np.int8)
                if not first:
                    roles = np.append(np.int8(Role.EARLIER), roles)
            parts.append(ids)
            response_ids = exchange.response_ids
            if response_ids is not None:
                parts.append(response_ids)
                ended = len(response_ids) and int(response_ids[-1]) in self._ends
                before = self._after_end if ended else self.template.response_suffix
            calls = exchange.calls
            length = sum(map(len, parts))
        return np.concatenate(parts), starts, roles

    def _texts(
        self,
        conversation: Conversation,
        exchange: Exchange,
        before: str,
        *,
        first: bool,
        expand: bool,
    ) -> list[tuple[str, bool]]:
        """Return the texts of a turn up to its response, with the template's text before it; see `encode_parts`."""
        count = len(exchange.images)
        template = self._template(conversation)
        user_text = template.user_text(count)
        start = user_text.before
        if first:
            start = template.before_first(conversation.system, images=count)
        if expand:
            start = self.bundle.expand_image_slots(start, exchange.images)
        text = [(user_text.shown(exchange.text), False), (user_text.after, True)]
        return [(before + start, True), *text]

    def _with_patches(self, ids: np.ndarray, exchange: Exchange) -> np.ndarray:
        """Return the ids of a turn with the image slots of the patches that are shown."""
        if exchange.patches is None:
            return ids
        slots = np.flatnonzero(ids == self.bundle.image_token_id)
        shown, end = [], 0
        for image, patches in zip(exchange.images, exchange.patches, strict=True):
            shown.append(slots[end + patches])
            end += self.bundle.num_image_tokens(image)
        return np.delete(ids, np.setdiff1d(slots, np.concatenate(shown)))

    def _results(
        self,
        native: NativeFormat,
        exchange: Exchange,
        calls: Sequence[Message],
        *,
        end: int,
        expand: bool,
    ) -> list[tuple[str, bool]]:
        """Return the texts of the results of a response's calls, from the end of the response to the next one.

        The response has ended, with the token `end`: one that was cut has no calls.
        """
        assert native.tools is not None
        text = native.tools.results(exchange.result_images)
        names = [call["function"]["name"] for call in calls]
        parts = text.filled(names, exchange.results)
        # a template may have another end after calls than after words, Gemma's <|tool_response>
        if self.bundle.piece(end) != text.end:
            parts[0] = (text.end + parts[0][0], True)
        if expand and exchange.images:
            border = "\0"
            own = border.join(part if fixed else "" for part, fixed in parts)
            expanded = self.bundle.expand_image_slots(own, exchange.images).split(border)
            parts = [
                (new if fixed else part, fixed)
                for new, (part, fixed) in zip(expanded, parts, strict=True)
            ]
        return parts

    def _template(self, conversation: Conversation) -> ChatTemplate:
        native = _native(conversation)
        return self.template if native is None else native.template

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


def _native(conversation: Conversation) -> NativeFormat | None:
    """Return the model's own format in which a conversation is held, the only one that a `ContextManager` begins."""
    return cast("NativeFormat | None", conversation.native)
