"""Models behind an OpenAI-compatible chat API, for evaluation and play.

An endpoint takes messages and returns text. It tells neither the ids of its prompt nor log-probs of the distribution
that it sampled from, so nothing is trained on its responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Note,
    Open,
    Positive,
    TurnTemplate,
)
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import Generation, Prompt
from ragen_pl.engines.request_thread import RequestThread
from ragen_pl.models.truncation import Truncation
from ragen_pl.prompts.conversation import (
    Conversation,
    TextContext,
    Tools,
    check_template,
    fill_template,
    system_text,
)
from ragen_pl.rollout.chat_answers import Answer, AnswerFile, Usage
from ragen_pl.rollout.chat_client import ChatClient, Effect, RequestError
from ragen_pl.rollout.chat_messages import Message, tools_of
from ragen_pl.rollout.responders import Response
from ragen_pl.rollout.turns import Episode
from ragen_pl.trajectory import Observation

# failed requests that never end an evaluation
_FEW = 3


class ChatContext(TextContext):
    """Context of an endpoint: the messages of the turns in a window.

    Args:
        window: `"all"` for the whole history, or the number of latest turns shown.
        system_prompt: `"instructions"` for the environment's own rules, another text, or None.
        turn_template: As in `ContextManager`.
    """

    @checked
    def __init__(
        self,
        *,
        window: Literal["all"] | Annotated[int, Ge(1), Note("the latest turns shown")] = "all",
        system_prompt: str | None = "instructions",
        turn_template: TurnTemplate = "{observation}",
    ) -> None:
        check_template(turn_template, key="endpoint.turn_template")
        self.window, self.system_prompt, self.turn_template = window, system_prompt, turn_template

    def start(self, instructions: str, *, tools: Tools | None = None) -> Conversation:
        """Open a conversation in an environment with these instructions and tools."""
        system = system_text(self.system_prompt, instructions)
        return super().start(system or "", tools=tools)

    def observe(
        self, conversation: Conversation, observation: Observation, *, max_turns: int
    ) -> Prompt:
        """Add an observation and return a prompt of its images."""
        text = fill_template(self.turn_template, conversation, observation, max_turns=max_turns)
        filled = replace(observation, text=text)
        return super().observe(conversation, filled, max_turns=max_turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A request that no attempt brought an answer to.

    Attributes:
        reason: Why, in one line, without the key.
        ends_all: Whether every other request would fail too.
    """

    reason: str
    ends_all: bool


