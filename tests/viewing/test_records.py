"""Records hold what was played, id for id, and survive the way to disk and back."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ragen_pl.algorithms.advantages.gae import MaskedGAE
from ragen_pl.algorithms.masks import sampled
from ragen_pl.data.collate import collate
from ragen_pl.modules.credit import assign_credit
from ragen_pl.modules.losses import Masks
from ragen_pl.modules.masking import apply_masks
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.rollout.environments import EpisodeSpec
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.transformers_engine import TransformersEngine
from ragen_pl.trajectory import EpisodeStatus, Trajectory
from ragen_pl.viewing.records import (
    ImageFiles,
    Origin,
    read_records,
    to_record,
    write_records,
)
from ragen_pl.viewing.token_credit import token_credit


@pytest.fixture(scope="module")
def played(proxy: AgentProxy) -> list[Trajectory]:
    engine = TransformersEngine(PolicyModule(proxy.context.bundle))
    starts = [EpisodeSpec(group=g, member=m, seed=g) for g in range(2) for m in range(2)]
    return proxy.rollout(engine, starts, seed_key=("test",))


def test_a_record_is_what_was_played(
    played: list[Trajectory], proxy: AgentProxy, tmp_path: Path
) -> None:
    images = ImageFiles(tmp_path)
    records = [
        to_record(one, reader=proxy.context, images=images, origin=Origin(validation_set="p"))
        for one in played
    ]
    read = list(read_records(write_records(records, tmp_path)))
    assert read == json.loads(json.dumps(records)) and len(read) == 4
    assert [(one["group"], one["member"]) for one in read] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for record, trajectory in zip(read, played, strict=True):
        assert record["return"] == trajectory.reward and record["validation_set"] == "p"
        for said, turn in zip(record["turns"], trajectory.turns, strict=True):
            assert said["prompt_ids"] == turn.prompt_ids.tolist()
            assert said["response_ids"] == turn.response_ids.tolist()
            assert np.float32(said["logprobs"]).tolist() == turn.response_logprobs.tolist()
            assert "".join(said["response_pieces"]) == said["response"] == turn.response_text
            assert said["prompt_text"].count("<image>") == len(said["prompt_images"])
            with Image.open(tmp_path / said["images"][0]) as image:
                assert (np.asarray(image) == turn.observation.images[0]).all()
    # two members see one start, and an image is written once
    seen = {name for one in read for turn in one["turns"] for name in turn["prompt_images"]}
    assert len(list((tmp_path / "images").iterdir())) == len(seen)
    assert read[0]["turns"][0]["images"] == read[1]["turns"][0]["images"]


def test_credit_is_laid_over_the_tokens_it_belongs_to(
    played: list[Trajectory], proxy: AgentProxy
) -> None:
    failed = Trajectory(
        group=9,
        member=0,
        seed=0,
        turns=[],
        status=EpisodeStatus.FAILED,
        success=False,
        error="broke",
    )
    every = [played[0], failed, *played[1:]]
    batch = collate(every, proxy.context.bundle)
    masks = Masks(loss=partial(sampled), advantage=partial(sampled))
    apply_masks(batch, masks, kl=None)
    batch.samples.values = torch.rand_like(batch.samples.values)
    assign_credit(batch, MaskedGAE(gamma=0.9, lam=0.9), whiten_advantages=False)
    credit = token_credit(batch, every)
    assert credit[1] is None
    flat = [one for one in credit if one is not None]
    sizes = [sum(len(turn.response_ids) for turn in one.turns) for one in played]
    assert [len(one.values) for one in flat] == sizes
    # the first sampled token of the third episode, found by hand in the samples
    number = sum(sizes[:2])
    place = batch.samples.token == number
    assert flat[2].advantages[0] == batch.samples.advantages[place].item()
    record = to_record(played[2], credit=flat[2])
    assert record["turns"][0]["values"][0] == batch.samples.values[place].item()
    turns = record["turns"]
    assert [len(turn["loss_mask"]) for turn in turns] == [
        len(turn["response_ids"]) for turn in turns
    ]
    uncritical = to_record(played[2], credit=token_credit(batch, every, values=False)[3])
    assert "values" not in uncritical["turns"][0] and "advantages" in uncritical["turns"][0]
    assert token_credit(None, every) == [None] * 5


def test_what_is_no_record_is_told(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"schema": 99}\n')
    with pytest.raises(ValueError, match="line 1: found schema 99, expected 1"):
        list(read_records(file))
    file.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1: expected a record, found 'nonsense"):
        list(read_records(file))
