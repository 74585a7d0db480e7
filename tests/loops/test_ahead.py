"""`iterations_ahead=1`: the rollout of an iteration is sampled while the iteration before it trains."""

from __future__ import annotations

import threading
import time

import lightning.pytorch as pl
import numpy as np
import pytest
from support.models.copy_engine import CopyEngine
from support.runs.rollouts_ahead import (
    Recorder,
    SavesAtEnds,
    Silent,
    background_threads,
    values,
)

from envs.frozen_lake import FrozenLake
from ragen_pl.data.ahead import AheadState, RolloutAhead
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.settings import IterationSettings
from ragen_pl.engines.errors import RolloutError
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.rollout.background import THREAD_NAME, BackgroundRollout
from ragen_pl.rollout.responders import TextResponder


def in_background() -> bool:
    return threading.current_thread().name == THREAD_NAME


class SlowEngine(CopyEngine):
    """Continuous engine whose responses in the background each take one of `go`, or never come without it."""

    continuous = True
    go: threading.Semaphore | None = None

    def submit(self, requests, *, keep):
        super().submit(requests, keep=keep)
        self.last = time.monotonic() + 300

    def collect(self, *, wait=True):
        if in_background():
            if self.go is not None and time.monotonic() > self.last:
                raise TimeoutError("no step of the optimizer beside this rollout")
            # a wait, since a loop without one slows down the training that it waits for
            if self.go is None or not self.go.acquire(timeout=0.05):
                return []
        return super().collect(wait=wait)


@pytest.fixture(scope="module")
def run_beside(setup_of):
    """The same run with present weights: what was recorded, and the points."""
    recorder = Recorder()
    _, points, _ = setup_of(engine=CopyEngine).fit(recorder)
    return recorder, points


# ---- what is sampled, and when


