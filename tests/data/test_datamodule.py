"""The DataModule's checkpoints, and iterations with failed episodes."""

from collections.abc import Set

import gymnasium
import pytest
from support.episodes.small_lakes import FAR, Module, proxy_of

import envs  # noqa: F401 - registers the environments
from envs.frozen_lake import FrozenLake
from ragen_pl.algorithms.group_filter import AboveDeviation, GroupFilter
from ragen_pl.data import datamodule
from ragen_pl.data.curriculum import Curriculum
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.settings import IterationSettings
from ragen_pl.engines.errors import RolloutError
from ragen_pl.rollout import attempts
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.settings import FailureSettings

# ---- the DataModule's memory


def test_checkpoint_restores_buffer_metrics_and_curriculum(lm):
    def make():
        curriculum = Curriculum(stages=FAR, above=0.0, fraction=0.5, window=1)
        return RolloutDataModule(
            proxy_of(lm), iteration=IterationSettings(groups=3, group_size=2), curriculum=curriculum
        )

    data, module = make(), Module(lm)
    with pytest.raises(RuntimeError, match="RolloutUpdate"):
        data.train_dataloader()
    trajectories = data.collect(4, module)
    assert len(trajectories) == 6 and module.engine.version == 4
    data.curriculum.observe(1.0, iteration=4)
    assert data.has_buffer(4) and not data.has_buffer(5)
    other = make()
    other.load_state_dict(data.state_dict())
    assert other.has_buffer(4) and other.metrics == data.metrics
    assert other.curriculum.starts == data.curriculum.starts == [5]
    for minibatch, restored in zip(data.train_dataloader(), other.train_dataloader(), strict=True):
        assert minibatch.samples.input_ids.tolist() == restored.samples.input_ids.tolist()
    data.drop_buffer()
    other.load_state_dict(data.state_dict())
    assert not other.has_buffer(4)


def test_requests_that_all_attempts_have_sent_again_are_counted(lm, monkeypatch):
    played, rollout = [], AgentProxy.rollout

    def counted(*arguments, **settings):
        played.append(1)
        return rollout(*arguments, **settings)

    monkeypatch.setattr(AgentProxy, "rollout", counted)
    monkeypatch.setattr(datamodule, "resent_by", lambda engine: 5 * len(played))
    # no group passes
    data = RolloutDataModule(
        proxy_of(lm), iteration=IterationSettings(groups=2, group_size=2),
        group_filter=GroupFilter(keep=AboveDeviation(threshold=1e6), resample=2),
    )  # fmt: skip
    for iteration in range(2):
        data.collect(iteration, Module(lm))
        assert data.metrics["attempts"] == 3 and data.metrics["resent"] == 15


def test_redraws_are_those_of_the_iteration(lm):
    def make():
        iteration = IterationSettings(groups=12)
        return RolloutDataModule(proxy_of(lm, held_out_fraction=0.5), iteration=iteration)

    data, resumed = make(), make()
    for iteration in range(2):
        data.collect(iteration, Module(lm))
    resumed.collect(1, Module(lm))
    assert data.metrics["redraws"] == resumed.metrics["redraws"] > 0


def test_iteration_of_failed_episodes_stops_the_run(lm):
    data = RolloutDataModule(
        proxy_of(lm, held_out=_Everything()), iteration=IterationSettings(groups=2)
    )
    with pytest.raises(
        RolloutError,
        match=r"iteration 1: 2 of 2 episodes failed and drop 2 groups; .*min_fraction=0.9, .*held out.*\(2 times",
    ):
        data.collect(0, Module(lm))


class Breaking(FrozenLake):
    """Fails for three seeds in four, always."""

    def reset(self, *, seed=None, options=None):
        if seed % 4:
            raise OSError(f"no simulator for {seed}")
        return super().reset(seed=seed, options=options)


