"""Players without skill: each earns at most what the class docstring of its environment says, and garbage the least."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig
from support.runs.composing import composed

from envs.policies import ScriptedPolicy
from envs.trivial_policies import AddAll, Buy, Constant, Cycle, Decide, HitBelow
from ragen_pl.data.validation import HELD_OUT, initial_state_seed
from ragen_pl.environments.calls import manager_settings
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder

EPISODES = 96
# fewer where a turn is dear, more where chance decides
COUNTS = {"babyai": 48, "blackjack": 512, "code": 24, "game_2048": 48, "gym": 12}
NAMES = (
    *("babyai", "bandit", "bandit_memory", "blackjack", "code", "frozenlake", "frozenlake_slippery"),
    *("game_2048", "gym", "invoice_check", "knowledge_base", "pocket_cube", "sokoban", "support_desk", "svg"),
    "web_shop",
)  # fmt: skip
NEED_A_LIBRARY = ("arithmetic", "countdown", "mini_sudoku", "textarena", "word_problem")
BOUND = re.compile(r"(success|return)(?: at most (-?[\d.]+\d))")
SETTINGS = re.compile(r"In (?:the task of )?`env=(\w+)`")
OTHERS = ("random", "optimal", "garbage")
# more players than the summary of a run has
MORE: dict[str, list[ScriptedPolicy]] = {
    "arithmetic": [Constant(action="{0}")],
    "babyai": [Cycle(actions=["Left", "Forward"]), Constant(action="Forward")],
    "blackjack": [Constant(action=0), *(HitBelow(total=total) for total in (12, 15, 17))],
    "countdown": [Constant(action=form) for form in ("{1} * {2} + {3}", "{1} * {2} - {3}")],
    "frozenlake": [Constant(action="Right"), Cycle(actions=["Up", "Left"])],
    "game_2048": [Cycle(actions=["Down"], otherwise=["Left", "Right", "Up"])],
    "invoice_check": [Decide(verdict="refuse", field=field) for field in ("count", "price")],
    "pocket_cube": [Constant(action="U"), Cycle(actions=["R", "U"]), Cycle(actions=["R", "U", "R-", "U-"])],
    "sokoban": [Constant(action="Up"), Cycle(actions=["Down", "Right"])],
    "web_shop": [Buy(choice="dearest"), Buy(choice="best")],
    "word_problem": [Constant(action="{0}"), AddAll()],
}  # fmt: skip


def bounds(name: str, environment: Any) -> Mapping[str, float]:
    """Return the largest success and return of trivial players that the docstring of an environment's class states.

    Where it has sentences on `env=…`, those on this one count.
    """
    docs = [base.__doc__ or "" for base in type(environment).__mro__]
    sections = [doc.partition("## Trivial Policies")[2].partition("##")[0] for doc in docs]
    stated = next((section for section in sections if section), "")
    of_all, *of_each = SETTINGS.split(" ".join(stated.split()))
    named = [text for env, text in zip(of_each[::2], of_each[1::2], strict=True) if env == name]
    found = BOUND.findall(" ".join(named) if of_each else of_all)
    return {metric: max(float(b) for m, b in found if m == metric) for metric, _ in found}


def played(cfg: DictConfig, policy: ScriptedPolicy, *, episodes: int) -> tuple[float, float, float]:
    """Return success, mean and lowest return of a policy on the first initial states of the validation set."""
    proxy = AgentProxy(
        environments=EnvironmentManager(**manager_settings(cfg.env)),
        context=TextContext(),
        max_response_tokens=sys.maxsize,
    )
    specs = [
        EpisodeSpec(group=n, member=0, seed=initial_state_seed(HELD_OUT, n))
        for n in range(episodes)
    ]
    responder = ScriptedResponder(policy=policy)
    trajectories = proxy.rollout(responder, specs, seed_key=("trivial", type(policy).__name__))
    assert not [each.error for each in trajectories if each.error]
    successes = [each.success for each in trajectories]
    returns = [each.reward for each in trajectories]
    return float(np.mean(successes)), float(np.mean(returns)), min(returns)


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(n, marks=pytest.mark.environments) for n in NEED_A_LIBRARY)]
)
def test_no_player_without_skill_earns_more_than_its_bound(name: str) -> None:
    cfg = composed(f"env={name}", "logger=none")
    environment = EnvironmentManager(**manager_settings(cfg.env)).make().unwrapped
    stated, episodes = bounds(name, environment), COUNTS.get(name, EPISODES)
    player = functools.partial(played, cfg, episodes=episodes)
    baselines = {str(key): instantiate(each) for key, each in cfg.validation.baselines.items()}
    garbage_success, garbage, _ = player(baselines["garbage"])
    shipped = [policy for key, policy in baselines.items() if key not in OTHERS]
    assert garbage_success == 0 and (stated or not shipped)
    for policy in [*shipped, *MORE.get(name, [])]:
        success, earned, lowest = player(policy)
        assert success <= stated["success"], vars(policy)
        assert earned <= stated.get("return", stated["success"]), vars(policy)
        # an honest error, too, is worth more than no answer
        assert lowest > garbage, vars(policy)
    assert player(baselines["random"])[1] > garbage
