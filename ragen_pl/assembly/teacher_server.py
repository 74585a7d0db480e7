"""A teacher behind vLLM servers, which tells the log-probs of the policy's tokens alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

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
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.modules.policy import PolicyModule, TokenScores
from ragen_pl.modules.reference import OtherReference, ReferencePolicy

if TYPE_CHECKING:
    from ragen_pl.data.batch import Samples
    from ragen_pl.models.bundle import ModelBundle

_KEY = "algorithm.loss.kl.reference"
# of an answer: vLLM writes about 150 bytes for a token
_FLOOR_BYTES, _BYTES_PER_TOKEN = 2**20, 1024


@checked
@dataclass(kw_only=True)
class TeacherServer:
    """Teacher for on-policy distillation that vLLM servers serve, with the policy's tokenizer.

    It scores the policy's exact ids, never a text, by `/v1/completions` with `prompt_logprobs`, at temperature 1 and
    over its whole vocabulary. So it can be the reference of estimators that read the sampled tokens: `k2`, or `k1` in
    the reward with `TeacherRatio`. Ids that the policy never samples keep their probability there. Texts only.

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
        """Check that the loss reads no more than the server tells.

        Raises:
            ValueError: It does.
        """
        kl = facts.loss.kl if isinstance(facts.loss, UpdateLoss) else None
        if kl is not None and kl.estimator.over_vocabulary:
            raise ValueError(
                f"algorithm.loss.kl.estimator={kl.estimator}: a server tells the log-probs of the sampled tokens "
                "alone; set k2, or place=reward with k1 and the estimator "
                "ragen_pl.algorithms.advantages.teacher_ratio.TeacherRatio"
            )
        check_estimator(facts)
        if facts.temperature != 1.0 or facts.truncates:
            raise ValueError(
                f"{_KEY}: a server scores at temperature 1 and over all ids, and the policy samples otherwise; set "
                "rollout.temperature=1.0 rollout.top_p=null rollout.top_k=null rollout.min_p=null"
            )

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return the teacher. It is asked when it is called."""
        return ServedTeacher(policy, self._servers())

    def store(self, reference: ReferencePolicy, policy: PolicyModule, dtype: torch.dtype) -> None:
        """Do nothing: it has no weights here."""

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Do nothing."""

    def _servers(self) -> _Servers:
        return _Servers([*map(address, self.urls)], self.concurrency, self.timeout_s)


class ServedTeacher(OtherReference):
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
        rows = [
            samples.input_ids[row, : int(samples.length[row])].tolist()
            for row in range(len(samples))
        ]
        logprobs = torch.zeros(samples.input_ids.shape)
        for row, scores in enumerate(self._servers.scores(rows)):
            logprobs[row, : len(scores)] = torch.tensor(scores)
        logprobs = logprobs.to(samples.input_ids.device)
        logprobs = torch.where(samples.turn >= 0, logprobs, 0.0)
        return TokenScores(logprobs=logprobs, entropy=torch.zeros_like(logprobs))


@dataclass(slots=True)
class _Servers:
    """Servers of one model. A sample goes to each in turn, and to the next one where an attempt fails."""

    urls: list[str]
    concurrency: int
    timeout_s: float

    def check(self, bundle: ModelBundle) -> None:
        """Check the tokenizer of each."""

        async def work() -> None:
            async with aiohttp.ClientSession() as session:
                for url in self.urls:
                    server = Server(url, session, self.timeout_s)
                    try:
                        await check_tokenizer(server, bundle, key=f"{_KEY}.urls")
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

    def scores(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob of each id after those before it, 0 for the first."""

        async def work() -> list[list[float]]:
            turns = asyncio.Semaphore(self.concurrency * len(self.urls))
            async with aiohttp.ClientSession() as session:
                servers = [Server(url, session, self.timeout_s) for url in self.urls]
                names = await asyncio.gather(*(_name(server) for server in servers))
                pairs = [*zip(servers, names, strict=True)]

                async def scored(number: int, ids: Sequence[int]) -> list[float]:
                    async with turns:
                        return await self._row(pairs[number % len(pairs) :] + pairs, number, ids)

                tasks = [asyncio.create_task(scored(n, ids)) for n, ids in enumerate(rows)]
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
        self, pairs: Sequence[tuple[Server, str]], number: int, ids: Sequence[int]
    ) -> list[float]:
        clock = asyncio.get_running_loop().time
        ends, attempt = clock() + self.timeout_s, 0
        while True:
            server, name = pairs[attempt % len(pairs)]
            body: Json = {
                **{"model": name, "prompt": [*ids], "max_tokens": 1, "temperature": 0.0},
                "prompt_logprobs": 0,
            }
            left = ends - clock()
            try:
                answer = await server.call(
                    "POST",
                    "/v1/completions",
                    body,
                    timeout_s=max(left, 1.0),
                    max_bytes=_FLOOR_BYTES + _BYTES_PER_TOKEN * len(ids),
                )
                return _scores(answer, ids)
            except ServerError as error:
                # a request that one server refuses, another of the same model refuses too
                refuses = isinstance(error, RequestFailedError) and error.refuses
                if refuses or clock() >= ends:
                    raise
                await pause(attempt, "teacher", number, timeout_s=self.timeout_s)
                attempt += 1


async def _name(server: Server) -> str:
    """Return the name of a server's model."""
    answer = await server.call("GET", "/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise InvalidAnswerError(f"{server.url} names no model") from error


def _scores(answer: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probs of ids in an answer.

    Raises:
        InvalidAnswerError: One is missing, or is none.
    """
    try:
        found = answer["choices"][0]["prompt_logprobs"]
        pairs = zip(found[1:], ids[1:], strict=True)
        scores = [float(at[str(token)]["logprob"]) for at, token in pairs]
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidAnswerError(f"an answer unlike vLLM's ({error})") from error
    if not all(math.isfinite(score) and score <= 1e-3 for score in scores):
        raise InvalidAnswerError("log-probs that are none")
    return [0.0, *scores]


def _in_thread(work: Any) -> Any:
    """Return the result of a coroutine function, run beside the present thread's event loop where it has one."""
    thread: RequestThread[int, object] = RequestThread(1)
    try:
        return thread.call(work())
    finally:
        thread.close()