def test_failed_episodes_are_no_outcome_and_end_the_run_from_a_fraction_on(lm, caplog):
    gymnasium.register("test/Breaking-v0", entry_point=Breaking)

    def limited(min_fraction: float) -> RolloutDataModule:
        proxy = proxy_of(lm, target="test/Breaking-v0")
        proxy.failures = FailureSettings(min_fraction=min_fraction)
        iteration = IterationSettings(groups=16, group_size=2)
        return RolloutDataModule(proxy, iteration=iteration, seed=3)

    data = limited(0.0)
    played = data.collect(0, Module(lm))
    failed = sum(trajectory.error is not None for trajectory in played)
    assert 16 < failed < 32
    assert (data.metrics["failed_episodes"], data.metrics["episodes"]) == (failed, 32 - failed)
    sound = [one.reward for one in played if one.error is None]
    assert data.metrics["return"] == pytest.approx(sum(sound) / len(sound))
    # one kind of error, and one line
    assert caplog.text.count("no simulator") == 1
    assert f"{failed} of 32 episodes failed with OSError: no simulator for" in caplog.text
    data.collect(1, Module(lm))
    assert "episodes failed with errors that are named above" in caplog.text

    assert data.metrics["failed_data"] == failed and data.metrics["failed_infrastructure"] == 0
    assert data.metrics["dropped_groups"] == failed / 2
    assert data.metrics["trained_fraction"] == 1 - failed / 32

    caplog.clear()
    limited(1 - failed / 32).collect(0, Module(lm))
    assert "once more" not in caplog.text
    with pytest.raises(
        RolloutError, match=f"{failed} of 32 episodes failed and .*no simulator"
    ) as raised:
        limited(1 - (failed - 1) / 32).collect(0, Module(lm))
    assert "\n" not in str(raised.value) and caplog.text.count("it is played once more") == 1


class Lossy(FrozenLake):
    """Loses its connection in resets that are chosen by their number."""

    lost: Set[int] = frozenset()
    resets = 0

    def reset(self, *, seed=None, options=None):
        number, Lossy.resets = Lossy.resets, Lossy.resets + 1
        if number in self.lost:
            raise ConnectionResetError("the simulator has gone")
        return super().reset(seed=seed, options=options)


@pytest.fixture
def lossy(lm, monkeypatch):
    """Return a function that makes the data of an iteration of 3 groups of 4."""
    if "test/Lossy-v0" not in gymnasium.registry:
        gymnasium.register("test/Lossy-v0", entry_point=Lossy)
    monkeypatch.setattr(attempts, "_PAUSE_S", 0.0)

    def make(lost: Set[int], **failures) -> RolloutDataModule:
        monkeypatch.setattr(Lossy, "lost", lost)
        monkeypatch.setattr(Lossy, "resets", 0)
        proxy = proxy_of(lm, target="test/Lossy-v0")
        proxy.failures = FailureSettings(**failures)
        return RolloutDataModule(proxy, iteration=IterationSettings(groups=3, group_size=4), seed=3)

    return make


def test_a_group_with_too_few_members_is_not_trained_on(lm, lossy):
    # the second member of the first group, and two of the second one
    data = lossy({1, 5, 6}, attempts=1, min_fraction=0.5)
    data.collect(0, Module(lm))
    assert data.buffer.episodes.group.tolist() == [0] * 3 + [2] * 4
    assert data.buffer.episodes.member.tolist() == [0, 2, 3, 0, 1, 2, 3]
    metrics = data.metrics
    assert (metrics["failed_episodes"], metrics["dropped_groups"]) == (3.0, 1.0)
    assert metrics["trained_fraction"] == 7 / 12 and metrics["failed_turns"] == 0.0
    whole = lossy({1}, attempts=1, min_fraction=0.5, min_group_fraction=1.0)
    whole.collect(0, Module(lm))
    assert set(whole.buffer.episodes.group.tolist()) == {1, 2}


def test_an_iteration_with_too_few_episodes_is_played_once_more(lm, lossy, caplog):
    sound = lossy(set())
    sound.collect(0, Module(lm))
    data = lossy(set(range(12)), attempts=1)
    data.collect(0, Module(lm))
    assert (
        Lossy.resets == 24 and "iteration 1: 12 of 12 episodes failed; it is played" in caplog.text
    )
    assert data.buffer.samples.input_ids.tolist() == sound.buffer.samples.input_ids.tolist()
    assert data.metrics["trained_fraction"] == 1.0 and data.metrics["retried"] == 0.0
    again = lossy(set(range(12)), attempts=2)
    again.collect(0, Module(lm))
    assert Lossy.resets == 24 and again.metrics["retried"] == 12.0
    assert again.buffer.samples.input_ids.tolist() == sound.buffer.samples.input_ids.tolist()


class _Everything:
    """Holds out whatever is asked for."""

    def __contains__(self, key: object) -> bool:
        return True

    def __len__(self) -> int:
        return 1
