"""Ids that truncated sampling keeps are recorded with the sample, not found again from newer weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support.models.copy_engine import CopyEngine
from support.models.tiny_models import TEXT

from ragen_pl.data.collate import collate
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import GenerationRequest, Prompt, generate
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.models.build import build_small_lm
from ragen_pl.models.distribution import log_distribution
from ragen_pl.models.truncation import BANNED, Truncation
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.rollout.requests import _cut

KINDS = {
    "top_p": Truncation(top_p=0.9),
    "top_k": Truncation(top_k=20),
    "min_p": Truncation(min_p=0.05),
    "all": Truncation(top_p=0.95, top_k=50, min_p=0.001),
}


def requests(bundle, truncations) -> list[GenerationRequest]:
    """Return requests of different temperatures and limits, which end at different lengths."""
    ids = np.arange(20, 32)
    return [
        GenerationRequest(
            session=number, prompt=Prompt(ids=ids + number, unexpanded_ids=ids + number),
            max_tokens=3 + number, temperature=0.7 + 0.1 * number, seed=number, truncation=truncation,
        )
        for number, truncation in enumerate(truncations)
    ]  # fmt: skip


def true_sets(bundle, request, generation) -> list[list[int]]:
    """Return the ids that each token was drawn from, by the model's own forward."""
    whole = torch.from_numpy(np.concatenate([request.prompt.ids, generation.ids]))[None]
    with torch.no_grad():
        logits = bundle.model(whole).logits[0, len(request.prompt.ids) - 1 : -1]
    banned = torch.tensor(sorted(bundle.banned_token_ids))
    log_probs = log_distribution(logits, temperature=request.temperature, banned=banned)
    inside = request.truncation.truncated(log_probs) > BANNED / 2
    return [row.nonzero().flatten().tolist() for row in inside]


def recorded_sets(kept_ids, kept_counts) -> list[list[int]]:
    return [sorted(ids.tolist()) for ids in np.split(kept_ids, kept_counts.cumsum()[:-1])]


@pytest.fixture(scope="module")
def sharp():
    bundle = build_small_lm(seed=0, text=TEXT)
    with torch.no_grad():
        for weight in bundle.model.parameters():
            if weight.ndim > 1:
                weight.mul_(4.0)
    return bundle


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_records_the_ids_that_it_drew_from(sharp, kind):
    asked = requests(sharp, [KINDS[kind]] * 9)
    generations = generate(TransformersEngine(PolicyModule(sharp)), asked, keep=False)
    for request, generation in zip(asked, generations, strict=True):
        found = recorded_sets(generation.kept_ids, generation.kept_counts)
        assert found == true_sets(sharp, request, generation)
        assert generation.kept_ids.dtype == generation.kept_counts.dtype == np.int32
    cut = _cut(generations[-1], 1)
    assert len(cut.kept_counts) == 1 and len(cut.kept_ids) == cut.kept_counts[0]


def test_responses_from_all_ids_record_none(sharp):
    engine = TransformersEngine(PolicyModule(sharp))
    mixed = requests(sharp, [KINDS["top_k"], None, KINDS["top_p"]])
    first, second, third = generate(engine, mixed, keep=False)
    assert (second.kept_counts == 0).all() and len(second.kept_ids) == 0
    assert (first.kept_counts > 0).all() and (third.kept_counts > 0).all()
    (alone,) = generate(engine, requests(sharp, [None]), keep=False)
    assert alone.kept_ids is None and alone.kept_counts is None


class Records(RolloutCallback):
    """Compare the ids that the update trains over with those that were recorded, in each iteration."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_rollout_end(self, trainer, module, trajectories) -> None:
        kept, samples = trainer.datamodule.buffer.kept_ids, trainer.datamodule.buffer.samples
        recorded = [
            ids
            for one in trajectories
            for turn in one.turns
            for ids in recorded_sets(turn.kept_ids, turn.kept_counts)
        ]
        sampled = samples.turn >= 0
        found = [sorted(part.ids.tolist()) for part in kept.split(1)]
        assert found == recorded and len(found) == int(sampled.sum())
        of_token = dict(
            zip(samples.token[sampled].tolist(), samples.input_ids[sampled].tolist(), strict=True)
        )
        assert all(of_token[number] in ids for number, ids in enumerate(found))
        self.sizes.append(len(kept.ids))


def test_an_update_on_older_samples_trains_over_their_ids(ahead_of):
    """Newer weights would keep others."""
    records = Records()
    setup = ahead_of(truncation={"top_p": 0.9, "top_k": 20}, learning_rate=3e-2)
    agent, points, _ = setup.fit(records)
    staleness = [point["rollout/staleness"] for _, point in points if "rollout/staleness" in point]
    assert staleness == [0.0, 1.0, 1.0] and len(records.sizes) == 3
    agent.check_weights()


class Forgetful(CopyEngine):
    """Does not tell which ids it kept, as servers of vLLM."""

    def collect(self, *, wait=True):
        return [
            (session, dataclasses.replace(one, kept_ids=None, kept_counts=None))
            for session, one in super().collect(wait=wait)
        ]


def test_older_samples_without_their_ids_are_refused(setup_of, ahead_of):
    line = (
        r"^rollout\.iterations_ahead=1 with rollout\.top_p=0\.9: Forgetful does not tell which ids it kept, .*; set "
        r"rollout\.iterations_ahead=0, or sample from all ids$"
    )
    with pytest.raises(RolloutError, match=line):
        ahead_of(engine=Forgetful, truncation={"top_p": 0.9}).fit()
    # the weights that sampled find them again
    setup_of(engine=Forgetful, truncation={"top_p": 0.9}).fit(max_epochs=1)


def test_kept_ids_follow_the_numbers_of_tokens(setup_of):
    """Also where the text that was shown is numbered too."""
    setup = setup_of(window="all", truncation={"top_k": 20})
    agent, datamodule = setup.build()
    responder = datamodule._responder(TransformersEngine(agent.policy), 0)
    responder.version = None
    trajectories = datamodule.proxy.rollout(
        responder, datamodule.episode_specs(0)[:3], seed_key=(0, "test")
    )
    for observations in (False, True):
        batch = collate(trajectories, agent.policy.bundle, observations=observations)
        parts = batch.kept_ids.split(1)
        samples = batch.samples
        for row, column in (samples.turn >= 0).nonzero().tolist():
            ids = parts[int(samples.token[row, column])].ids.tolist()
            was_sampled = int(samples.spans[row, column]) != 5
            assert (len(ids) == 20 and int(samples.input_ids[row, column]) in ids) or not ids
            assert bool(ids) or not was_sampled or observations
        assert sum(len(part.ids) > 0 for part in parts) == sum(
            len(turn.response_ids) for one in trajectories for turn in one.turns
        )
