"""Checkpoints with the rollout of a later iteration."""

from __future__ import annotations

import os
import pickle
import signal

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.runs.rollouts_ahead import background_threads, values

from ragen_pl.callbacks.checkpoint import RunCheckpoint
from ragen_pl.engines.errors import RolloutError
from ragen_pl.loops.hooks import RolloutCallback

# ---- resume


@pytest.mark.parametrize(
    ("hook", "held"), [("on_train_batch_end", [2]), ("on_rollout_progress", [1])]
)
def test_a_signal_saves_the_rollout_ahead(ahead_of, run_ahead, tmp_path, hook, held):
    """In the second iteration: in its update, and where it waits for its rollout."""

    class Signals(RolloutCallback):
        def signal(self, trainer, *arguments):
            if trainer.current_epoch == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def fit(*callbacks, **settings):
        checkpoint = RunCheckpoint(dirpath=str(tmp_path))
        return ahead_of().fit(*callbacks, checkpoint, enable_checkpointing=True, **settings)

    signals = Signals()
    setattr(signals, hook, signals.signal)
    with pytest.raises(SIGTERMException):
        fit(signals)
    assert background_threads() == []
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["RolloutDataModule"]
    assert [pickle.loads(part.numpy().tobytes()).iteration for part in state["ahead"]] == held
    _, points, _ = fit(ckpt_path=str(tmp_path / "last.ckpt"))
    assert len(points) == 4 and points == run_ahead[1][-4:]


def test_a_checkpoint_resumes_without_rollouts_ahead(ahead_of, run_ahead, caplog):
    with caplog.at_level("INFO"):
        _, points, _ = ahead_of(iterations_ahead=0).fit(ckpt_path=str(run_ahead[2][1]))
    assert "the rollout ahead in the checkpoint is sampled again" in caplog.text
    assert not values(points, "rollout/staleness")


def test_a_rollout_is_shared_out_among_other_ranks(rollout_ahead):
    """Two ranks' rollouts, resumed on one."""
    ahead = rollout_ahead(1, weights_of=0)
    (whole,) = ahead.state_dict()
    expected = [(one.group, one.member) for one in ahead.played(1).trajectories]
    parts = []
    for rank in range(2):
        ahead.load_state_dict([whole])
        played = ahead.played(1)
        played.trajectories = [one for one in played.trajectories if one.group % 2 == rank]
        parts += ahead.state_dict()
    ahead.load_state_dict(parts)
    assert [(one.group, one.member) for one in ahead.played(1).trajectories] == expected


class Asked(list):
    """Parts of a checkpoint, with the numbers of those that were asked for."""

    def __init__(self, *values):
        super().__init__(*values)
        self.numbers = []

    def __getitem__(self, number):
        self.numbers.append(number)
        return super().__getitem__(number)


@pytest.mark.parametrize(
    ("written_by", "ranks", "rank", "expected"),
    [(4, 4, 2, [2]), (4, 2, 1, [1, 3]), (2, 4, 3, [1]), (2, 3, 1, [0, 1]), (4, 1, 0, [0, 1, 2, 3])],
)
def test_a_rank_reads_only_the_parts_with_its_groups(
    rollout_ahead, monkeypatch, written_by, ranks, rank, expected
):
    ahead = rollout_ahead(1, weights_of=0)
    (whole,) = ahead.state_dict()
    played = [(one.group, one.member) for one in ahead.played(1).trajectories]
    parts = Asked()
    for part in range(written_by):
        ahead.load_state_dict([whole])
        one = ahead.played(1)
        one.trajectories = [other for other in one.trajectories if other.group % written_by == part]
        parts += ahead.state_dict()
    monkeypatch.setattr("ragen_pl.data.ahead.rank", lambda: rank)
    monkeypatch.setattr("ragen_pl.data.ahead.world_size", lambda: ranks)
    ahead.load_state_dict(parts)
    own = [(other.group, other.member) for other in ahead.played(1).trajectories]
    assert own == [pair for pair in played if pair[0] % ranks == rank]
    assert parts.numbers == expected


@pytest.mark.parametrize("name", ["os system", "ragen_pl.trajectory np.fromfile", "numpy load"])
def test_a_checkpoint_runs_no_code(rollout_ahead, name):
    module, _, attribute = name.partition(" ")
    # protocol 4: the two texts, STACK_GLOBAL and the end
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, attribute))
    packed = b"\x80\x04" + texts + b"\x93."
    ahead = rollout_ahead(1, weights_of=0)
    with pytest.raises(RolloutError, match=f"{module}.{attribute} is not known here"):
        ahead.load_state_dict([torch.frombuffer(bytearray(packed), dtype=torch.uint8)])


def test_a_rollout_of_an_earlier_version_is_sampled_again(rollout_ahead, caplog):
    ahead = rollout_ahead(1, weights_of=0)
    ahead.wait()
    written = pickle.dumps(ahead.played(1))
    ahead.drop()
    ahead.load_state_dict([torch.frombuffer(bytearray(written), dtype=torch.uint8)])
    assert ahead.played(1) is None and "is of an earlier version" in caplog.text


def test_a_rollout_that_cannot_be_saved_is_reported(rollout_ahead):
    def reward(trajectories):
        trajectories[0].error = lambda: 0

    with pytest.raises(RolloutError, match=r"can't be pickled .*; return plain values in the env"):
        rollout_ahead(1, weights_of=0, reward=reward).state_dict()