class ChatEndpoint:
    """A model behind an OpenAI-compatible chat API.

    Requests are sent from a thread of their own, `concurrency` at a time. One that fails costs its own episode. More
    than `max_failed` of them end the evaluation, as does what every request would meet: a refused key, no credit left.

    Args:
        model: Name of the model.
        base_url: Address of the API, such as `http://localhost:8000/v1`; None for OpenAI's own.
        api_key_variable: Environment variable that holds the key. It may be unset with a `base_url`.
        answers: File of the answers so far. A request whose answer is there is not sent. None for no file.
        max_tokens: Longest response, with the reasoning of a model that hides it.
        window: As in `ChatContext`.
        system_prompt: As in `ChatContext`.
        turn_template: As in `ChatContext`.
        parameters: Further fields of a request, such as `{"reasoning_effort": "low"}`; None leaves a field out.
        concurrency: Requests under way at once.
        timeout_s: Longest time of an attempt, from the connection to the end of the answer, in seconds.
        max_retries: Attempts after the first, with growing pauses.
        max_failed: Largest fraction of the requests that may fail; up to three may in any case.
        input_price: USD for a million prompt tokens.
        output_price: USD for a million completion tokens.

    Raises:
        ValueError: The environment variable of the key is not set, or the address holds a password.
    """

    needs_trust = ("*",)

    @checked
    def __init__(
        self,
        *,
        model: str,
        base_url: str | None = None,
        api_key_variable: str = "OPENAI_API_KEY",
        answers: str | None = None,
        max_tokens: Count = 1024,
        window: Literal["all"] | Annotated[int, Ge(1), Note("the latest turns shown")] = "all",
        system_prompt: str | None = "instructions",
        turn_template: TurnTemplate = "{observation}",
        parameters: Annotated[dict[str, Any], Open()] | None = None,
        concurrency: Count = 16,
        timeout_s: Positive = 120.0,
        max_retries: CountOrZero = 8,
        max_failed: Fraction = 0.1,
        input_price: NonNegative | None = None,
        output_price: NonNegative | None = None,
    ) -> None:
        self.model, self.max_tokens, self.max_failed = model, max_tokens, max_failed
        self.context = ChatContext(
            window=window, system_prompt=system_prompt, turn_template=turn_template
        )
        self.usage = Usage(prices=(input_price, output_price))
        self._base_url, self._parameters = base_url, dict(parameters or {})
        self._client = ChatClient(
            base_url=base_url,
            key_variable=api_key_variable,
            timeout_s=timeout_s,
            max_retries=max_retries,
            usage=self.usage,
        )
        self._answers = AnswerFile(Path(answers).expanduser() if answers else None)
        # numbers of the requests that wait for the answer of a key; those of known answers
        self._waiting: dict[str, list[int]] = {}
        self._known: list[tuple[int, Answer]] = []
        self._thread: RequestThread[str, Answer | Failure] = RequestThread(concurrency)

    def submit(
        self,
        number: int,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
        temperature: float,
        seed: int,
        truncation: Truncation | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        """Ask for a response to messages.

        Args:
            number: Number by which `collect` returns the answer.
            messages: The conversation, which ends with a message of the user or a tool.
            tools: Schemas of the tools.
            temperature: Sampling temperature; 0 is greedy where the endpoint allows it.
            seed: Seed of the response, for endpoints that take one.
            truncation: Tokens that sampling keeps; None for all. OpenAI's API takes `top_p` alone, others all three.
            limits: Limits of the response that a program asks for, see `PresentTurn.limits`.
        """
        request = {
            "model": self.model,
            "messages": list(messages),
            "temperature": temperature,
            "seed": seed % 2**31,
            **(limits or {}),
        }
        longest = request.get("max_completion_tokens")
        request["max_completion_tokens"] = min(longest or self.max_tokens, self.max_tokens)
        if tools:
            request["tools"] = [*tools]
        if truncation is not None:
            request |= truncation.limits()
        request |= self._parameters
        request = {name: value for name, value in request.items() if value is not None}
        # with the seed, where the endpoint takes none too: samples of a request are answers of their own
        key = AnswerFile.key(request | {"base_url": self._base_url, "seed": seed % 2**31})
        answer = self._answers.get(key)
        if answer is not None:
            self.usage.answered(answer, known=True)
            self._known.append((number, answer))
        elif key in self._waiting:
            self._waiting[key].append(number)
        else:
            self._waiting[key] = [number]
            self._thread.submit(key, partial(self._ask, request, key=key))

    def collect(self, *, wait: bool = True) -> list[tuple[int, Answer | Failure]]:
        """Return the answers and failures since the last call, each with its request's number.

        Args:
            wait: Wait for at least one.

        Raises:
            RolloutError: Too many requests failed, or all would.
        """
        collected: list[tuple[int, Answer | Failure]] = list(self._known)
        self._known.clear()
        for key, found in self._thread.collect(wait=wait and not collected):
            result = self._failure(found) if isinstance(found, Exception) else found
            numbers = self._waiting.pop(key)
            collected += [(number, result) for number in numbers]
            for again, _ in enumerate(numbers):
                self._count(result, known=again > 0)
        return collected

    def _count(self, result: Answer | Failure, *, known: bool) -> None:
        usage = self.usage
        if isinstance(result, Answer):
            usage.answered(result, known=known)
            return
        usage.failed += 1
        total = usage.requests + usage.known + usage.failed
        if not result.ends_all and usage.failed <= max(_FEW, self.max_failed * total):
            return
        self.release()
        place = f"endpoint.model={self.model} at {self._client.address}"
        many = "" if result.ends_all else f"{usage.failed} of {total} requests failed, the last: "
        kept = (
            ""
            if self._answers.path is None
            else f"; the same command goes on with the answers in {self._answers.path}"
        )
        raise RolloutError(f"{place}: {many}{result.reason}{kept}")

    def release(self) -> None:
        """Cancel the requests under way and drop the answers that were not collected."""
        self._thread.cancel()
        self._waiting.clear()
        self._known.clear()

    def close(self) -> None:
        """End the thread. The endpoint is not used again."""
        self.release()
        self._thread.call(self._client.close())
        self._thread.close()

    async def _ask(self, request: dict[str, Any], *, key: str) -> Answer | Failure:
        try:
            answer = await self._client.ask(request, number=key)
        except RequestError as error:
            return Failure(reason=str(error), ends_all=error.effect is Effect.ALL)
        self._answers.add(key, answer)
        return answer

    def _failure(self, error: Exception) -> Failure:
        """Return the failure of a request by another error, such as a full disk."""
        reason = self._client.line(f"{type(error).__name__}: {error}")
        return Failure(reason=reason, ends_all=True)


@dataclass(kw_only=True, slots=True)
class EndpointResponder:
    """A chat endpoint as the policy.

    Attributes:
        endpoint: Answers the messages.
        greedy: Ask for temperature 0.
    """

    endpoint: ChatEndpoint
    greedy: bool = False
    _episodes: dict[int, Episode] = field(init=False, default_factory=dict)

    @property
    def samples(self) -> bool:
        """Whether responses are sampled."""
        return not self.greedy

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Ask for a response to the present turn of each episode."""
        for episode in episodes:
            self._episodes[episode.number] = episode
            self.endpoint.submit(
                episode.number,
                episode.turn.messages(episode, window=self.endpoint.context.window),
                tools=tools_of(episode.conversation),
                temperature=0.0 if self.greedy else episode.temperature,
                seed=episode.seed,
                truncation=None if self.greedy else episode.truncation,
                limits=episode.turn.limits(),
            )

    @property
    def continuous(self) -> bool:
        """Each request is answered by itself."""
        return True

    def collect(self, *, wait: bool = True) -> list[tuple[int, Response]]:
        """Return the responses since the last call. An episode whose request failed has failed.

        Raises:
            RolloutError: Too many requests failed, or all would.
        """
        return [
            (number, self._response(self._episodes.pop(number), result))
            for number, result in self.endpoint.collect(wait=wait)
        ]

    def _response(self, episode: Episode, result: Answer | Failure) -> Response:
        if isinstance(result, Answer):
            return self._generation(result)
        episode.trajectory.error = f"endpoint: {result.reason}"
        return None

    def release(self) -> None:
        """Cancel the requests under way."""
        self._episodes.clear()
        self.endpoint.release()

    def collective_rollout(self) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    def _generation(self, answer: Answer) -> Generation:
        """Return an answer as the characters of its text; one cut off by its length limit has no end."""
        is_cut = answer.finish_reason == "length"
        ids = self.endpoint.context.encode_response(answer.text)
        ids = ids[:-1] if is_cut else ids
        return Generation(
            ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            entropy=None,
            hit_length_limit=is_cut,
            version=0,
        )
