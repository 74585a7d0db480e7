"""Answers of a policy to the requests of clients, as in training: the same prompts, joined histories and responses."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from ragen_pl.agent_programs.serving.chat_response import Answer
from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.agent_programs.serving.session import Call
from ragen_pl.chat_formats.messages import Message
from ragen_pl.deployment.histories import Histories
from ragen_pl.deployment.sampling import read_sampling
from ragen_pl.engines.generation_check import GenerationCheck
from ragen_pl.engines.protocol import Generation, GenerationRequest, RolloutEngine
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.conversation import Conversation
from ragen_pl.prompts.histories import RecordedCall
from ragen_pl.prompts.requests import RequestRefusedError
from ragen_pl.rollout.requests import answer_request, too_long
from ragen_pl.rollout.settings import EpisodeSettings
from ragen_pl.trajectory import ChatRequest

log = logging.getLogger(__name__)
# answers that no client has got yet
_MAX_WAITING = 256


@dataclass(kw_only=True, slots=True)
class _Asked:
    """A request with its prompt, and its answer once there is one."""

    call: Call
    chat: ChatRequest
    conversation: Conversation
    request: GenerationRequest
    response: Generation | None = None
    message: Message | None = None


class PolicyAnswers:
    """Answers requests with an engine, in one thread.

    Args:
        engine: Samples the responses.
        context: Makes the prompts.
        settings: Sampling and length of responses where a request says nothing else, and the largest number of requests
            that the engine gets at once.
        histories: Calls that requests may continue.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        context: ContextManager,
        *,
        settings: EpisodeSettings,
        histories: Histories,
    ) -> None:
        self._engine, self._context = engine, context
        self._settings, self._histories = settings, histories
        self._check = GenerationCheck.of(context.bundle)
        self._ready: deque[_Asked] = deque()
        self._sampled: dict[int, _Asked] = {}
        self._waiting: dict[Call, _Asked] = {}
        self._number = 0

    @property
    def busy(self) -> bool:
        """Whether requests wait for responses."""
        return bool(self._ready or self._sampled)

    def ask(self, call: Call) -> None:
        """Take a request, or refuse it."""
        try:
            self._ready.append(self._asked(call))
        except RequestError as error:
            call.session.answer(call, error)
        except RequestRefusedError as error:
            call.session.answer(call, RequestError(400, str(error), code=error.code))
        # one request must not end the server
        except Exception:
            log.exception("a request failed")
            call.session.answer(call, _failed("the request failed", code="endpoint_failed"))

    def work(self) -> None:
        """Sample the responses of requests that wait, and answer those that have finished."""
        places = self._settings.num_envs - len(self._sampled)
        batch = [self._ready.popleft() for _ in range(min(places, len(self._ready)))]
        if self._sampled and not self._engine.continuous:
            raise RuntimeError("a batch engine has left requests without responses")
        self._sampled |= {asked.request.session: asked for asked in batch}
        try:
            if batch:
                self._engine.submit([asked.request for asked in batch], keep=False)
            finished = self._engine.collect(wait=not self._engine.continuous)
            done = [(self._sampled[session], generation) for session, generation in finished]
            self._check([asked.request for asked, _ in done], [given for _, given in done])
        # of the engine, whatever it is: out of memory, a server that has ended, weights that are NaN
        except Exception:
            log.exception("the engine failed")
            self._engine.release()
            failed, self._sampled = list(self._sampled.values()), {}
            for asked in failed:
                error = _failed("the engine failed", code="engine_failed")
                asked.call.session.answer(asked.call, error)
            return
        for asked, generation in done:
            del self._sampled[asked.request.session]
            self._answer(asked, generation)
        self._withdraw_oldest()
        if not self._sampled:
            # features of images
            self._engine.release()

    def delivered(self, call: Call) -> None:
        """Record a call whose answer a client has got: its next request may continue it."""
        asked = self._waiting.pop(call, None)
        if asked is None or asked.response is None or asked.message is None:
            return
        recorded = RecordedCall(
            request=asked.chat,
            message=asked.message,
            prompt=asked.request.prompt,
            response_ids=asked.response.ids,
        )
        asked.conversation.calls.append(recorded)
        self._histories.recorded(call.session.key)

    def _asked(self, call: Call) -> _Asked:
        """Return a request with its prompt.

        Raises:
            RequestError: Its sampling parameters are not valid.
            RequestRefusedError: It has no prompt, or a too long one.
        """
        client = call.client
        assert client is not None
        chat, longest = client.chat, self._settings.max_response_tokens
        sampling = read_sampling(client.sampling, self._settings)
        conversation = self._histories.conversation(call.session.key)
        prompt = self._context.observe_request(conversation, chat, client.images)
        tokens = min(chat.max_tokens or longest, longest)
        if len(prompt.ids) + tokens > self._context.max_tokens:
            raise too_long(len(prompt.ids), tokens, context=self._context.max_tokens)
        self._number += 1
        request = GenerationRequest(
            session=self._number,
            prompt=prompt,
            max_tokens=tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            truncation=sampling.truncation,
        )
        return _Asked(call=call, chat=chat, conversation=conversation, request=request)

    def _answer(self, asked: _Asked, generation: Generation) -> None:
        call, native = asked.call, asked.conversation.native
        assert native is not None
        # the number of the turn, as in an episode that sends its whole history
        turn = sum(message["role"] == "assistant" for message in asked.chat.messages)
        answer = answer_request(
            asked.chat,
            generation,
            native=native,
            prompt_tokens=len(asked.request.prompt.ids),
            turn=turn,
            generation_prefix=self._context.generation_prefix,
            pieces=self._context.pieces(generation.ids),
        )
        asked.response, asked.message = answer.generation, answer.message
        self._waiting[call] = asked
        call.session.answer(call, Answer.of(call.id, call.session.model, answer.content))

    def _withdraw_oldest(self) -> None:
        """Give up the oldest answers where there are too many, without those that a client is getting."""
        excess = max(0, len(self._waiting) - _MAX_WAITING)
        for call in [*self._waiting][:excess]:
            if call.session.withdraw_answer(call):
                del self._waiting[call]


def _failed(message: str, *, code: str) -> RequestError:
    return RequestError(503, message, code=code)
