"""A teacher behind vLLM servers, which tells the log-probs of the policy's tokens and of its own most likely ids."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import aiohttp
import torch
from torch import Tensor

from ragen_pl.assembly.teacher import check_estimator
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, Positive
from ragen_pl.base.run_facts import RunFacts
from ragen_pl.config.errors import ConfigError
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.request_thread import RequestThread
from ragen_pl.engines.vllm_server.requirements import check_tokenizer
from ragen_pl.engines.vllm_server.server import (
    InvalidAnswerError,
    Json,
    RefusedError,
    RequestFailedError,
    Server,
    ServerError,
    address,
    pause,
)
from ragen_pl.models.distribution import TopLogprobs
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.modules.policy import PolicyModule, TokenScores
from ragen_pl.modules.reference import ReferencePolicy, ServedReference

if TYPE_CHECKING:
    from ragen_pl.data.batch import Samples
    from ragen_pl.models.bundle import ModelBundle

_KEY = "algorithm.loss.kl.reference"
T = TypeVar("T")
# of an answer: vLLM writes about 150 bytes for an id of a position
_FLOOR_BYTES, _BYTES_PER_TOKEN = 2**20, 1024
# log-probs and sums of probabilities that are 0 and 1 but for rounding, and the smallest probability besides 1
_ROUNDING, _SMALLEST = 1e-3, 2.0**-23


@checked
@dataclass(kw_only=True)
class TeacherServer:
    """Teacher for on-policy distillation that vLLM servers serve, with the policy's tokenizer.

    It scores the policy's exact ids, never a text, by `/v1/completions` with `prompt_logprobs`, at temperature 1 and
    over its whole vocabulary. So it can be the reference of estimators that read the sampled tokens, `k2` or `k1` in
    the reward with `TeacherRatio`, and of divergences over its own `top_k` most likely ids and one outcome for all
    others. Ids that the policy never samples keep their probability, but for those among the `top_k`. Texts only.

    Attributes:
        urls: Addresses of servers that serve the same model, as `vllm serve MODEL` starts them.
        concurrency: Requests at once to each server.
        timeout_s: Longest wait for the scores of a sample, all attempts together.

    Raises:
        ValueError: There is no address.
    """

    needs_trust = ("urls",)

    urls: list[str]
    concurrency: Count = 16
    timeout_s: Positive = 600.0

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError(f"{_KEY}.urls=[]: expected the address of a vLLM server at least")

    def check(self, policy: ModelBundle) -> None:
        """Check that the servers read the policy's ids as the policy does.

        Raises:
            ConfigError: One does not answer, or has another tokenizer; or the policy sees images.
        """
        if policy.image_token_id is not None:
            raise ConfigError(
                f"{_KEY}: a TeacherServer scores texts, and {policy.facts.family} sees images; take a "
                "Teacher with a path"
            )
        self._servers().check(policy)

    def check_run(self, facts: RunFacts) -> None:
        """Check that the loss reads no more than the servers tell, and ask them for as many ids as it reads.

        Raises:
            ValueError: It does.
            ConfigError: A server does not tell so many, or does not answer.
        """
        kl = facts.loss.kl if isinstance(facts.loss, UpdateLoss) else None
        if kl is not None and kl.estimator.over_vocabulary:
            if kl.top is None or not kl.top.of_reference:
                raise ValueError(
                    f"algorithm.loss.kl.estimator={kl.estimator} with top_k={kl.top_k} and top_k_of={kl.top_k_of}: a "
                    "server tells the log-probs of its own most likely ids and of the sampled tokens alone; set "
                    "top_k=20 and top_k_of=reference, or estimator=k2, or place=reward with k1 and the estimator "
                    "ragen_pl.algorithms.advantages.teacher_ratio.TeacherRatio"
                )
            if kl.weights is not None and kl.weights.confidence:
                raise ValueError(
                    "algorithm.loss.kl.weights.confidence=true: it is read from the reference's whole distributions, "
                    "which a server does not tell; set algorithm.loss.kl.weights.confidence=false"
                )
        check_estimator(facts)
        if facts.temperature != 1.0 or facts.adapts_temperature or facts.truncates:
            raise ValueError(
                f"{_KEY}: a server scores at temperature 1 and over all ids, and the policy samples otherwise; set "
                "rollout.temperature=1.0 rollout.adaptive_temperature=null rollout.top_p=1 rollout.top_k=null "
                "rollout.min_p=0"
            )
        if kl is not None and kl.top is not None:
            self.check_top(kl.top.number)

    def check_top(self, number: int) -> None:
        """Check that the servers tell so many most likely ids at a position.

        Raises:
            ConfigError: One does not, or does not answer.
        """
        self._servers().check_top(number)

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return the teacher. It is asked when it is called."""
        return ServedTeacher(policy, self._servers())

    def store(self, reference: ReferencePolicy, policy: PolicyModule, dtype: torch.dtype) -> None:
        """Do nothing: it has no weights here."""

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Do nothing."""

    def _servers(self) -> _Servers:
        return _Servers([*map(address, self.urls)], self.concurrency, self.timeout_s)


class ServedTeacher(ServedReference):
    """Teacher as a reference policy, whose scores come from servers."""

    def __init__(self, policy: PolicyModule, servers: _Servers) -> None:
        self.policy, self._servers = policy, servers

    @property
    def bundle(self) -> ModelBundle:
        """The policy's model, whose ids the teacher reads."""
        return self.policy.bundle

    def lm_head(self, hidden: Tensor) -> NoReturn:
        """Raise an error: a server gives no states."""
        raise TypeError(f"{_KEY}: a TeacherServer has no head here")

    def __call__(self, samples: Samples, images: Sequence[Tensor], **_: Any) -> TokenScores:
        """Return the log-probs of the sampled tokens, float32 `[rows, time]`, and no entropy.

        Raises:
            RolloutError: A server gives none within its time.
        """
        logprobs = torch.zeros(samples.input_ids.shape)
        own = self._read(samples, lambda known, token: known[token], number=0)
        logprobs[samples.turn.cpu() >= 0] = torch.tensor(own)
        logprobs = logprobs.to(samples.input_ids.device)
        return TokenScores(logprobs=logprobs, entropy=torch.zeros_like(logprobs))

    def top_logprobs(self, samples: Samples, number: int) -> TopLogprobs:
        """Return the log-probs of the teacher's most likely ids at each sampled token, by token number, on the CPU.

        Those that the policy never samples have probability 0, and the others are scaled to a sum of 1. If all are
        such ids, the sampled one is in their place.

        Raises:
            RolloutError: A server gives none within its time.
        """
        banned, count = {*self.bundle.banned_token_ids}, self.bundle.logit_count
        distributions = self._read(
            samples,
            lambda known, token: most_likely(
                known, token, number, lambda one: one < count and one not in banned
            ),
            number=number,
        )
        order = samples.token[samples.turn >= 0].cpu().argsort()
        ids = torch.tensor([own for own, _ in distributions], dtype=torch.int32)
        logprobs = torch.tensor([own for _, own in distributions], dtype=torch.float32)
        return TopLogprobs(
            ids.view(len(order), number)[order], logprobs.view(len(order), number + 1)[order]
        )

    def _read(
        self, samples: Samples, read: Callable[[dict[int, float], int], T], *, number: int
    ) -> list[T]:
        """Return what is read of the known log-probs by id and the id of each sampled token, row after row."""
        sampled = samples.turn >= 0
        rows = [
            (
                samples.input_ids[row, : int(samples.length[row])].tolist(),
                sampled[row].nonzero().flatten().tolist(),
            )
            for row in range(len(samples))
        ]

        def read_row(answer: Any, row: int) -> list[T]:
            ids, columns = rows[row]
            found = answer["choices"][0]["prompt_logprobs"]
            if len(found) != len(ids):
                raise ValueError(f"{len(found)} positions of {len(ids)}")
            return [read(_known(found[column]), ids[column]) for column in columns]

        parts = self._servers.read([ids for ids, _ in rows], read_row, number=number)
        return [one for part in parts for one in part]