def test_a_rollout_is_sampled_while_the_iteration_before_it_trains(ahead_of):
    """No response of a rollout ahead comes before an optimizer step of the iteration before."""

    class Steps(RolloutCallback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx < 3:  # one step for each turn, and none left for the next rollout
                SlowEngine.go.release()

    SlowEngine.go = threading.Semaphore(0)
    try:
        # 4 steps in each of three iterations, and 3 turns in each of two rollouts ahead
        _, points, trainer = ahead_of(engine=SlowEngine).fit(Steps())
    finally:
        SlowEngine.go = None
    assert trainer.global_step == 12
    assert values(points, "rollout/staleness") == [0.0, 1.0, 1.0]


def test_a_rollout_has_the_weights_before_the_update_it_runs_beside(
    setup_of, run_ahead, run_beside
):
    """Its trajectories are those of weights that were never updated."""
    (ahead, _, _), (present, _), never = run_ahead, run_beside, Recorder()
    setup_of(learning_rate=0.0).fit(never, max_epochs=2)
    assert ahead.sampled[0] == present.sampled[0] == never.sampled[0]
    assert ahead.sampled[1] == never.sampled[1] != present.sampled[1]
    assert np.array_equal(ahead.logprobs[1], never.logprobs[1])


def test_validations_have_the_present_weights(run_ahead):
    # two batches before the first iteration and after each
    assert run_ahead[0].validated == [True] * 8


def test_rewards_are_given_once(run_ahead):
    """Also where checkpoints wait for the rollouts."""
    assert run_ahead[0].rewarded == [12] * 3


def test_0_is_a_run_without_it(setup_of, run_beside):
    """An engine that could sample ahead gives the bits of the one that can't, whose critic has a pass too."""
    _, points, _ = setup_of(scoring="always").fit()
    assert points == run_beside[1] and not values(points, "rollout/staleness")


def test_the_last_iteration_begins_no_other(ahead_of):
    begun = []

    class Counted(CopyEngine):
        def submit(self, requests, *, keep):
            begun.append(in_background())
            super().submit(requests, keep=keep)

    for limit in ({"max_epochs": 1}, {"max_epochs": -1, "max_steps": 4}):
        ahead_of(engine=Counted).fit(**limit)
    assert begun and not any(begun)


# ---- the correction for older weights


def test_stale_samples_are_corrected_for(run_ahead):
    """The ratio of the loss is taken to the trainer's log-probs, where the engine's are of older weights."""
    recorder, points, _ = run_ahead
    gap = values(points, "rollout/logprob_mismatch_max")
    assert gap[0] < 1e-4 < 0.01 < min(gap[1:])
    changed = [
        np.abs(np.sort(samples) - np.sort(engine)).max()
        for samples, engine in zip(recorder.buffers, recorder.logprobs, strict=True)
    ]
    assert changed[0] < 1e-4 < 0.01 < min(changed[1:])


def test_a_loss_without_the_correction_is_refused(ahead_of):
    with pytest.raises(ValueError, match=r"^algorithm\.loss\.mismatch=null: .*; set auto, or roll"):
        ahead_of(mismatch=None).fit()


def test_an_engine_with_the_weights_that_are_trained_is_refused(setup_of):
    refused = r"^rollout\.iterations_ahead=1: TransformersEngine can't sample while .*; set rollout"
    with pytest.raises(ValueError, match=refused):
        setup_of(iterations_ahead=1).fit()


def test_a_module_that_lends_no_engine_is_refused(ahead_of):
    class Lent:
        def __init__(self, agent):
            self.rollout_engine, self.global_step = agent.rollout_engine, 0

        def prepare(self, batch):
            return batch

    agent, datamodule = ahead_of().build()
    agent.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(
        TypeError, match=r"Lent has no async_rollout_engine; give it one .*, or set iterat"
    ):
        datamodule.collect(0, Lent(agent))


def test_a_context_that_reads_the_trained_weights_is_refused(ahead_of):
    _, datamodule = ahead_of().build()
    datamodule.proxy.context.leave_out = {"turns": 0.5}
    with pytest.raises(ValueError, match="iterations_ahead=1: leave_out scores prompts with the w"):
        RolloutDataModule(datamodule.proxy, iteration=IterationSettings(iterations_ahead=1))


class Echo(TextResponder):
    """Answers."""

    def respond(self, episode):
        return "<think></think><answer>Up</answer>"


class Defective(TextResponder):
    """Raises an error."""

    def respond(self, episode):
        raise RuntimeError("broken")


def test_a_rollout_is_under_way_until_it_is_played_or_has_failed(rollout_ahead):
    ahead = rollout_ahead(1, weights_of=0)
    assert ahead.state is AheadState.UNDER_WAY
    ahead.wait()
    assert ahead.state is AheadState.PLAYED and ahead.played(1) is ahead.played(1)
    ahead.drop()
    assert ahead.state is AheadState.NONE
    broken = rollout_ahead(1, weights_of=0, responder=Defective())
    broken.wait()
    assert broken.state is AheadState.FAILED and broken.state_dict() is None
    with pytest.raises(RuntimeError, match="broken"):
        broken.played(1)
    assert broken.state is AheadState.NONE


def test_a_rollout_is_dropped_once_its_environments_are_free(ahead_of, monkeypatch):
    """The next one plays in the same environments."""
    _, datamodule = ahead_of().build()
    gate, entered = threading.Event(), threading.Event()
    step = FrozenLake.step

    def waits(*arguments):
        entered.set()
        gate.wait()
        return step(*arguments)

    monkeypatch.setattr(FrozenLake, "step", waits)
    ahead = RolloutAhead(1, lambda trajectories: None)
    specs = datamodule.episode_specs(2)
    first = BackgroundRollout(datamodule.proxy, Echo(), specs, seed_key=(0,), end_s=0.01)
    ahead.begin(2, first, weights_of=1)
    entered.wait()
    threading.Timer(0.5, gate.set).start()
    ahead.drop(wait=True)
    assert background_threads() == []
    again = BackgroundRollout(datamodule.proxy, Silent(), specs, seed_key=(0,)).result()
    assert len(again) == len(specs)


@pytest.mark.parametrize(("iteration", "weights_of"), [(3, 2), (2, 0), (2, 3)])
def test_another_iteration_or_older_weights_are_refused(rollout_ahead, iteration, weights_of):
    assert len(rollout_ahead(2, weights_of=1).played(2).trajectories) == 12
    refused = rollout_ahead(iteration, weights_of=weights_of)
    with pytest.raises(RolloutError, match=rf"iteration 2 got a rollout for iteration {iteration}"):
        refused.played(2)


def test_progress_ends_once_with_all_episodes_done(rollout_ahead):
    calls = []
    rollout_ahead(1, weights_of=0).played(1, progress=lambda *counts: calls.append(counts))
    assert calls[-1] == (12, 12) and calls.count((12, 12)) == 1


class Broken(CopyEngine):
    """Fails in the background."""

    def collect(self, *, wait=True):
        if in_background():
            raise RuntimeError("the server is on fire")
        return super().collect(wait=wait)


def test_an_error_of_the_rollout_is_raised_when_it_is_collected(ahead_of, tmp_path):
    """The iteration before it ends, with a checkpoint from which the rollout is sampled again."""
    saver = SavesAtEnds(tmp_path)
    with pytest.raises(RuntimeError, match="the server is on fire"):
        ahead_of(engine=Broken).fit(saver)
    assert len(saver.files) == 1 and background_threads() == []
    _, points, trainer = ahead_of().fit(ckpt_path=str(saver.files[0]))
    assert trainer.current_epoch == 3 and values(points, "rollout/staleness") == [0.0, 1.0]


def test_an_error_of_the_update_stops_the_rollout(ahead_of):
    class Fails(RolloutCallback):
        def on_train_batch_end(self, *arguments):
            assert len(background_threads()) == 1
            raise RuntimeError("out of memory")

    # responses never come
    with pytest.raises(RuntimeError, match="out of memory"):
        ahead_of(engine=SlowEngine).fit(Fails())
    assert background_threads() == []


def test_a_stopped_run_stops_the_rollout(ahead_of):
    class Stops(RolloutCallback):
        def on_train_batch_end(self, trainer, *arguments):
            trainer.should_stop = True
            trainer.limit_val_batches = 0

    ahead_of(engine=SlowEngine, trainer={"limit_val_batches": 0}).fit(Stops())
    assert background_threads() == []


def test_a_rollout_of_weights_that_were_rolled_back_is_dropped(ahead_of):
    class RollsBack(RolloutCallback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                trainer.datamodule.drop_ahead()

    _, points, _ = ahead_of().fit(RollsBack(), max_epochs=2)
    assert values(points, "rollout/staleness") == [0.0, 0.0]
