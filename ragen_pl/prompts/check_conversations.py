"""Conversations of the check at the start of a run: short ones of several turns, and one of the largest length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ragen_pl.engines.protocol import GenerationRequest, Prompt
from ragen_pl.models.truncation import Truncation
from ragen_pl.prompts.context import ContextManager
from ragen_pl.trajectory import Observation

if TYPE_CHECKING:
    from ragen_pl.prompts.conversation import Conversation

# one conversation for each text: rows of unequal length
_TEXTS = (
    "Where is the goal?",
    "You see a map with a goal and two holes. Which way is the shortest? Answer with a word.",
)
# images of each turn of the first conversation; the second has none
_IMAGES = (1, 0, 1)
_TOKENS = 4
# weights times tokens of the long conversation on a CPU, where it would take minutes with a large model
_CPU_WORK = 2**36


@dataclass(frozen=True, slots=True)
class CheckedResponse:
    """A response to a prompt, its log-probs by the engine, and the ids that sampling kept.

    Both are None for ids that no engine has sampled.
    """

    prompt: Prompt
    ids: np.ndarray
    logprobs: np.ndarray | None = None
    truncation: Truncation | None = None


Ask = Callable[[Sequence[GenerationRequest]], list[CheckedResponse]]
"""Returns the responses to requests, in their order."""


def converse(
    context: ContextManager,
    ask: Ask,
    *,
    image_size: tuple[int, int] | None,
    truncation: Truncation | None = None,
) -> list[CheckedResponse]:
    """Return the responses of short conversations side by side, and then of the long one beside another short one.

    The long conversation has a single turn, whose prompt and response are as long as the context allows. On a CPU they
    are shorter for models of more than some ten million weights.

    Args:
        context: Context of the prompts.
        ask: Samples responses.
        image_size: Height and width of images; None for none.
        truncation: Ids that sampling keeps; None for all.
    """
    rng = np.random.default_rng(0)

    def request(session: int, talk: Conversation, text: str, turn: int) -> GenerationRequest:
        count = _IMAGES[turn] if session == 0 and image_size is not None else 0
        shape = (*(image_size or (0, 0)), 3)
        images = [rng.integers(0, 255, shape, dtype=np.uint8) for _ in range(count)]
        prompt = _observe(context, talk, Observation(text=text, images=images))
        seed = len(_TEXTS) * turn + session
        return GenerationRequest(
            session=session,
            prompt=prompt,
            max_tokens=_TOKENS,
            temperature=1.0,
            seed=seed,
            truncation=truncation,
        )

    talks = {session: _start(context) for session in range(len(_TEXTS))}
    responses: list[CheckedResponse] = []
    for turn in range(len(_IMAGES)):
        requests = [
            request(session, talk, _TEXTS[session], turn) for session, talk in talks.items()
        ]
        fitting = [each for each in requests if _fits(context, each)]
        if turn == 0 and not fitting:
            shortest = min(len(each.prompt.ids) for each in requests)
            raise ValueError(
                f"context.max_tokens={context.max_tokens}: a prompt of four words has {shortest} tokens; set at least "
                f"{shortest + _TOKENS}"
            )
        # a conversation ends where the context does
        talks = {each.session: talks[each.session] for each in fitting}
        answers = ask(fitting) if fitting else []
        for talk, answer in zip(talks.values(), answers, strict=True):
            talk.respond(ids=answer.ids, text="", actions=[])
        responses += answers
    if (words := _words_of_longest(context)) is not None:
        # beside a short one, whose padding some layers would compress with its tokens (DeepSeek-V4)
        pair = enumerate((words, _TEXTS[0]), start=len(_TEXTS))
        responses += ask([request(number, _start(context), text, 0) for number, text in pair])
    return responses


def _fits(context: ContextManager, request: GenerationRequest) -> bool:
    return len(request.prompt.ids) + request.max_tokens <= context.max_tokens


def _start(context: ContextManager) -> Conversation:
    return context.start("Find the goal.")


def _observe(context: ContextManager, talk: Conversation, observation: Observation) -> Prompt:
    return context.observe(talk, observation, max_turns=len(_IMAGES))


def _words_of_longest(context: ContextManager) -> str | None:
    """Return the text of the longest conversation, None if a short one is too long for the context."""

    def length(count: int) -> int:
        observation = Observation(text=" ".join([_TEXTS[1]] * count))
        return len(_observe(context, _start(context), observation).ids)

    longest = context.max_tokens
    if context.bundle.device.type == "cpu":
        longest = min(longest, _CPU_WORK // context.bundle.parameter_count())
    budget = longest - _TOKENS
    each = length(2) - length(1)
    count = 1 + (budget - length(1)) // each
    while count > 1 and length(count) > budget:
        count -= 1
    return " ".join([_TEXTS[1]] * count) if count > 1 else None
