"""Free-text actions: the environment judges them, names parts of its reward and shows several images."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ragen_pl.environments.manager import EpisodeSpec
from ragen_pl.rewards.shaping import WeightTerms
from ragen_pl.trajectory import EpisodeStatus

ECHO = "test/Echo-v0"


class Echo(gymnasium.Env):
    """Say the word of the seed: in letters of the alphabet, else the action is invalid."""

    action_space = spaces.Text(20)
    observation_space = spaces.Text(20)
    instructions = "Say the word."

    def __init__(self, images=0, parts=None):
        self.images, self.parts = images, parts

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.said = []
        return self._see(), {}

    def step(self, action):
        self.said.append(action)
        valid = action.isalpha()
        right = action == "lake || sea"
        reward = 0.75 if right else 0.0
        parts = {"word": 1.0, "length": -0.25} if right else {}
        info = {"success": right, "action_is_valid": valid or right}
        info["reward_parts"] = parts if self.parts is None else self.parts
        return self._see(), reward, right, False, info

    def _see(self):
        text = f"said {len(self.said)}"
        if not self.images:
            return text
        return {
            "text": text,
            "images": [np.full((64, 64, 3), 9 * n, np.uint8) for n in range(self.images)],
        }


if ECHO not in gymnasium.registry:
    gymnasium.register(id=ECHO, entry_point=Echo)


def answers(*texts):
    return lambda slot, turn: f"<think></think><answer>{texts[turn]}</answer>"


def played(play, write, **settings):
    (episode,), _ = play(
        ECHO, [EpisodeSpec(group=0, member=0, seed=3)], write, max_turns=3, **settings
    )
    return episode


def test_the_whole_answer_is_one_action(play):
    episode = played(play, answers("lake || sea"), max_actions_per_turn=4)
    (turn,) = episode.turns
    assert turn.actions == ["lake || sea"] and turn.action_is_valid and episode.success


def test_parts_of_the_reward_are_named_and_weighted_together(play):
    episode = played(play, answers("lake || sea"))
    (turn,) = episode.turns
    assert turn.reward_terms == {"environment/word": 1.0, "environment/length": -0.25}
    WeightTerms(final=2.0)([episode], gather=lambda own: [own])
    assert turn.reward == 1.5


@pytest.mark.parametrize("parts", [{"word": 1.0}, {"word": "much"}, 3.0, {"word": float("nan")}])
def test_parts_that_are_not_the_reward_fail_the_episode(play, parts):
    episode = played(play, answers("lake || sea"), kwargs={"parts": parts})
    assert episode.status is EpisodeStatus.FAILED


@pytest.mark.parametrize("answer", ["lake 7", "a" * 21], ids=["judged", "too long"])
def test_an_invalid_action_costs_the_penalty_and_ends_the_episode(play, answer):
    episode = played(play, answers(answer), format_penalty=0.25)
    (turn,) = episode.turns
    assert not turn.action_is_valid and turn.reward == -0.25
    assert (episode.status, episode.success) == (EpisodeStatus.TERMINATED, False)


def test_an_invalid_action_need_not_end_the_episode(play):
    episode = played(play, answers("7", "sea", "lake || sea"), invalid_ends=False)
    assert [turn.action_is_valid for turn in episode.turns] == [False, True, True]
    # the environment saw the invalid action too
    assert [turn.observation.text for turn in episode.turns] == ["said 0", "said 1", "said 2"]
    assert episode.success


def test_an_empty_answer_never_reaches_the_environment(play):
    episode = played(play, answers("  ", "sea", "sea"), invalid_ends=False)
    assert [turn.observation.text for turn in episode.turns] == ["said 0", "said 0", "said 1"]


def test_instructions_do_not_ask_for_names(play):
    _, engine = play(ECHO, [EpisodeSpec(group=0, member=0, seed=0)], answers("lake || sea"))
    manager = engine.proxy.environments
    (slot,) = manager.open([EpisodeSpec(group=0, member=0, seed=0)])
    text = manager.instructions(slot)
    assert "whole text" in text and "by name" not in text and "name of one action" not in text


def test_several_images_of_an_observation_are_in_the_prompt(play, vlm):
    episode = played(play, answers("lake || sea"), bundle=vlm, kwargs={"images": 2})
    (turn,) = episode.turns
    assert [int(image.max()) for image in turn.prompt_images] == [0, 9]