@dataclass(slots=True)
class _Servers:
    """Servers of one model. A sample goes to each in turn, and to the next one where an attempt fails."""

    urls: list[str]
    concurrency: int
    timeout_s: float

    def check(self, bundle: ModelBundle) -> None:
        """Check the tokenizer of each."""
        self._check(lambda server: check_tokenizer(server, bundle, key=f"{_KEY}.urls"))

    def check_top(self, number: int) -> None:
        """Check that each tells so many ids of a position."""

        async def ask(server: Server) -> None:
            body = _request(await _name(server), [0, 0], number)
            try:
                await server.call("POST", "/v1/completions", body, timeout_s=self.timeout_s)
            except RequestFailedError as error:
                if error.status != 400:
                    raise
                raise RefusedError(
                    f"algorithm.loss.kl.top_k={number}: {server.url} does not tell so many ids ({error}); start it "
                    f"with --max-logprobs {number}, or set a smaller top_k"
                ) from error

        self._check(ask)

    def _check(self, look: Callable[[Server], Awaitable[None]]) -> None:
        async def work() -> None:
            async with aiohttp.ClientSession() as session:
                for url in self.urls:
                    try:
                        await look(Server(url, session, self.timeout_s))
                    except RequestFailedError as error:
                        raise RefusedError(
                            f"{_KEY}.urls: {url} is no vLLM server ({error}); start one with vllm serve"
                        ) from error
                    except (ServerError, KeyError, TypeError) as error:
                        raise RefusedError(
                            f"{_KEY}.urls: {url} gives no answer that can be used ({error}); start it, or give another"
                        ) from error

        try:
            _in_thread(work)
        except RefusedError as error:
            raise ConfigError(str(error)) from error

    def read(
        self, rows: Sequence[Sequence[int]], read: Callable[[Any, int], T], *, number: int
    ) -> list[T]:
        """Return what is read of the answer for the ids of each row and of its place.

        Args:
            rows: Ids.
            read: Reads an answer; a `LookupError`, `TypeError` or `ValueError` says that it is unlike vLLM's.
            number: Number of most likely ids whose log-probs are told at each id, besides its own.
        """

        async def work() -> list[T]:
            turns = asyncio.Semaphore(self.concurrency * len(self.urls))
            async with aiohttp.ClientSession() as session:
                servers = [Server(url, session, self.timeout_s) for url in self.urls]
                names = await asyncio.gather(*(_name(server) for server in servers))
                pairs = [*zip(servers, names, strict=True)]

                async def answer(place: int, ids: Sequence[int]) -> T:
                    async with turns:
                        own = pairs[place % len(pairs) :] + pairs
                        return await self._row(own, place, ids, read, number=number)

                tasks = [asyncio.create_task(answer(n, ids)) for n, ids in enumerate(rows)]
                try:
                    return await asyncio.gather(*tasks)
                finally:
                    # of those that one that failed leaves
                    for task in tasks:
                        task.cancel()

        try:
            return _in_thread(work)
        except ServerError as error:
            raise RolloutError(
                f"{_KEY}.urls={self.urls}: no scores of the teacher within {self.timeout_s:g} s ({error}); look at the "
                "servers' logs"
            ) from error

    async def _row(
        self,
        pairs: Sequence[tuple[Server, str]],
        place: int,
        ids: Sequence[int],
        read: Callable[[Any, int], T],
        *,
        number: int,
    ) -> T:
        clock = asyncio.get_running_loop().time
        ends, attempt = clock() + self.timeout_s, 0
        while True:
            server, name = pairs[attempt % len(pairs)]
            left = ends - clock()
            try:
                answer = await server.call(
                    "POST",
                    "/v1/completions",
                    _request(name, ids, number),
                    timeout_s=max(left, 1.0),
                    max_bytes=_FLOOR_BYTES + _BYTES_PER_TOKEN * len(ids) * (1 + number),
                )
                try:
                    return read(answer, place)
                except (LookupError, TypeError, ValueError) as error:
                    raise InvalidAnswerError(f"an answer unlike vLLM's ({error})") from error
            except ServerError as error:
                # a request that one server refuses, another of the same model refuses too
                if error.refuses or clock() >= ends:
                    raise
                await pause(attempt, "teacher", place, timeout_s=self.timeout_s)
                attempt += 1


