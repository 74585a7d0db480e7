"""Log-probs of responses in the native format, three ways; see `three_ways`."""

from __future__ import annotations

import numpy as np
import pytest
from support.models.compared_logprobs import TOLERANCE, Said, own_logprobs, trainer_logprobs
from support.models.family_models import tiny

from ragen_pl.chat_formats.messages import call_message
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import GenerationRequest, generate
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.trajectory import Observation

PARAMETERS = {"type": "object", "properties": {"article": {"type": "string"}}}
FUNCTION = {"name": "price", "description": "Return a price.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALLS = [call_message(0, "price", {"article": "tea"})]
# turns of text and images: a user's message, then results of calls
SIZES = ([], [(56, 84)], [(64, 64)])


def observation(turn: int, *, images: bool) -> Observation:
    rng = np.random.default_rng(turn)
    sizes = SIZES[turn] if images else []
    shown = [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in sizes]
    text = f'see "{turn}"\nnow'
    return Observation(text=text, images=shown, results=[text] if turn else [])


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("qwen2_5", 1),
        ("llama3_2", 1),
        ("gemma4", 1),
        ("qwen3_vl", 1),
        ("qwen3", 3),
        ("qwen3_5", 3),
        ("lfm2_vl", 3),
    ],
)
def test_engine_trainer_and_own_forward_agree(name, samples):
    """In one sample where the template keeps the history, else in a sample a turn."""
    bundle = tiny(name)
    bundle.calls_tools = True
    context = ContextManager(bundle, window="all")
    engine = TransformersEngine(PolicyModule(bundle))
    talk, episode = context.start("Sell.", tools=TOOLS), []
    for turn in range(len(SIZES)):
        shown = observation(turn, images=bundle.images is not None)
        prompt = context.observe(talk, shown, max_turns=len(SIZES))
        request = GenerationRequest(
            session=0, prompt=prompt, max_tokens=8, temperature=1.0, seed=turn
        )
        (response,) = generate(engine, [request], keep=context.grows)
        # a random model writes no call: its response is taken for one
        response.ids[-1] = bundle.end_of_turn_id
        episode.append(Said(prompt, response))
        text = talk.native.response_text('{"name": "price", "arguments": {"article": "tea"}}')
        talk.respond(ids=response.ids, text=text, actions=[], calls=CALLS)
    own = [own_logprobs(bundle, said) for said in episode]
    for expected, said in zip(own, episode, strict=True):
        # the last token was replaced after it was sampled
        assert np.abs(expected - said.generation.logprobs)[:-1].max(initial=0.0) < TOLERANCE
    for rows, scored in trainer_logprobs(bundle, [episode]):
        assert rows == samples
        assert np.abs(scored - np.concatenate(own)).max() < TOLERANCE
