"""Runs that sample the next iteration while they train, and rollouts in the background."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest
import torch
from support.models.copy_engine import CopyEngine

from ragen_pl.data.ahead import AheadState, RolloutAhead
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.rollout.background import THREAD_NAME, BackgroundRollout
from ragen_pl.rollout.responders import TextResponder


def background_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


class SavesAtEnds(RolloutCallback):
    """Write a checkpoint at the end of each iteration."""

    def __init__(self, folder):
        self.folder, self.files = folder, []

    def on_train_epoch_end(self, trainer, module):
        self.files.append(self.folder / f"{trainer.current_epoch}.ckpt")
        trainer.save_checkpoint(self.files[-1])


class Recorder(RolloutCallback):
    """Record each iteration's trajectories and samples, and the versions of the weights in validations."""

    def __init__(self):
        self.sampled, self.logprobs, self.buffers, self.validated = [], [], [], []
        self.rewarded = []

    def reward(self, trajectories, *, gather):
        self.rewarded.append(len(trajectories))

    def on_rollout_end(self, trainer, module, trajectories):
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        self.sampled.append([turn.response_ids.tolist() for turn in turns])
        self.logprobs.append(np.concatenate([turn.response_logprobs for turn in turns]))
        samples = trainer.datamodule.buffer.samples
        self.buffers.append(samples.old_logprobs[samples.turn >= 0].numpy())

    def on_validation_batch_end(self, trainer, module, *arguments):
        copied = module.rollout_engine().bundle.model.state_dict()
        own = module.policy.bundle.model.state_dict()
        self.validated.append(all(torch.equal(copied[name], own[name]) for name in own))


@pytest.fixture
def ahead_of(setup_of):
    """Return a function that makes a setup one iteration ahead."""
    return functools.partial(setup_of, iterations_ahead=1, engine=CopyEngine)


@pytest.fixture(scope="module")
def run_ahead(setup_of, tmp_path_factory):
    """A run one iteration ahead: what was recorded, the points, and a checkpoint of each iteration's end."""
    recorder, saver = Recorder(), SavesAtEnds(tmp_path_factory.mktemp("ahead"))
    setup = setup_of(iterations_ahead=1, engine=CopyEngine, rewards=(recorder.reward,))
    _, points, _ = setup.fit(recorder, saver)
    return recorder, points, saver.files


def values(points, name):
    return [point[name] for _, point in points if name in point]


# ---- bounds and errors


class Silent(TextResponder):
    """Stops every episode at its first turn."""

    def respond(self, episode):
        return None


@pytest.fixture
def rollout_ahead(ahead_of):
    """Return a function that begins a rollout for an iteration."""
    _, datamodule = ahead_of().build()

    def begin(iteration, *, weights_of, reward=lambda trajectories: None, responder=None):
        ahead = RolloutAhead(1, reward)
        assert ahead.state is AheadState.NONE and ahead.played(iteration) is None
        specs = datamodule.episode_specs(iteration)
        rollout = BackgroundRollout(datamodule.proxy, responder or Silent(), specs, seed_key=(0,))
        ahead.begin(iteration, rollout, weights_of=weights_of)
        return ahead

    return begin