def _request(name: str, ids: Sequence[int], number: int) -> Json:
    return {
        **{"model": name, "prompt": [*ids], "max_tokens": 1, "temperature": 0.0},
        "prompt_logprobs": number,
    }


async def _name(server: Server) -> str:
    """Return the name of a server's model."""
    answer = await server.call("GET", "/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise InvalidAnswerError(f"{server.url} names no model") from error


def _known(position: Any) -> dict[int, float]:
    """Return the log-probs of a position by id."""
    known = {int(token): float(about["logprob"]) for token, about in position.items()}
    if not all(math.isfinite(one) and one <= _ROUNDING for one in known.values()):
        raise ValueError("log-probs that are none")
    return known


def most_likely(
    known: Mapping[int, float], token: int, number: int, is_possible: Callable[[int], bool]
) -> tuple[list[int], list[float]]:
    """Return the most likely ids, and the log-probs of them and of all others; see `ServedTeacher.top_logprobs`.

    Args:
        known: Log-probs by id, of the most likely ids and of the token.
        token: The token.
        number: Number of the most likely ids.
        is_possible: Whether the policy can sample an id.
    """
    top = nlargest(number, known, key=known.__getitem__)
    ids = [one for one in top if is_possible(one)] or [token]
    inside = {one: math.exp(known[one]) for one in {*top, *ids}}
    others = 1.0 - sum(inside.values())
    if others < -_ROUNDING:
        raise ValueError("probabilities with a sum above 1")
    # float32 tells no smaller one from 0
    others = max(others, _SMALLEST)
    total = math.log(others + sum(inside[one] for one in ids))
    ids += ids[:1] * (number - len(ids))
    return ids, [known[one] - total for one in ids] + [math.log(others) - total]


def _in_thread(work: Any) -> Any:
    """Return the result of a coroutine function, run beside the present thread's event loop where it has one."""
    thread: RequestThread[int, object] = RequestThread(1)
    try:
        return thread.call(work())
    finally:
        thread.close()
