"""Errors of environments and policies that cannot be shown: they fail their episode, and not the rollout."""

from __future__ import annotations

import pytest
from support.episodes.rollout_fixtures import TextEngine
from support.episodes.trajectories import starts
from support.episodes.unprintable import ERRORS, Breaks, DiskStrRaises, HalfACharacter, StrRaises

from ragen_pl.base.distributed import sendable
from ragen_pl.base.error_text import error_text, named_error
from ragen_pl.config.ending import ending_of
from ragen_pl.config.errors import in_one_line
from ragen_pl.environments.causes import cause_of
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.trajectory import EpisodeStatus, FailureCause


def played(lm, responder_of, **environment):
    context = ContextManager(lm, max_tokens=512, system_prompt=None)
    environments = EnvironmentManager(
        target=f"{Breaks.__module__}.{Breaks.__name__}", **environment
    )
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


def test_so_do_those_of_a_disk():
    line = ending_of(DiskStrRaises()).line
    assert line == "(no text: its __str__ raised ValueError)"
