"""Attempts at episodes whose environments fail: replays with the same seeds, responses and rewards."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.episodes.rollout_fixtures import TextEngine

from ragen_pl.environments.causes import InfrastructureError, cause_of
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout import attempts as attempts_module
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.rollout.settings import FailureSettings
from ragen_pl.trajectory import EpisodeStatus, FailureCause

SPECS = [EpisodeSpec(group=n // 4, member=n % 4, seed=n // 4) for n in range(32)]


class Fragile(gymnasium.Env):
    """Counts to 3. A step, or a reset, loses its connection with a chance that no seed decides."""

    action_names, instructions = ("More", "Stay"), "Count."
    action_space, observation_space = spaces.Discrete(2), spaces.Text(100)
    chance = 0.0
    error: Exception = ConnectionResetError("the simulator has gone")
    luck = np.random.default_rng(5)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.count = seed, 0
        self._break()
        return self._see(), {}

    def step(self, action):
        Fragile.steps += 1
        self.count += 1
        self._break()
        return self._see(), float(action == 0), self.count >= 3, False, {"success": action == 0}

    def state_key(self):
        return f"{self.seed} {self.count}"

    def _break(self):
        # 0.2 an episode, in one of its reset and 3 steps
        if self.luck.random() < 1 - (1 - self.chance) ** (1 / 4):
            raise self.error

    def _see(self):
        return f"seed {self.seed} count {self.count} draw {self.np_random.integers(100)}"


gymnasium.register("test/Fragile-v0", entry_point=Fragile, disable_env_checker=True)


@pytest.fixture
def fragile(monkeypatch):
    """Return a function that sets the chance of a failure, and its error."""

    def set_to(chance, *, error=None, seed=5):
        monkeypatch.setattr(Fragile, "chance", chance)
        monkeypatch.setattr(Fragile, "luck", np.random.default_rng(seed))
        monkeypatch.setattr(Fragile, "steps", 0)
        if error is not None:
            monkeypatch.setattr(Fragile, "error", error)

    monkeypatch.setattr(attempts_module, "_PAUSE_S", 0.0)
    return set_to


class SeededEngine(TextEngine):
    """Writes what seed and prompt decide, as sampling does, and counts the responses."""

    asked = 0

    def __init__(self, context):
        super().__init__(context, lambda session, turn: "", shuffled=True)

    def _response(self, request):
        self.asked += 1
        number = (request.seed + int(request.prompt.ids.sum())) % 997
        self.write = lambda session, turn: (
            f"<think>{number}</think><answer>{'More' if number % 3 else 'Stay'}</answer>"
        )
        return super()._response(request)


def sampled(lm, specs=SPECS, *, failures=None, num_envs=8):
    """Play with sampled responses; return the trajectories and the number of responses."""
    context = ContextManager(lm, window="all")
    proxy = AgentProxy(
        environments=EnvironmentManager(
            target="test/Fragile-v0", invalid_ends=False, max_turns=6, timeout_s=None
        ),
        context=context,
        max_response_tokens=64,
        num_envs=num_envs,
        failures=failures or FailureSettings(),
    )
    engine = SeededEngine(context)
    responder = EngineResponder(engine=engine, context=context)
    return proxy.rollout(responder, specs, seed_key=(0, "test")), engine.asked


def content(trajectory):
    """Return what is trained on."""
    turns = [
        (t.prompt_ids.tolist(), t.response_ids.tolist(), t.response_logprobs.tolist(), t.reward)
        for t in trajectory.turns
    ]
    return (trajectory.group, trajectory.member, trajectory.status, trajectory.success, turns)


@pytest.mark.parametrize("num_envs", [8, 32])
def test_failures_of_infrastructure_change_no_trajectory(lm, fragile, num_envs):
    sound, asked = sampled(lm, num_envs=num_envs)
    fragile(0.2)
    failures = FailureSettings(attempts=6)
    played, asked_in_all = sampled(lm, failures=failures, num_envs=num_envs)
    assert [content(one) for one in played] == [content(one) for one in sound]
    assert all(one.error is None for one in played)
    retried = sum(len(one.failed_after) for one in played)
    replayed = sum(one.replayed_turns for one in played)
    assert retried >= 4 and replayed >= 2
    # known responses are not sampled again
    assert asked_in_all == asked


def test_pauses_grow_with_the_attempts_and_not_with_the_episodes(lm, fragile, monkeypatch):
    fragile(1.0)
    pauses: list[float] = []
    monkeypatch.setattr(attempts_module, "_PAUSE_S", 1.0)
    monkeypatch.setattr(attempts_module.time, "sleep", pauses.append)
    episodes, _ = sampled(lm, num_envs=2)
    assert all(one.status is EpisodeStatus.FAILED for one in episodes)
    # 16 batches, three attempts at each
    assert len(pauses) == 47 and max(pauses[:31]) <= 1.0 < max(pauses) <= 2.0


def test_an_episode_is_given_up_after_all_attempts(lm, fragile):
    fragile(1.0)
    (episode,), _ = sampled(lm, SPECS[:1])
    assert episode.status is EpisodeStatus.FAILED and len(episode.failed_after) == 2
    assert episode.error == "ConnectionResetError: the simulator has gone"
    assert episode.cause is FailureCause.INFRASTRUCTURE


@pytest.mark.parametrize("data_attempts", [1, 2])
def test_other_errors_have_attempts_of_their_own(lm, fragile, data_attempts):
    fragile(1.0, error=KeyError("door"))
    failures = FailureSettings(attempts=4, data_attempts=data_attempts)
    (episode,), _ = sampled(lm, SPECS[:1], failures=failures)
    assert episode.status is EpisodeStatus.FAILED and episode.cause is FailureCause.DATA
    assert len(episode.failed_after) == data_attempts - 1


def test_a_replay_that_shows_something_else_is_answered_anew(lm, fragile, monkeypatch):
    fragile(0.0)
    shown = iter(range(1000))
    monkeypatch.setattr(Fragile, "_see", lambda self: f"number {next(shown)}")
    monkeypatch.setattr(
        Fragile, "_break", lambda self: self.count == 2 and next(fails) and _lose_connection()
    )
    fails = iter([True, False])
    (episode,), asked = sampled(lm, SPECS[:1])
    assert episode.failed_after == (2,) and episode.replayed_turns == 0
    assert asked == 2 + len(episode.turns) and episode.error is None


def _lose_connection():
    raise ConnectionResetError("the simulator has gone")


def test_environments_that_cannot_be_made_are_made_again(lm, fragile, monkeypatch):
    fragile(0.0)
    made = []

    class Late(Fragile):
        def __init__(self):
            made.append(self)
            if len(made) < 3:
                raise ConnectionRefusedError("not yet")

    gymnasium.register("test/Late-v0", entry_point=Late, disable_env_checker=True)
    proxy = AgentProxy(
        environments=EnvironmentManager(target="test/Late-v0"), context=ContextManager(lm)
    )
    slots = attempts_module.open_slots(
        proxy.environments,
        [attempts_module.Attempt(number=0, spec=SPECS[0])],
        FailureSettings(attempts=3),
    )
    assert len(made) == 3 and slots[0].error is None


class Answer(Exception):
    def __init__(self, status):
        self.status = status


class Response:
    def __init__(self, status_code):
        self.status_code = status_code


class WithResponse(Exception):
    def __init__(self, response):
        self.response = response


def _led_to(first: Exception, *, hidden: bool = False) -> Exception:
    try:
        try:
            raise first
        except Exception as error:
            if hidden:
                raise KeyError("door") from None
            raise KeyError("door") from error
    except KeyError as error:
        return error


@pytest.mark.parametrize(
    ("error", "is_infrastructure"),
    [
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (InfrastructureError(), True),
        (_led_to(BrokenPipeError()), True),
        (_led_to(BrokenPipeError(), hidden=True), False),
        (KeyError("door"), False),
        (FileNotFoundError(), False),
        (MemoryError(), False),
        *[(Answer(status), True) for status in (408, 429, 500, 503, 599)],
        *[(Answer(status), False) for status in (200, 400, 404, 422, "503")],
        (WithResponse(Response(502)), True),
        (WithResponse(Response(403)), False),
        (WithResponse(None), False),
    ],
)
def test_causes_of_errors(error, is_infrastructure):
    assert (cause_of(error) is FailureCause.INFRASTRUCTURE) == is_infrastructure
