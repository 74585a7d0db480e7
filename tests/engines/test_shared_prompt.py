"""The common prefix of all prompts is computed once, without changing what is sampled."""

import numpy as np
import pytest

from ragen_pl.base.seeding import derive_seed
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import GenerationRequest, Prompt, generate
from ragen_pl.modules.policy import PolicyModule

RULES = "walk to the goal and do not fall into a hole on the way up down left or right " * 2


def requests_of(prompts: list[Prompt]) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            session=slot, prompt=prompt, max_tokens=10, temperature=1.0,
            seed=derive_seed("shared", slot),
        )
        for slot, prompt in enumerate(prompts)
    ]  # fmt: skip


def check_like_alone(bundle, prompts: list[Prompt], *, shared: int) -> None:
    requests, engine = requests_of(prompts), TransformersEngine(PolicyModule(bundle))
    together = generate(engine, requests, keep=False)
    assert engine.prefilled_tokens == sum(len(p.ids) for p in prompts) - shared * (len(prompts) - 1)
    check_responses(bundle, requests, together)


def check_responses(bundle, requests, responses) -> None:
    for request, response in zip(requests, responses, strict=True):
        (alone,) = generate(TransformersEngine(PolicyModule(bundle)), [request], keep=False)
        assert response.ids.tolist() == alone.ids.tolist()
        np.testing.assert_allclose(response.logprobs, alone.logprobs, atol=1e-4)


def prompt_of(ids: list[int], images=()) -> Prompt:
    return Prompt(ids=np.array(ids), unexpanded_ids=np.array(ids), images=list(images))


def words(bundle, text: str, *, head: str = RULES) -> list[int]:
    return bundle.tokenizer.encode(f"<|user|>{head}{text}<|assistant|>")


@pytest.mark.parametrize("ends", [["Up", "Left and Up", "hole 1 2"], ["Up", "Up", "Up"]])
def test_shared_prefix_does_not_change_samples(lm, ends):
    ids = [words(lm, end) for end in ends]
    alike = [len(set(column)) == 1 for column in zip(*ids, strict=False)]
    shared = min([*np.flatnonzero(~np.array(alike)), min(map(len, ids)) - 1])
    assert shared > 16
    check_like_alone(lm, [prompt_of(row) for row in ids], shared=int(shared))


def test_short_prefix_is_not_shared(lm):
    prompts = [prompt_of(words(lm, end, head="")) for end in ("Up", "Left")]
    check_like_alone(lm, prompts, shared=0)


def test_prompts_without_a_common_prefix_are_computed_in_parts(lm):
    rows = [words(lm, end, head="") for end in ("Up", "Left and Up", "hole 1 2")]
    requests = requests_of([prompt_of(row) for row in rows])
    engine = TransformersEngine(PolicyModule(lm), prefill_tokens=1)
    check_responses(lm, requests, generate(engine, requests, keep=True))


def test_images_are_never_shared(vlm):
    rng, slot = np.random.default_rng(0), vlm.image_token_id
    head = vlm.tokenizer.encode(RULES)
    prompts = [
        prompt_of(
            [*head, *[slot] * 16, *words(vlm, end, head="")],
            [rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)],
        )
        for end in ("Up", "Up")
    ]
    check_like_alone(vlm, prompts, shared=len(head))


def test_a_session_may_leave_the_shared_prefix(lm):
    """One session goes on, and another has a prompt that begins with other tokens."""
    engine = TransformersEngine(PolicyModule(lm))
    first = [prompt_of(words(lm, end)) for end in ("Up", "Left", "Down")]
    responses = generate(engine, requests_of(first), keep=True)
    longer = [
        [*prompt.ids.tolist(), *response.ids.tolist(), *words(lm, "Right", head="")]
        for prompt, response in zip(first, responses, strict=True)
    ]
    longer[1] = words(lm, "Up", head="hole 1 2 3 " * 12)
    requests = requests_of([prompt_of(ids) for ids in longer])
    check_responses(lm, requests, generate(engine, requests, keep=True))
