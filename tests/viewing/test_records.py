"""Records hold an episode token by token, and reading a file returns what was written."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.episodes.call_trees import after, call, episode
from support.episodes.trajectories import make_trajectory, make_turn, roll_out, starts

from ragen_pl.algorithms.advantages.gae import MaskedGAE
from ragen_pl.algorithms.masks import sampled
from ragen_pl.base.records import (
    ImageFiles,
    Origin,
    read_records,
    to_record,
    write_episodes,
    write_records,
)
from ragen_pl.data.batch import CreditLayout
from ragen_pl.data.collate import collate
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.modules.credit import assign_credit, write_credit
from ragen_pl.modules.masking import Masks, compute_token_masks
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.conversation import Conversation
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.trajectory import EpisodeStatus, Observation, Trajectory
from ragen_pl.viewing.token_credit import token_credit


@pytest.fixture(scope="module")
def played(proxy: AgentProxy) -> list[Trajectory]:
    engine = TransformersEngine(PolicyModule(proxy.context.bundle))
    return roll_out(proxy, engine, starts(2, 2), seed_key=("test",))


def test_record_holds_the_episode(
    played: list[Trajectory], proxy: AgentProxy, tmp_path: Path
) -> None:
    images = ImageFiles(tmp_path)
    origin = Origin(validation_set="p")
    records = [
        to_record(trajectory, reader=proxy.context, images=images, origin=origin)
        for trajectory in played
    ]
    read = list(read_records(write_records(records, tmp_path)))
    assert read == json.loads(json.dumps(records)) and len(read) == 4
    assert [(record["group"], record["member"]) for record in read] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    for record, trajectory in zip(read, played, strict=True):
        assert record["return"] == trajectory.reward and record["validation_set"] == "p"
        for recorded, turn in zip(record["turns"], trajectory.turns, strict=True):
            assert recorded["prompt_ids"] == turn.prompt_ids.tolist()
            assert recorded["response_ids"] == turn.response_ids.tolist()
            assert np.float32(recorded["logprobs"]).tolist() == turn.response_logprobs.tolist()
            assert (
                "".join(recorded["response_pieces"]) == recorded["response"] == turn.response_text
            )
            assert recorded["prompt_text"].count("<image>") == len(recorded["prompt_images"])
            with Image.open(tmp_path / recorded["images"][0]) as image:
                assert (np.asarray(image) == turn.observation.images[0]).all()
    # The members of a group see the same first image, which is written once.
    seen = {name for record in read for turn in record["turns"] for name in turn["prompt_images"]}
    assert len(list((tmp_path / "images").iterdir())) == len(seen)
    assert read[0]["turns"][0]["images"] == read[1]["turns"][0]["images"]


def test_any_info_of_an_environment_can_be_written(tmp_path: Path) -> None:
    endless: list[object] = []
    endless.append(endless)
    info = {
        "grid": {(0, 1): "hole"}, "counts": {np.int64(3): 1}, "text": "a\udc80", "list": endless, "large": 10**5000,
        "array": np.arange(2), "nan": np.float32("nan"), (1, 2): 3,
    }  # fmt: skip
    write_episodes([make_trajectory(make_turn(info=info))], tmp_path)
    (read,) = read_records(tmp_path / "trajectories.jsonl")
    found = read["turns"][0]["info"]
    assert found.pop("large").startswith("(no text: ")
    assert found == {
        "grid": "{(0, 1): 'hole'}", "counts": str({np.int64(3): 1}), "text": "a?", "list": "[[...]]", "array": [0, 1],
        "nan": None, "(1, 2)": 3,
    }  # fmt: skip


def test_an_image_that_a_killed_process_has_cut_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = np.full((4, 4, 3), 7, np.uint8)

    def cut(_: object, file: Path, **__: object) -> None:
        file.write_bytes(b"\x89PNG")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Image.Image, "save", cut)
        ImageFiles(tmp_path).name(image)
    with Image.open(tmp_path / ImageFiles(tmp_path).name(image)) as read:
        assert np.array_equal(np.asarray(read), image)


def test_each_image_of_a_prompt_has_a_place_in_its_text(proxy: AgentProxy, tmp_path: Path) -> None:
    context, talk = proxy.context, Conversation(system=None)
    pair = [np.full((64, 64, 3), shade, np.uint8) for shade in (50, 200)]
    prompt = context.observe(talk, Observation(text="now", images=pair), max_turns=9)
    whole = make_turn(prompt_ids=prompt.ids, prompt_images=pair)
    # some patches of the first image
    left_out = np.flatnonzero(prompt.ids == context.bundle.image_token_id)[:3]
    count = context.bundle.num_image_tokens(pair[0])
    some = make_turn(
        prompt_ids=np.delete(prompt.ids, left_out),
        prompt_images=pair,
        prompt_patches=[np.arange(3, count), np.arange(count)],
    )
    record = to_record(make_trajectory(whole, some), reader=context, images=ImageFiles(tmp_path))
    for turn in record["turns"]:
        assert turn["prompt_text"].count("<image><image>") == 1
        assert turn["prompt_text"].count("<image>") == len(turn["prompt_images"]) == 2


def test_token_credit_belongs_to_its_tokens(played: list[Trajectory], proxy: AgentProxy) -> None:
    failed = make_trajectory(group=9, status=EpisodeStatus.FAILED, error="broke")
    trajectories = [played[0], failed, *played[1:]]
    batch = collate(trajectories, proxy.context.bundle)
    masks = Masks(loss=partial(sampled), advantage=partial(sampled))
    layout = CreditLayout.of(batch)
    kept = compute_token_masks(batch, layout, masks, kl=None)
    batch.samples.values = torch.rand_like(batch.samples.values)
    estimator = MaskedGAE(gamma=0.9, lam=0.9)
    estimates = assign_credit(batch, layout, kept, estimator, whiten_advantages=False)
    write_credit(batch.samples, layout, kept, estimates)
    credit = token_credit(batch, trajectories)
    assert credit[1] is None
    flat = [tokens for tokens in credit if tokens is not None]
    sizes = [sum(len(turn.response_ids) for turn in trajectory.turns) for trajectory in played]
    assert [len(tokens.values) for tokens in flat] == sizes
    # The first sampled token of the third episode.
    number = sum(sizes[:2])
    place = batch.samples.token == number
    assert flat[2].advantages[0] == batch.samples.advantages[place].item()
    record = to_record(played[2], credit=flat[2])
    assert record["turns"][0]["values"][0] == batch.samples.values[place].item()
    turns = record["turns"]
    assert [len(turn["loss_mask"]) for turn in turns] == [
        len(turn["response_ids"]) for turn in turns
    ]
    without_critic = to_record(played[2], credit=token_credit(batch, trajectories, values=False)[3])
    assert "values" not in without_critic["turns"][0] and "advantages" in without_critic["turns"][0]
    assert token_credit(None, trajectories) == [None] * 5


def test_untrained_turns_have_no_credit(proxy: AgentProxy) -> None:
    judge = call([20], [30, 31], trained=False)
    first = call(after(judge, 40), [32], is_task_step=False)
    played = episode(judge, first, call([21], [33, 34], reward=1.0))
    batch = collate([played], proxy.context.bundle)
    batch.samples.values[batch.samples.token >= 0] = batch.samples.token[
        batch.samples.token >= 0
    ].float()
    (credit,) = token_credit(batch, [played])
    turns = to_record(played, credit=credit)["turns"]
    assert [turn.get("values") for turn in turns] == [None, [0.0], [1.0, 2.0]]
    assert [turn["trained"] for turn in turns] == [False, True, True]
    assert [turn["advances"] for turn in turns] == [True, False, True]


def test_reading_an_invalid_record_fails(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"schema": 99}\n')
    with pytest.raises(ValueError, match="line 1: found schema 99, expected 2"):
        list(read_records(file))
    file.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1: expected a record, found 'nonsense"):
        list(read_records(file))
