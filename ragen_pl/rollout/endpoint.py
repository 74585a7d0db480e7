"""Models behind an OpenAI-compatible chat API, for evaluation and play.

An endpoint takes messages and returns text. It tells neither the ids of its prompt nor log-probs of the distribution
that it sampled from, so nothing is trained on its responses.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import logging
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from PIL import Image

from ragen_pl.constraints import (
    Count,
    CountOrZero,
    NonNegative,
    Note,
    Open,
    Positive,
    TurnTemplate,
    checked,
)
from ragen_pl.rollout.conversation import (
    Conversation,
    Exchange,
    TextContext,
    check_template,
    fill_template,
    system_text,
)
from ragen_pl.rollout.engine import Generation, Prompt
from ragen_pl.rollout.errors import RolloutError
from ragen_pl.rollout.responders import Episode, Response
from ragen_pl.trajectory import Observation

Message = dict[str, Any]
_MILLION = 1_000_000


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

    def start(self, instructions: str) -> Conversation:
        """Open a conversation in an environment with these instructions."""
        return Conversation(system=system_text(self.system_prompt, instructions))

    def observe(
        self, conversation: Conversation, observation: Observation, *, max_turns: int
    ) -> Prompt:
        """Add an observation and return a prompt of its images."""
        text = fill_template(self.turn_template, conversation, observation, max_turns=max_turns)
        filled = Observation(text=text, images=observation.images)
        return super().observe(conversation, filled, max_turns=max_turns)

    def response(
        self, conversation: Conversation, *, ids: np.ndarray, text: str, actions: Sequence[str]
    ) -> None:
        """Record the response to the latest observation and the actions carried out."""
        conversation.respond(ids=ids, text=text, actions=actions)

    def messages(self, conversation: Conversation) -> list[Message]:
        """Return the messages up to the latest observation."""
        messages: list[Message] = []
        if conversation.system:
            messages.append({"role": "system", "content": conversation.system})
        for exchange in conversation.latest(self.window):
            messages.append({"role": "user", "content": _content(exchange)})
            if exchange.response_ids is not None:
                messages.append({"role": "assistant", "content": exchange.response_text})
        return messages


def _content(exchange: Exchange) -> str | list[Message]:
    if not exchange.images:
        return exchange.text
    urls = [{"url": data_url(image)} for image in exchange.images]
    images: list[Message] = [{"type": "image_url", "image_url": url} for url in urls]
    return [*images, {"type": "text", "text": exchange.text}]


def data_url(image: np.ndarray) -> str:
    """Return an image, uint8 `[height, width, 3]`, as the URL of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An endpoint's answer to a request."""

    text: str
    finish_reason: str | None
    """Why the response ended; `length` for its length limit."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(kw_only=True, slots=True)
class Usage:
    """What an evaluation has used of an endpoint."""

    requests: int = 0
    known: int = 0
    """Requests whose answer was in the file of answers."""
    prompt_tokens: int = 0
    """Of requests that were sent, as `completion_tokens`."""
    completion_tokens: int = 0
    cost: float | None = None
    """USD; None without prices."""

    def __str__(self) -> str:
        cost = "" if self.cost is None else f", {self.cost:.4f} USD"
        known = f" and {self.known} known answers" if self.known else ""
        return (
            f"{self.requests} requests{known}, {self.prompt_tokens:,} prompt and "
            f"{self.completion_tokens:,} completion tokens{cost}"
        )


class AnswerFile:
    """Answers by request, in a file of one JSON line each, so that nothing is asked twice.

    Args:
        path: File; None for none.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._answers: dict[str, Answer] = {}
        if path is None or not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that an interrupted run was writing
            key = record.pop("request")
            self._answers[key] = Answer(**record)

    @staticmethod
    def key(request: Mapping[str, Any]) -> str:
        """Return the digest of a request."""
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> Answer | None:
        """Return the answer to a request."""
        return self._answers.get(key)

    def add(self, key: str, answer: Answer) -> None:
        """Append an answer."""
        self._answers[key] = answer
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"request": key, **asdict(answer)}, ensure_ascii=False)
        with self.path.open("a", encoding="utf-8") as file:
            if file.tell() and not _ends_a_line(self.path):
                file.write("\n")
            file.write(line + "\n")


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


