"""Conversations of episodes, the protocol of a context, and a context that needs no model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

from ragen_pl.engines.protocol import Prompt
from ragen_pl.trajectory import ChatRequest, Observation

if TYPE_CHECKING:
    from ragen_pl.prompts.compaction import Compaction
    from ragen_pl.prompts.histories import RecordedCall
    from ragen_pl.prompts.message_format import MessageFormat

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Schemas of tools in the format of OpenAI's API."""

NO_IDS = np.zeros(0, dtype=np.int64)
TEMPLATE_FIELDS = ("observation", "turn", "max_turns", "turns_left", "actions", "last_action")


@dataclass(kw_only=True, slots=True)
class Exchange:
    """Observation and response of one turn.

    Attributes:
        text: Text of the user's block.
        images: Images of the user's block.
        response_ids: Ids of the response; None before there is one.
        response_text: The response in words.
        patches: Patches shown of each image; None for all.
        results: Results of the response's tool calls before it, which are shown in place of the text.
        calls: Tool calls of the response.
        result_images: Number of images of each result.
    """

    text: str
    images: list[np.ndarray]
    response_ids: np.ndarray | None = None
    response_text: str = ""
    patches: list[np.ndarray] | None = None
    results: Sequence[str] = ()
    calls: Sequence[dict[str, Any]] = ()
    result_images: Sequence[int] = ()

    @classmethod
    def of(cls, observation: Observation, text: str) -> Exchange:
        """Return the exchange of an observation, whose text in the prompt is `text`."""
        return cls(
            text=text,
            images=observation.images,
            results=observation.results,
            result_images=observation.result_images,
        )


