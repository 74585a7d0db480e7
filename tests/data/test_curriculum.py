"""Stages of a curriculum: when they end, and the groups that play them; tasks sampled by their scores."""

import copy
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes.reference_cases import reference_cases
from support.episodes.small_lakes import FAR, Module, proxy_of

import envs  # noqa: F401 - registers the environments
from ragen_pl.algorithms.task_sampling import TaskScore, drawn_tasks, task_probabilities
from ragen_pl.base.restoring import restore
from ragen_pl.data.curriculum import Curriculum
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.settings import IterationSettings
from ragen_pl.data.task_sampling import TaskSampling
from ragen_pl.engines.errors import RolloutError
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.trajectory import EpisodeStatus

CASES = reference_cases("task_sampling")


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


@pytest.mark.parametrize(
    ("fraction", "groups", "expected"), [(0.28, 50, 14), (0.55, 100, 55), (0.3, 8, 3), (1.0, 4, 4)]
)
def test_the_present_stage_has_its_fraction_of_the_groups_rounded_up(fraction, groups, expected):
    curriculum = Curriculum(stages=FAR, above=0.5, fraction=fraction)
    curriculum.starts = [1]
    played = [
        curriculum.plays_present_stage(group, groups=groups, iteration=1) for group in range(groups)
    ]
    assert sum(played) == expected


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


# ---- tasks by difficulty or progress


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_probabilities_are_those_of_the_reference_cases(case):
    inputs = dict(case["inputs"])
    averages, scores = {key: inputs.pop(key) for key in ("fast", "slow")}, []
    for history in inputs.pop("scores"):
        scores.append(TaskScore())
        for score in history:
            scores[-1].add(score, **averages)
    expected = case["outputs"]["probability"]
    assert task_probabilities(scores, **inputs) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=60, database=None, derandomize=True)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any),
    st.integers(1, 40),
    st.floats(0, 1, exclude_max=True),
)
def test_each_task_is_drawn_as_often_as_expected(weights, draws, offset):
    probabilities = [weight / sum(weights) for weight in weights]
    drawn = drawn_tasks(probabilities, draws=draws, offset=offset)
    assert len(drawn) == draws and drawn == sorted(drawn)
    for task, count in Counter(drawn).items():
        assert abs(count - draws * probabilities[task]) < 1 + 1e-9 and probabilities[task] > 0


TASKS: list[dict[str, int]] = [{"min_distance": 1, "max_distance": 1}, {"min_distance": 2}, {}]


def sampled(lm, monkeypatch, sampling, *, solves, iterations, state=None, first=0):
    """Return the tasks of each iteration, where the episodes with some options are solved."""
    rollout, tasks = AgentProxy.rollout, []

    def played(proxy, responder, specs, **settings):
        tasks.append([TASKS.index(spec.options or {}) for spec in specs])
        trajectories = rollout(proxy, responder, specs, **settings)
        for trajectory, spec in zip(trajectories, specs, strict=True):
            trajectory.success = spec.options == solves
        return trajectories

    monkeypatch.setattr(AgentProxy, "rollout", played)
    data = RolloutDataModule(
        proxy_of(lm), iteration=IterationSettings(groups=10), curriculum=sampling, seed=3
    )
    if state is not None:
        data.load_state_dict(state)
    for iteration in range(first, iterations):
        data.collect(iteration, Module(lm))
        data.drop_buffer()
    monkeypatch.setattr(AgentProxy, "rollout", rollout)
    return data, tasks


def test_tasks_follow_their_scores_and_a_resumed_run_draws_the_same(lm, monkeypatch):
    def sampling():
        return TaskSampling(
            stages=TASKS, rule="pools", thresholds=[0.5, 1.0], pool_weights=[1.0, 0.0], floor=0.3
        )

    whole, tasks = sampled(lm, monkeypatch, sampling(), solves=TASKS[0], iterations=4)
    counts = [Counter(played) for played in tasks]
    assert all(3 <= counts[0][task] <= 4 for task in range(3))
    # solved tasks keep their part of the floor, the others share the rest
    assert all(count[0] <= 2 and 4 <= count[1] <= 5 and 4 <= count[2] <= 5 for count in counts[1:])
    assert whole.metrics["curriculum_task_0"] == pytest.approx(0.1)
    half, _ = sampled(lm, monkeypatch, sampling(), solves=TASKS[0], iterations=1)
    state = json.loads(json.dumps(half.state_dict()))
    _, later = sampled(
        lm, monkeypatch, sampling(), solves=TASKS[0], iterations=4, state=state, first=1
    )
    assert later == tasks[1:]


def test_a_curriculum_of_another_kind_or_size_begins_anew(caplog):
    """A resume may have another one."""
    stages = Curriculum(stages=TASKS, above=0.5, fraction=0.5, window=1)
    for iteration in range(2):
        stages.observe(1.0, iteration=iteration)
    tasks = TaskSampling(stages=TASKS)
    tasks.tasks.scores[0].last = 0.5
    fewer = Curriculum(stages=TASKS[:2], above=0.5, fraction=0.5)
    restore(fewer, stages.state_dict(), key="curriculum")
    assert (stages.stage(9), fewer.stage(9)) == (2, 1) and not caplog.messages
    for new, old, text in (
        (TaskSampling(stages=TASKS), stages, "curriculum: the checkpoint has the state of another"),
        (Curriculum(stages=TASKS, above=0.5, fraction=0.5), tasks, "of another kind; this one beg"),
        (TaskSampling(stages=TASKS[:2]), tasks, "the scores of 3 tasks, and 2 are set"),
    ):
        first = copy.deepcopy(new.state_dict())
        restore(new, old.state_dict(), key="curriculum")
        assert new.state_dict() == first and text in caplog.messages[-1]


def test_task_sampling_needs_success(lm, monkeypatch):
    data, _ = sampled(lm, monkeypatch, TaskSampling(stages=TASKS), solves=TASKS[0], iterations=1)
    silent = [trajectory for trajectory in data.collect(1, Module(lm)) if trajectory.turns]
    for trajectory in silent:
        for turn in trajectory.turns:
            turn.info, turn.actions = {}, ["Up"]
    with pytest.raises(RolloutError, match="TaskSampling goes by success"):
        data.curriculum.observe_played(silent, groups=10, iteration=2, seed=3)
    # the last step may say it, which a truncated episode lacks
    for trajectory in silent:
        trajectory.status = EpisodeStatus.TRUNCATED
    data.curriculum.observe_played(silent, groups=10, iteration=2, seed=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": [{}]}, "expected two or more"),
        ({"floor": 0.0}, "floor=0.0: expected a number, at least 0.1"),
        ({"thresholds": [0.5]}, "expected rising numbers that end with 1"),
        ({"thresholds": [0.5, 1.0]}, "and a weight for each"),
        ({"slow": 0.5}, "expected 0 < slow < fast"),
    ],
)
def test_settings_of_task_sampling_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        TaskSampling(**({"stages": TASKS} | changes))