class ChatEndpoint:
    """A model behind an OpenAI-compatible chat API.

    Requests are sent from a thread of their own, `concurrency` at a time.

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
        timeout_s: Longest wait for an answer, in seconds.
        max_retries: Attempts after the first, with growing pauses.
        input_price: USD for a million prompt tokens.
        output_price: USD for a million completion tokens.

    Raises:
        ModuleNotFoundError: The package openai is not installed.
        ValueError: The environment variable of the key is not set.
    """

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
        input_price: NonNegative | None = None,
        output_price: NonNegative | None = None,
    ) -> None:
        self._key = key_of(api_key_variable, base_url=base_url)
        try:
            from openai import AsyncOpenAI
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(MISSING) from error
        for client in ("httpx", "httpx2"):  # they log each request
            logging.getLogger(client).setLevel(logging.WARNING)
        self.model, self.max_tokens = model, max_tokens
        self.context = ChatContext(
            window=window, system_prompt=system_prompt, turn_template=turn_template
        )
        self.usage = Usage()
        self._variable, self._base_url = api_key_variable, base_url
        self._parameters = dict(parameters or {})
        self._prices = (input_price, output_price)
        self._answers = AnswerFile(Path(answers).expanduser() if answers else None)
        self._client = AsyncOpenAI(
            api_key=self._key, base_url=base_url, timeout=timeout_s, max_retries=max_retries
        )
        self._free = asyncio.Semaphore(concurrency)
        self._finished: queue.SimpleQueue[tuple[int, Answer | Exception]] = queue.SimpleQueue()
        self._under_way: dict[int, Future[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def submit(
        self, number: int, messages: Sequence[Message], *, temperature: float, seed: int
    ) -> None:
        """Ask for a response to messages.

        Args:
            number: Number by which `collect` returns the answer.
            messages: The conversation, which ends with a user's message.
            temperature: Sampling temperature; 0 is greedy where the endpoint allows it.
            seed: Seed of the response, for endpoints that take one.
        """
        request = {
            "model": self.model,
            "messages": list(messages),
            "temperature": temperature,
            "seed": seed % 2**31,
            "max_completion_tokens": self.max_tokens,
        } | self._parameters
        request = {name: value for name, value in request.items() if value is not None}
        # with the seed, where the endpoint takes none too: samples of a request are answers of their own
        key = AnswerFile.key(request | {"base_url": self._base_url, "seed": seed % 2**31})
        answer = self._answers.get(key)
        if answer is not None:
            self.usage.known += 1
            self._finished.put((number, answer))
            return
        task = self._ask(number, request, key=key)
        self._under_way[number] = asyncio.run_coroutine_threadsafe(task, self._loop)

    def collect(self, *, wait: bool = True) -> list[tuple[int, Answer]]:
        """Return the answers since the last call, each with its number.

        Args:
            wait: Wait for at least one.

        Raises:
            RolloutError: The endpoint did not answer a request.
        """
        finished = [self._finished.get()] if wait else []
        while not self._finished.empty():
            finished.append(self._finished.get())
        answers = []
        for number, answer in finished:
            self._under_way.pop(number, None)
            if isinstance(answer, Exception):
                self.release()
                raise RolloutError(self._problem(answer)) from answer
            answers.append((number, answer))
        return answers

    def release(self) -> None:
        """Cancel the requests under way and drop answers that were not collected."""
        for future in self._under_way.values():
            future.cancel()
        self._under_way.clear()
        while not self._finished.empty():
            self._finished.get()

    def close(self) -> None:
        """End the thread. The endpoint is not used again."""
        self.release()
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _ask(self, number: int, request: dict[str, Any], *, key: str) -> None:
        try:
            async with self._free:
                answer = _answer(await self._client.chat.completions.create(**request))
            self._answers.add(key, answer)
            self._count(answer)
            self._finished.put((number, answer))
        except Exception as error:  # of the client, the network or the server; `collect` raises it
            self._finished.put((number, error))

    def _count(self, answer: Answer) -> None:
        usage = self.usage
        usage.requests += 1
        usage.prompt_tokens += answer.prompt_tokens
        usage.completion_tokens += answer.completion_tokens
        if any(price is not None for price in self._prices):
            prompt, completion = (price or 0.0 for price in self._prices)
            cost = answer.prompt_tokens * prompt + answer.completion_tokens * completion
            usage.cost = (usage.cost or 0.0) + cost / _MILLION

    def _problem(self, error: Exception) -> str:
        """Return one line about a request that failed, without the key."""
        from openai import APIConnectionError, APIStatusError, AuthenticationError, NotFoundError

        reason = " ".join(str(error).split())[:300].replace(self._key, "…")
        place = f"endpoint.model={self.model} at {self._client.base_url}"
        if isinstance(error, AuthenticationError):
            return f"{place}: the key in {self._variable} was refused ({reason})"
        if isinstance(error, NotFoundError):
            return f"{place}: there is no such model or address ({reason}); set endpoint.model or endpoint.base_url"
        kept = ""
        if self._answers.path is not None:
            kept = f"; the same command goes on with the answers in {self._answers.path}"
        if isinstance(error, APIStatusError) and error.status_code < 500:
            return (
                f"{place} refuses a request: {reason}; endpoint.parameters changes its fields{kept}"
            )
        if isinstance(error, APIConnectionError):
            return f"{place} cannot be reached: {reason}{kept}"
        return f"{place} gave no answer: {type(error).__name__}: {reason}{kept}"


def _answer(completion: Any) -> Answer:
    """Return the answer in a chat completion.

    Raises:
        ValueError: It is not one.
    """
    from openai.types.chat import ChatCompletion

    if not isinstance(completion, ChatCompletion) or not completion.choices:
        raise ValueError(f"expected a chat completion, found {str(completion)[:100]!r}")
    choice, usage = completion.choices[0], completion.usage
    # a lone surrogate can't be written
    text = (choice.message.content or "").encode("utf-8", "replace").decode()
    return Answer(
        text=text,
        finish_reason=choice.finish_reason,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
    )


MISSING = "endpoint: the package openai is not installed; pip install 'ragen_pl[openai]'"


def key_of(variable: str, *, base_url: str | None) -> str:
    """Return the key of an API.

    Raises:
        ValueError: The variable is not set and OpenAI's own API is asked.
    """
    key = os.environ.get(variable)
    if key:
        return key
    if base_url is None:
        raise ValueError(
            f"endpoint.api_key_variable={variable}: this environment variable is not set; set it to your key, or set "
            "endpoint.base_url to an API that needs none"
        )
    return "none"


@dataclass(kw_only=True, slots=True)
class EndpointResponder:
    """A chat endpoint as the policy.

    Attributes:
        endpoint: answers the messages.
        greedy: ask for temperature 0.
    """

    endpoint: ChatEndpoint
    greedy: bool = False

    @property
    def samples(self) -> bool:
        """Whether responses are sampled."""
        return not self.greedy

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Ask for a response to the present turn of each episode."""
        for episode in episodes:
            self.endpoint.submit(
                episode.number,
                self.endpoint.context.messages(episode.conversation),
                temperature=0.0 if self.greedy else episode.temperature,
                seed=episode.seed,
            )

    @property
    def continuous(self) -> bool:
        """Each request is answered by itself."""
        return True

    def collect(self, *, wait: bool = True) -> list[tuple[int, Response]]:
        """Return the responses since the last call."""
        answers = self.endpoint.collect(wait=wait)
        return [(number, self._generation(answer)) for number, answer in answers]

    def release(self) -> None:
        """Cancel what is under way."""
        self.endpoint.release()

    def taking_part(self) -> AbstractContextManager[None]:
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
