"""Stages of a curriculum: when they end, and the groups that play them."""

import pytest
from support.episodes.small_lakes import FAR, Module, proxy_of

import envs  # noqa: F401 - registers the environments
from ragen_pl.data.curriculum import Curriculum
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.settings import IterationSettings
from ragen_pl.rollout.proxy import AgentProxy


def test_curriculum_starts_after_a_full_window_of_success():
    curriculum = Curriculum(stages=FAR, above=0.5, fraction=0.5, window=3)
    for iteration, success in enumerate([1.0, 1.0]):
        curriculum.observe(success, iteration=iteration)
    assert not curriculum.starts  # the window is not full yet
    curriculum.observe(0.2, iteration=2)
    assert curriculum.starts == [3]

    def hard(iteration):
        return [
            curriculum.options_for(g, groups=4, iteration=iteration) is not None for g in range(4)
        ]

    assert hard(2) == [False] * 4 and hard(3) == [True, True, False, False]
    for iteration in range(3, 8):
        curriculum.observe(0.0, iteration=iteration)
    assert hard(8) == [True, True, False, False]  # it never goes back


def test_curriculum_needs_a_mean_above_the_bound():
    curriculum = Curriculum(stages=FAR, above=0.5, fraction=0.5, window=2)
    curriculum.observe(0.5, iteration=0)
    curriculum.observe(0.5, iteration=1)
    assert not curriculum.starts


def test_curriculum_goes_by_the_return_until_an_episode_has_a_success():
    curriculum = Curriculum(stages=[{}, {}, {}], above=5.0, fraction=0.5, window=2)
    for iteration in range(2):
        curriculum.observe(0.0, iteration=iteration, mean_return=6.0, says_success=False)
    assert curriculum.starts == [2]
    # an iteration without a step tells nothing
    curriculum.observe(0.0, iteration=2, mean_return=6.0, says_success=None)
    assert curriculum.history == [6.0]
    curriculum.history = []
    resumed = Curriculum(stages=[{}, {}, {}], above=5.0, fraction=0.5, window=2)
    resumed.load_state_dict(curriculum.state_dict())
    resumed.observe(0.0, iteration=2, mean_return=6.0, says_success=False)
    # from now on by success, also in an iteration without any
    resumed.observe(1.0, iteration=3, mean_return=6.0, says_success=True)
    for iteration in range(4, 8):
        resumed.observe(1.0, iteration=iteration, mean_return=6.0, says_success=False)
    assert resumed.starts == [2]


def test_curriculum_averages_each_stage_anew_and_mixes_it_with_those_before():
    curriculum = Curriculum(
        stages=[{"size": 4}, {"size": 5}, {}], above=0.5, fraction=0.5, window=2
    )
    for iteration in range(8):
        curriculum.observe(1.0, iteration=iteration)
    assert curriculum.starts == [2, 4]  # the last stage has none after it

    def played(iteration):
        return [curriculum.options_for(g, groups=8, iteration=iteration) for g in range(8)]

    small, medium = {"size": 4}, {"size": 5}
    assert played(1) == [small] * 8
    assert played(3) == [medium] * 4 + [small] * 4
    assert played(4) == [None] * 4 + [small, medium] * 2


def test_curriculum_needs_a_stage_to_go_on_to():
    with pytest.raises(ValueError, match=r"stages: found \[{}\], expected two or more"):
        Curriculum(stages=[{}], above=0.5, fraction=0.5)


def test_resumed_curriculum_continues_identically():
    curriculum = Curriculum(stages=FAR, above=0.5, fraction=0.5, window=3)
    for iteration in range(2):
        curriculum.observe(0.9, iteration=iteration)
    resumed = Curriculum(stages=FAR, above=0.5, fraction=0.5, window=3)
    resumed.load_state_dict(curriculum.state_dict())
    for each in (curriculum, resumed):
        each.observe(0.9, iteration=2)
    assert curriculum.starts == resumed.starts == [3]
    assert curriculum.state_dict() == resumed.state_dict()


def test_a_stage_ends_by_its_own_success(lm, monkeypatch):
    """Groups of earlier stages, which are easier, do not count."""
    rollout = AgentProxy.rollout

    def played(proxy, responder, specs, **settings):
        trajectories = rollout(proxy, responder, specs, **settings)
        for trajectory, spec in zip(trajectories, specs, strict=True):
            trajectory.success = spec.options == {"min_distance": 1}
        return trajectories

    monkeypatch.setattr(AgentProxy, "rollout", played)
    stages = [{"min_distance": 1}, {"min_distance": 2}, {}]
    curriculum = Curriculum(stages=stages, above=0.5, fraction=0.25, window=1)
    data = RolloutDataModule(
        proxy_of(lm), iteration=IterationSettings(groups=4, group_size=2), curriculum=curriculum
    )
    for iteration in range(3):
        data.collect(iteration, Module(lm))
    assert data.metrics["success"] == 0.75 and curriculum.starts == [1]


def test_hard_groups_get_the_options(lm):
    curriculum = Curriculum(stages=FAR, above=0.5, fraction=0.5)
    curriculum.starts = [2]
    data = RolloutDataModule(
        proxy_of(lm), iteration=IterationSettings(groups=4, group_size=2), curriculum=curriculum
    )
    assert all(spec.options is None for spec in data.episode_specs(1))
    assert [spec.options for spec in data.episode_specs(2)] == [{"min_distance": 3}] * 4 + [
        None
    ] * 4
    slots = data.proxy.environments.open(data.episode_specs(2)[:4])
    assert all(slot.difficulty >= 3 for slot in slots)
