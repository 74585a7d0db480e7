"""Log-probs of a program's responses in the trainer are those that were recorded, joined or rendered."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from support.models.compared_logprobs import TOLERANCE
from support.models.family_models import tiny

from ragen_pl.data.collate import collate
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.modules.policy import PolicyModule

# joined, a branch of the first answer, another agent, a history that is rewritten, and one that is not trained
BODY = """
def user(text, *images):
    urls = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return {"role": "user", "content": [{"type": "text", "text": text}, *urls]}

def say(messages, **more):
    return [*messages, ask(messages, max_tokens=9, **more)["choices"][0]["message"]]

first = say([user("see", *IMAGES[:1])])
second = say([*first, user("and now?", *IMAGES[1:])])
say([*first, user("or so?")], stop=["e"])
say([{"role": "system", "content": "be brief"}, user("who?", *IMAGES[1:])])
say([first[0], {"role": "assistant", "content": "nothing"}, user("go on")])
say([*second, user("good?")], metadata={"train": "false"})
say([*second, user("the end")])
report(reward=1)
"""
HISTORIES = ["first", "joined", "joined", "messages", "messages", "joined", "joined"]


def picture(height: int, width: int) -> str:
    """Return an image as a data URL."""
    pixels = np.random.default_rng(height).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_vl", "gemma4"])
def test_recomputed_logprobs_are_those_that_were_recorded(play, script, family):
    bundle = tiny(family)
    bundle.calls_tools = True
    images = [] if bundle.images is None else [picture(56, 84), picture(64, 64)]
    engine = TransformersEngine(PolicyModule(bundle))
    (episode,) = play(script(f"IMAGES = {images!r}\n{BODY}"), bundle=bundle, engine=engine)
    assert episode.error is None
    histories = [turn.kind.history for turn in episode.turns]
    assert histories == HISTORIES
    assert [turn.trained for turn in episode.turns].count(False) == 1
    batch = collate([episode], bundle)
    samples = batch.samples
    assert len(samples) >= 4
    with torch.no_grad():
        scores = PolicyModule(bundle).eval()(
            samples, batch.images, microbatches=[torch.arange(len(samples))]
        )
    at = samples.token >= 0
    found = scores.logprobs[at][samples.token[at].argsort()].numpy()
    recorded = [turn.response_logprobs for turn in episode.turns if turn.trained]
    expected = np.concatenate(recorded)
    assert np.std(expected) > 0.3
    assert np.abs(found - expected).max() < TOLERANCE
