"""The support desk as a program gives the trajectories of the environment, token by token."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.episodes.agent_programs import AGENTS, PROGRAM, ScriptedEngine, bundle_of, calls
from support.models.tiny_models import TEXT

import envs  # noqa: F401 - registers the environments
from ragen_pl.data.collate import collate
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.models.build import build_small_lm
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.trajectory import EpisodeStatus, Trajectory

DESK = {
    "rules": 2,
    "requests": 1,
    "orders": 1,
    "grant_fraction": 0.45,
    "wrong_cost": 0.1,
}
COMMAND = [sys.executable, str(AGENTS / "support_desk.py")]
MakeEngine = Callable[[ContextManager], Any]


def played(
    bundle: ModelBundle,
    engine: MakeEngine,
    *,
    program: bool,
    invalid_ends: bool = False,
    response_tokens: int = 256,
    episodes: int = 1,
) -> list[Trajectory]:
    """Play episodes, as the environment or as the program."""
    context = ContextManager(bundle, window="all", system_prompt="instructions", max_tokens=4096)
    if program:
        target, kwargs, turns = PROGRAM, {"command": COMMAND, "program_s": 600.0}, 50
    else:
        target, kwargs, turns = "ragen/SupportDesk-v0", DESK, 6
    environments = EnvironmentManager(
        target=target,
        kwargs=kwargs,
        max_turns=turns,
        format_penalty=0.25,
        invalid_ends=invalid_ends,
        prompt_format="native",
        timeout_s=None,
        workers=4 if program else 1,
    )
    proxy = AgentProxy(
        environments=environments, context=context, max_response_tokens=response_tokens
    )
    options = {"task": {"invalid_ends": invalid_ends}} if program else None
    specs = [
        EpisodeSpec(group=number // 2, member=number % 2, seed=number // 2, options=options)
        for number in range(episodes)
    ]
    responder = EngineResponder(engine=engine(context), context=context)
    return proxy.rollout(responder, specs, seed_key=(3, "test"))


def check_same(native: list[Trajectory], program: list[Trajectory], bundle: ModelBundle) -> None:
    for expected, found in zip(native, program, strict=True):
        assert found.error is None
        assert (expected.seed, expected.success) == (found.seed, found.success)
        # the environment's limit of turns is a break in the program
        assert found.status is EpisodeStatus.TERMINATED
        assert len(expected.turns) == len(found.turns)
        for first, second in zip(expected.turns, found.turns, strict=True):
            assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
            assert first.response_ids.tolist() == second.response_ids.tolist()
            assert first.response_logprobs.tolist() == second.response_logprobs.tolist()
            assert first.spans.tolist() == second.spans.tolist()
            assert first.action_is_valid == second.action_is_valid
            assert first.reward == pytest.approx(second.reward, abs=1e-12)
    samples = [collate(each, bundle).samples for each in (native, program)]
    assert samples[0].input_ids.equal(samples[1].input_ids)
    assert samples[0].loss_mask.equal(samples[1].loss_mask)
    assert len(samples[0]) == len(native)


def test_a_sampling_model_gives_the_same_tokens():
    bundle = build_small_lm(seed=0, text=TEXT)
    bundle.calls_tools = True
    bundle.model.generation_config.eos_token_id = [bundle.end_of_turn_id, *range(100, 130)]
    both = [
        played(
            bundle,
            lambda _: TransformersEngine(PolicyModule(bundle)),
            program=program,
            response_tokens=24,
            episodes=4,
        )
        for program in (False, True)
    ]
    check_same(*both, bundle)
    lengths = [len(turn.response_ids) for each in both[0] for turn in each.turns]
    assert len(lengths) == 24
    # responses with an end of their own, and cut ones
    assert min(lengths) < 24 and max(lengths) == 24


FIND = calls(("find", {"item": "book"}))
FLY = calls(("fly", {}))
SAYS = (
    FIND + '\n<tool_call>\n{"name": "say", "argum\n</tool_call>',
    f"{FLY}\n{FIND}\n{FLY}",
    calls(("find", {"item": "lamp"}), ("say", {"text": "code"})),
    "I do not know.",
    calls(("refund", {"order": "A1", "amount": 5000})),
    calls(("say", {"text": 'what "does" it\nsay <|im_end|> é? refused late'})),
)


# only where nothing of a response is carried out it ends the episode
@pytest.mark.parametrize(("invalid_ends", "turns"), [(False, 6), (True, 4)])
def test_calls_and_their_results_give_the_same_tokens(invalid_ends, turns):
    bundle = bundle_of("qwen2_5")

    def engine(context: ContextManager) -> ScriptedEngine:
        return ScriptedEngine(context, lambda _, turn: SAYS[turn])

    both = [
        played(bundle, engine, program=program, invalid_ends=invalid_ends)
        for program in (False, True)
    ]
    check_same(*both, bundle)
    (trajectory,) = both[0]
    assert len(trajectory.turns) == turns
    if not invalid_ends:
        # more than the penalty of invalid responses
        assert {turn.reward for turn in trajectory.turns} - {0.0, -0.25}
    # a call beside a malformed one, or beside those of tools that do not exist, is carried out
    for turn in trajectory.turns[:2]:
        assert len(turn.actions) == 1 and not turn.action_is_valid


def test_an_invalid_response_ends_the_episode_where_it_does_in_the_environment():
    bundle = bundle_of("qwen2_5")
    says = (FIND, FLY)
    both = [
        played(
            bundle,
            lambda context: ScriptedEngine(context, lambda _, turn: says[turn]),
            program=program,
            invalid_ends=True,
        )
        for program in (False, True)
    ]
    check_same(*both, bundle)
    assert [np.sign(turn.reward) for turn in both[1][0].turns] == [0, -1]
