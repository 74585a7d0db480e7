"""Answers of environments: a value of another type than the protocol's is refused and never guessed at."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from ragen_pl.environments.answers import AnswerReader
from ragen_pl.trajectory import AnswerOutcome

READER = AnswerReader(target="mine.Env")
SOUND = {"reward": 1.0, "terminated": False, "truncated": False, "info": {}}


def read(*, reward_range=None, **changes):
    answer = SOUND | changes
    return READER.step(("text", *answer.values()), reward_range=reward_range)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"info": {"success": "no"}}, "info['success']='no'; expected true or false"),
        ({"info": {"success": None}}, "info['success']=None; expected true or false"),
        ({"info": {"success": 0.5}}, "info['success']=0.5; expected true or false"),
        ({"info": {"action_is_valid": "yes"}}, "info['action_is_valid']='yes'; expected true"),
        ({"info": {"action_is_effective": [1]}}, "info['action_is_effective']=[1]; expected true"),
        ({"terminated": "False"}, "terminated='False'; expected true or false"),
        ({"truncated": np.zeros(2)}, "truncated=array([0., 0.]); expected true or false"),
        ({"reward": "1.0"}, "reward '1.0'; expected a finite number"),
        ({"reward": None}, "reward None; expected a finite number"),
        ({"reward": [[1.0], 2.0]}, "reward [[1.0], 2.0]; expected a finite number"),
        ({"reward": float("inf")}, "reward inf; expected a finite number"),
        ({"reward": np.float32("nan")}, "reward nan; expected a finite number"),
        ({"reward": 1.1, "reward_range": (0.0, 1.0)}, "reward 1.1, outside of its reward_range=(0, 1)"),
        ({"info": {"reward_parts": {"a": "1.0"}}}, "expected named numbers that sum to the reward"),
        ({"info": {"reward_parts": {"a": 0.5}}}, "expected named numbers that sum to the reward"),
        ({"reward": 1e30}, "reward 1e+30; expected a number below 1e+30, so that sums of rewards stay finite"),
        ({"reward": -1e300}, "reward -1e+300; expected a number below 1e+30"),
        (
            {"reward": 0.0, "info": {"reward_parts": {"a": 1e300, "b": -1e300}}},
            "info['reward_parts']['a']=1e+300; expected a number below 1e+30",
        ),
        (
            {"reward": 1.0, "info": {"reward_parts": {"a": 1.0, "b": 1e30, "c": -1e30}}},
            "info['reward_parts']['b']=1e+30; expected a number below",
        ),
        (
            {"info": {"reward_parts": {"a": float("inf"), "b": -float("inf")}}},
            "info['reward_parts']['a']=inf; expected a finite number",
        ),
        ({"info": {"reward_parts": {"a": np.float32("nan")}}}, "['a']=nan; expected a finite number"),
        ({"info": {"metrics": {"a": float("nan")}}}, "info['metrics']={'a': nan}; expected finite numbers by name"),
        ({"info": {"metrics": 1.0}}, "info['metrics']=1.0; expected finite numbers by name"),
        ({"info": None}, "step returned (str, float, bool, bool, NoneType), expected (observation"),
    ],
)  # fmt: skip
def test_values_of_other_types_are_refused(changes, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        read(**changes)


@pytest.mark.parametrize("one", [True, np.True_, 1, 1.0, np.float32(1), torch.tensor(1.0)])
def test_numbers_and_truth_values_of_libraries_are_taken(one):
    named = {"reward_parts": {"a": one}, "metrics": {"a": one}}
    step = read(reward=one, terminated=one, info={"success": one, **named})
    assert step.info["metrics"] == {"a": 1.0}
    assert step.reward_terms == {"environment/a": 1.0} and step.terminated is step.success is True
    assert read(reward_range=(0.0, 1.0), reward=one).reward_terms == {"environment": 1.0}


def test_what_info_leaves_out_has_defaults():
    step = read()
    assert (step.success, step.action_is_valid, step.action_is_effective) == (None, True, True)


def test_only_a_typed_outcome_is_taken_out_of_info():
    outcome, own = AnswerOutcome(delivered=False), {AnswerOutcome.KEY: {"delivered": False}}
    step = read(info={AnswerOutcome.KEY: outcome, "delivered": 3})
    assert step.answer is outcome and step.info == {"delivered": 3}
    assert read(info=own).info == own and read(info=own).answer.delivered


GRAY = np.arange(84 * 60, dtype=np.uint8).reshape(84, 60)


@pytest.mark.parametrize("shown", [GRAY, GRAY[..., None], Image.fromarray(GRAY)])
def test_a_gray_image_is_read_in_three_equal_channels(shown):
    (image,) = READER.observation({"text": "see", "image": shown}).images
    assert image.shape == (84, 60, 3) and (image == GRAY[..., None]).all()


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        (np.zeros((0, 16, 3), np.uint8), "shape (0, 16, 3)"),
        (np.zeros((16, 0), np.uint8), "shape (16, 0)"),
        (np.zeros((3, 8, 8), np.uint8), "shape (3, 8, 8)"),
        (np.zeros((8, 8), np.float32), "type float32"),
        (np.zeros(8, np.uint8), "shape (8,)"),
    ],
)
def test_other_images_are_refused(shown, found):
    with pytest.raises(TypeError, match=re.escape(found)):
        READER.observation({"text": "see", "image": shown})


def test_a_turn_may_have_no_image():
    for raw in ("dark", {"text": "dark", "images": []}):
        assert READER.observation(raw).images == []
    # a misspelt key is not a turn without one
    found = (
        "an observation of type dict with ['text', 'img']; .*, empty in a turn without an image)"
    )
    with pytest.raises(TypeError, match=re.escape(found).replace(r"\.\*", ".*")):
        READER.observation({"text": "dark", "img": GRAY})


def test_an_unknown_answer_of_a_reset_is_refused():
    with pytest.raises(TypeError, match=r"reset returned a str, expected \(observation, info\)"):
        READER.reset("text")
