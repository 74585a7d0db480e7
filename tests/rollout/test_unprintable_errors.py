"""Errors of environments and policies that cannot be shown: they fail their episode, and not the rollout."""

from __future__ import annotations

import gymnasium
import pytest
from rollout_fixtures import TextEngine
from trajectories import starts

from ragen_pl.config.ending import ending_of
from ragen_pl.config.errors import in_one_line
from ragen_pl.distributed import sendable
from ragen_pl.environments.causes import cause_of
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.error_text import error_text, named_error
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.trajectory import EpisodeStatus, FailureCause


class StrRaises(Exception):
    def __str__(self):
        raise ValueError("no text")


class StrIsNoText(Exception):
    def __str__(self):
        return 7  # type: ignore[return-value]


class ReprRaises(Exception):
    """An error whose argument can't be shown."""

    def __init__(self) -> None:
        super().__init__(self)

    def __repr__(self):
        raise RuntimeError("no repr")


class Endless(Exception):
    def __str__(self):
        return str(self)


class HalfACharacter(Exception):
    def __str__(self):
        return "half \ud83d"


class StatusRaises(Exception):
    @property
    def status(self):
        raise OSError("no status")


ERRORS = (StrRaises, StrIsNoText, ReprRaises, Endless, HalfACharacter, StatusRaises)


class Breaks(gymnasium.Env):
    """Raises one of the errors in every second episode."""

    action_names = ("Go",)
    instructions = "Go."
    action_space = gymnasium.spaces.Discrete(1)
    observation_space = gymnasium.spaces.Text(100)

    def __init__(self, error: int, where: str) -> None:
        self.error, self.where = ERRORS[error], where

    def _break(self, where: str) -> None:
        if where == self.where and self.seed % 2:
            raise self.error()

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        self._break("reset")
        return "go", {}

    def step(self, action):
        self._break("step")
        return "gone", 1.0, True, False, {"success": True}

    def close(self):
        pass


def played(lm, responder_of, **environment):
    context = ContextManager(lm, max_tokens=512, system_prompt=None)
    environments = EnvironmentManager(target=f"{__name__}.Breaks", **environment)
    proxy = AgentProxy(environments=environments, context=context, max_response_tokens=64)
    return proxy.rollout(responder_of(context), starts(4), seed_key=(0, "test"))


def walker(context):
    engine = TextEngine(context, lambda session, turn: "<think>a</think><answer>Go</answer>")
    return EngineResponder(engine=engine, context=context)


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("error", ERRORS, ids=[error.__name__ for error in ERRORS])
def test_an_error_without_a_text_fails_its_episode(lm, error, where):
    kwargs = {"error": ERRORS.index(error), "where": where}
    episodes = played(lm, walker, kwargs=kwargs)
    assert [one.status is EpisodeStatus.FAILED for one in episodes] == [False, True] * 2
    for episode in episodes[1::2]:
        assert episode.error.startswith(error.__name__) and episode.error.encode()


@pytest.mark.parametrize("error", [StrRaises, HalfACharacter])
def test_so_does_one_of_an_environment_in_a_process_of_its_own(lm, error):
    kwargs = {"error": ERRORS.index(error), "where": "step"}
    episodes = played(lm, walker, kwargs=kwargs, process=True)
    assert [one.status is EpisodeStatus.FAILED for one in episodes] == [False, True] * 2
    assert all(error.__name__ in one.error for one in episodes[1::2])


class Policy:
    def act(self, env, rng):
        if env.unwrapped.seed % 2:
            raise StrRaises
        return 0


def test_so_does_one_of_a_scripted_policy(lm):
    episodes = played(
        lm, lambda context: ScriptedResponder(policy=Policy()), kwargs={"error": 0, "where": ""}
    )
    assert [one.status is EpisodeStatus.FAILED for one in episodes] == [False, True] * 2
    assert episodes[1].error == "Policy: (no text: its __str__ raised ValueError)"


@pytest.mark.parametrize("error", ERRORS, ids=[error.__name__ for error in ERRORS])
def test_lines_of_commands_and_ranks_show_it(error):
    made = error()
    error_text(made).encode()
    assert all(line.encode() for line in (named_error(made), in_one_line(made)))
    error_text(sendable(made)).encode()
    assert error.__name__ in ending_of(made).text
    assert cause_of(made) is FailureCause.DATA