@dataclass(kw_only=True, slots=True)
class Conversation:
    """Context of one episode so far.

    Attributes:
        system: Text of the system prompt.
        head: The system prompt as the chat template writes it, with which each prompt begins.
        system_prompt_ids: Ids of the head.
        actions: Names of all actions carried out.
        exchanges: The turns.
        native: The model's own format, in which the conversation is held; None for tags.
        calls: A program's requests with their responses.
        history: How the present request became a prompt, see `ProgramCall`; None in other environments.
        task: The first exchange of the episode, where a summary has replaced it.
        replaced: Number of exchanges that summaries have replaced.
        summaries: Number of summaries.
        prompt_lengths: Lengths of its prompts since the last one, where summaries are asked for.
        pending: Latest exchange while a summary is asked for.
        answered_calls: Tool calls whose results it has.
    """

    system: str | None
    head: str = ""
    system_prompt_ids: np.ndarray = field(default_factory=lambda: NO_IDS)
    actions: list[str] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    native: MessageFormat | None = None
    calls: list[RecordedCall] = field(default_factory=list)
    history: str | None = None
    task: Exchange | None = None
    replaced: int = 0
    summaries: int = 0
    prompt_lengths: list[int] = field(default_factory=list)
    pending: Exchange | None = None
    answered_calls: Sequence[dict[str, Any]] = ()

    @property
    def observation(self) -> Observation:
        """The latest observation as the prompt shows it."""
        latest = self.exchanges[-1]
        return Observation(
            text=latest.text,
            images=latest.images,
            results=[*latest.results],
            result_images=[*latest.result_images],
        )

    def latest(self, window: int | Literal["all"]) -> list[Exchange]:
        """Return the latest turns, the present one included."""
        return self.exchanges if window == "all" else self.exchanges[-window:]

    def respond(
        self,
        *,
        ids: np.ndarray,
        text: str,
        actions: Sequence[str],
        calls: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Record the response to the latest observation, its tool calls and the actions carried out."""
        exchange = self.exchanges[-1]
        exchange.response_ids, exchange.response_text, exchange.calls = ids, text, calls
        self.actions.extend(actions)


def system_text(system_prompt: str | None, instructions: str) -> str | None:
    """Return the system prompt: an environment's instructions for `"instructions"`, else the text itself."""
    return instructions if system_prompt == "instructions" else system_prompt


def check_template(turn_template: str, *, key: str) -> None:
    """Check the fields of a template of the user's block.

    Args:
        turn_template: The template.
        key: Setting that holds it, for the error.

    Raises:
        ValueError: It has a field that is not known.
    """
    fields = {name for _, name, _, _ in Formatter().parse(turn_template) if name is not None}
    if unknown := fields - set(TEMPLATE_FIELDS):
        raise ValueError(
            f"{key} uses unknown fields {sorted(unknown)}; known: {', '.join(TEMPLATE_FIELDS)}"
        )


def fill_template(
    turn_template: str, conversation: Conversation, observation: Observation, *, max_turns: int
) -> str:
    """Return the text of the user's block of the next turn.

    Args:
        turn_template: Text with fields of `TEMPLATE_FIELDS`.
        conversation: Turns so far.
        observation: Observation of the next turn.
        max_turns: Largest number of turns.
    """
    turn = conversation.replaced + len(conversation.exchanges) + 1
    return turn_template.format(
        observation=observation.text,
        turn=turn,
        max_turns=max_turns,
        turns_left=max_turns - turn + 1,
        actions=" ".join(conversation.actions) or "none",
        last_action=conversation.actions[-1] if conversation.actions else "none",
    )


class Context(Protocol):
    """Context, as the turn loop uses it."""

    @property
    def max_tokens(self) -> int:
        """Longest prompt plus response."""
        ...

    @property
    def generation_prefix(self) -> str:
        """Text at the end of a prompt with which every response begins, such as a think tag."""
        ...

    @property
    def compaction(self) -> Compaction | None:
        """Settings of summaries that replace a history; None where none does."""
        ...

    def start(self, instructions: str, *, tools: Tools | None = None) -> Conversation:
        """Open a conversation in an environment with these instructions.

        Args:
            instructions: Rules of the environment.
            tools: Schemas of its tools, empty without any, for a conversation in the model's own format; None for
                responses in tags.
        """
        ...

    def observe(
        self, conversation: Conversation, observation: Observation, *, max_turns: int
    ) -> Prompt:
        """Add an observation and return the prompt of the response to it."""
        ...

    def observe_request(
        self, conversation: Conversation, request: ChatRequest, images: Sequence[np.ndarray]
    ) -> Prompt:
        """Add a program's request, with its images in order, and return the prompt of the response to it.

        Raises:
            RequestRefusedError: It cannot be shown.
        """
        ...

    def prompt(self, conversation: Conversation) -> Prompt:
        """Return the prompt of the response to a conversation's latest exchange."""
        ...

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text within a prompt."""
        ...

    def words_start(self, text: str) -> int:
        """Return the index at which the words of a response begin, behind control tokens of the policy."""
        ...

    def encode_response(self, text: str) -> np.ndarray:
        """Return the ids of a written response, its end-of-turn token included."""
        ...

    def pieces(self, ids: np.ndarray) -> list[str]:
        """Return the text of each token of a response; the pieces join to the response's text."""
        ...


class TextContext:
    """Context without a tokenizer, for responders that are no model.

    Prompts have no ids. A token of a response is a character, its end-of-turn token is 0.
    """

    max_tokens = sys.maxsize
    generation_prefix = ""
    compaction: Compaction | None = None

    def start(self, instructions: str, *, tools: Tools | None = None) -> Conversation:
        """Open a conversation."""
        native = None if tools is None else _api_format(tools)
        return Conversation(system=instructions, native=native)

    def observe(
        self, conversation: Conversation, observation: Observation, *, max_turns: int
    ) -> Prompt:
        """Add an observation and return a prompt of its images."""
        conversation.exchanges.append(Exchange.of(observation, observation.text))
        return self.prompt(conversation)

    def observe_request(
        self, conversation: Conversation, request: ChatRequest, images: Sequence[np.ndarray]
    ) -> Prompt:
        """Add a program's request and return a prompt of its images."""
        conversation.native = _api_format(request.tools)
        conversation.exchanges.append(Exchange(text="", images=[*images]))
        return self.prompt(conversation)

    def prompt(self, conversation: Conversation) -> Prompt:
        """Return a prompt of the latest images."""
        images = conversation.exchanges[-1].images
        return Prompt(ids=NO_IDS, unexpanded_ids=NO_IDS, images=images)

    def count_tokens(self, text: str) -> int:
        """Return the number of characters."""
        return len(text)

    def words_start(self, text: str) -> int:
        """Return 0: nothing stands before the words."""
        return 0

    def encode_response(self, text: str) -> np.ndarray:
        """Return the code points of a text, and 0."""
        return np.array([*map(ord, text), 0], dtype=np.int64)

    def pieces(self, ids: np.ndarray) -> list[str]:
        """Return the characters, and an empty text for the end-of-turn token."""
        return [chr(character) if character else "" for character in ids.tolist()]


def _api_format(tools: Tools) -> MessageFormat:
    from ragen_pl.prompts.message_format import ApiFormat

    return ApiFormat(tools)
