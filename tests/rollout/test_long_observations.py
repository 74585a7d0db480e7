"""Observations that are longer than the context."""

from __future__ import annotations

import time

import gymnasium
import numpy as np
import pytest
import torch
from support.episodes.rollout_fixtures import TextEngine
from support.episodes.trajectories import starts

from ragen_pl.data.collate import collate
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.metrics.rollout import rollout_metrics
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.scorer import Scorer
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.trajectory import EpisodeStatus

LIMIT = 256


class Book(gymnasium.Env):
    """Shows a page of so many words after its second action."""

    action_names = ("Read",)
    instructions = "Read."
    action_space = gymnasium.spaces.Discrete(1)
    observation_space = gymnasium.spaces.Text(100)

    def __init__(
        self, words: int = 0, cut: bool = False, word: str = "far ", images: int = 0
    ) -> None:
        self.words, self.cut, self.word, self.images = words, cut, word, images

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.page = 0
        return self.seen("a cover", 1), {}

    def seen(self, text: str, images: int) -> str | dict[str, object]:
        if not self.images:
            return text
        return {"text": text, "images": [np.zeros((32, 32, 3), np.uint8)] * images}

    def step(self, action):
        self.page += 1
        is_long = self.page == 2
        seen = self.seen(
            self.word * self.words if is_long else "a page", self.images if is_long else 1
        )
        return seen, 0.0, False, self.cut and is_long, {"success": False}


def played(lm, *, window="all", **book):
    context = ContextManager(lm, window=window, system_prompt=None, max_tokens=LIMIT)
    proxy = AgentProxy(
        environments=EnvironmentManager(target=f"{__name__}.Book", kwargs=book, max_turns=4),
        context=context,
        max_response_tokens=64,
    )
    engine = TextEngine(context, lambda session, turn: "<think>a</think><answer>Read</answer>")
    responder = EngineResponder(engine=engine, context=context)
    return proxy.rollout(responder, starts(1), seed_key=(0, "test"))


@pytest.mark.parametrize("window", [1, 2, "all"])
@pytest.mark.parametrize("cut", [False, True], ids=["by the context", "by the environment"])
@pytest.mark.parametrize("shown", ["words", "images"])
def test_a_cut_episode_bootstraps_from_the_last_state_that_fits(lm, vlm, window, cut, shown):
    bundle = lm if shown == "words" else vlm
    (episode,) = trajectories = played(bundle, window=window, cut=cut, **{shown: 5000})
    assert episode.status is EpisodeStatus.TRUNCATED and len(episode.turns) == 2
    assert np.array_equal(episode.final_prompt_ids, episode.turns[-1].prompt_ids)
    assert len(episode.final_prompt_ids) <= LIMIT
    assert rollout_metrics(trajectories)["truncated"] == 1.0
    batch = collate(trajectories, bundle)
    critic = CriticModule(bundle.hidden_size)
    with torch.no_grad():
        critic.head.layers[-1].bias.fill_(0.25)
        Scorer(PolicyModule(bundle), critic, None, UpdateLoss(), None).bootstrap(
            batch, tokens_per_forward=1024
        )
    assert batch.final.input_ids.shape[1] <= LIMIT and batch.episodes.bootstrap.tolist() == [0.25]


def test_a_state_that_fits_without_room_for_a_response_is_kept(lm):
    episode = next(
        episode
        for words in range(20, 200, 10)
        for episode in played(lm, words=words)
        if episode.status is EpisodeStatus.TRUNCATED
    )
    assert LIMIT - 64 < len(episode.final_prompt_ids) <= LIMIT
    assert not np.array_equal(episode.final_prompt_ids, episode.turns[-1].prompt_ids)


@pytest.mark.parametrize("word", ["far ", "é", "<|im_end|>", "\n"])
def test_work_on_an_observation_is_bounded(lm, word):
    """Processor time: a hundred times the text costs about as much."""

    def seconds(words: int) -> float:
        start = time.process_time()
        (episode,) = played(lm, words=words, word=word)
        assert episode.status is EpisodeStatus.TRUNCATED
        return time.process_time() - start

    seconds(30_000)
    assert seconds(3_000_000) < 1.0 + 5.0 * seconds(30_000)
