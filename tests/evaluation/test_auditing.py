"""Effects of turns that are measured by continuations are those of the game, and advantages are compared with them."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from omegaconf import OmegaConf
from support.runs.called_commands import caller
from support.runs.composing import composed

from envs.policies import RandomPolicy
from ragen_pl.config import ConfigError
from ragen_pl.config.composition import compose_overrides
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.evaluation.auditing import CHANCE, TurnEffect, compared, measured_effects
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.run.train import train

# rewards of the second action by the first one
SECOND = ((1.0, 0.0), (0.0, 0.5))
FIRST = (0.25, 0.0)
# of both actions in the first state, and in each second one, for a player that draws its actions evenly
EFFECTS = {
    0: {(0,): 0.25, (1,): -0.25},
    1: {(0, 0): 0.5, (0, 1): -0.5, (1, 0): -0.25, (1, 1): 0.25},
}


class TwoDoors(gymnasium.Env[str, int]):
    """Two actions, each with a reward of its own."""

    action_names = ("Left", "Right")
    observation_space, action_space = gymnasium.spaces.Text(9), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.taken: list[int] = []
        return self._shown(), {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.taken.append(int(action))
        ends = len(self.taken) == 2
        reward = SECOND[self.taken[0]][self.taken[1]] if ends else FIRST[self.taken[0]]
        return self._shown(), reward, ends, False, {"success": ends and reward > 0}

    def _shown(self) -> str:
        return "doors" + "".join(map(str, self.taken))


class SilentDoors(TwoDoors):
    """Does not say whether it is solved."""

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {}


class ChangingDoors(TwoDoors):
    """Shows another text in each episode."""

    episodes = itertools.count()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.number = next(self.episodes)
        return super().reset(seed=seed)

    def _shown(self) -> str:
        return f"doors {self.number % 7}{len(self.taken)}"


class FailingDoors(TwoDoors):
    """Fails after the episodes that are credited."""

    steps = itertools.count()

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if next(self.steps) >= 32:
            raise ValueError("the doors are locked")
        return super().step(action)


gymnasium.register("test/FailingDoors-v0", entry_point=FailingDoors, disable_env_checker=True)
gymnasium.register("test/TwoDoors-v0", entry_point=TwoDoors, disable_env_checker=True)
gymnasium.register("test/SilentDoors-v0", entry_point=SilentDoors, disable_env_checker=True)
gymnasium.register("test/ChangingDoors-v0", entry_point=ChangingDoors, disable_env_checker=True)


def measure(lm, name: str, *, continuations: int):
    """Return episodes of a player that draws its actions evenly, and the effects of their turns."""
    proxy = AgentProxy(
        environments=EnvironmentManager(target=f"test/{name}-v0", max_turns=3),
        context=ContextManager(lm, window=1, system_prompt=None),
        max_response_tokens=40,
    )
    player = ScriptedResponder(policy=RandomPolicy())
    specs = [
        EpisodeSpec(group=group, member=member, seed=group)
        for group in range(4)
        for member in range(4)
    ]
    episodes = list(zip(specs, proxy.rollout(player, specs, seed_key=("test",)), strict=True))
    return episodes, measured_effects(proxy, player, episodes, continuations=continuations, seed=0)


def test_effects_are_those_of_the_game(lm):
    episodes, effects = measure(lm, "TwoDoors", continuations=64)
    assert len(effects) == sum(len(trajectory.turns) for _, trajectory in episodes) == 32
    errors = []
    for one in effects:
        turns = episodes[one.episode][1].turns[: one.turn + 1]
        taken = tuple(TwoDoors.action_names.index(turn.actions[0]) for turn in turns)
        errors.append((one.effect - EFFECTS[one.turn][taken]) / np.sqrt(one.variance))
    # of a normal distribution: 4 in none of ten thousand, and a deviation of 1
    assert np.abs(errors).max() < 4 and 0.4 < np.std(errors) < 1.6
    assert len({round(one.effect, 6) for one in effects}) > 4


def test_an_environment_that_does_not_repeat_is_refused(lm):
    with pytest.raises(ConfigError, match=r"turn 2 of an episode does not come again"):
        measure(lm, "ChangingDoors", continuations=2)


def effects_of(true: np.ndarray, noise: np.ndarray) -> list[TurnEffect]:
    return [
        TurnEffect(episode=row // 4, turn=row % 4, group=row // 16, effect=float(effect), variance=float(square))
        for row, (effect, square) in enumerate(zip(true, noise, strict=True))
    ]  # fmt: skip


def test_an_environment_that_fails_in_all_continuations_is_refused(lm):
    with pytest.raises(ConfigError, match="the continuations failed; see their errors above"):
        measure(lm, "FailingDoors", continuations=2)


def test_correlations_are_those_without_the_noise_of_the_effects():
    random = np.random.default_rng(0)
    true, error, other = random.normal(size=(3, 4000))
    effects = effects_of(true + 0.5 * error, np.full(len(true), 0.25))
    found = compared(effects, {"half": true + other, "minus": -true, "other": other}, seed=1)
    assert list(found.agreements) == ["half", "other", "minus", CHANCE]
    assert found.reliability == pytest.approx(0.8, abs=0.02)
    half, minus = found.agreements["half"], found.agreements["minus"]
    # the correlation of x with x + y, and with noise of a quarter of its variance
    assert half.exact == pytest.approx(np.sqrt(0.5), abs=0.03)
    assert half.correlation == pytest.approx(np.sqrt(0.5 / 1.25), abs=0.03)
    assert half.signal_to_noise == pytest.approx(1, abs=0.15)
    assert minus.exact == pytest.approx(-1, abs=0.03)
    for name in ("other", CHANCE):
        assert found.agreements[name].low < 0 < found.agreements[name].high
    assert half.low < half.correlation < half.high and half.high - half.low < 0.1


def test_effects_within_their_noise_have_no_correlation():
    effects = effects_of(np.tile([0.1, -0.1], 32), np.ones(64))
    found = compared(effects, {"same": [one.effect for one in effects]}, seed=0)
    assert found.reliability == 0
    assert np.isnan(found.agreements["same"].exact)
    assert found.agreements["same"].correlation == pytest.approx(1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a critic whose policy finds some goals."""
    folder = tmp_path_factory.mktemp("run") / "lake"
    train_small(folder, "env=frozenlake", "env.invalid_ends=false", "env.kwargs.min_distance=1")
    return folder


@pytest.fixture(scope="module")
def silent_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in an environment without states and success, in which the policy acts."""
    folder = tmp_path_factory.mktemp("run") / "doors"
    train_small(folder, "env=custom", "env.target=test/SilentDoors-v0", "validation.held_out=false")
    return folder


def train_small(folder: Path, *overrides: str) -> None:
    small = [
        *overrides, "env.max_turns=3", "curriculum=null",
        "model.build.text.hidden_size=32", "model.build.text.intermediate_size=64",
        "model.build.text.num_attention_heads=2", "rollout.groups=4", "validation.episodes=2",
        "validation.baselines=null", "warm_start.steps=60", "warm_start.episodes=64", "warm_start.batch_size=32",
        "warm_start.optimizer.lr=1e-2", "trainer.max_epochs=1", "update.epochs=1",
        "callbacks.progress=null", "callbacks.trajectories=null", "callbacks.plots=null", "logger=none",
    ]  # fmt: skip
    train(composed(*small, f"paths.run_dir={folder}"))


@pytest.fixture
def audit(monkeypatch, capsys):
    """Return `python -m ragen_pl.audit` as a function of its arguments."""
    return functools.partial(caller(monkeypatch, capsys), "audit")


@pytest.mark.slow
def test_command_audits_a_run(run, audit, tmp_path):
    sizes = ("groups=4", "group_size=4", "continuations=4", "algorithms=[trico,rloo,cast]")
    shown = audit(f"ckpt={run}", *sizes, f"to={tmp_path / 'one'}")
    assert shown.code == 0 and "trico" in shown.stdout and "rloo" in shown.stdout, shown
    audit(f"ckpt={run}", *sizes, f"to={tmp_path / 'two'}")
    turns, figures = (
        [(tmp_path / folder / name).read_text() for folder in ("one", "two")]
        for name in ("turns.jsonl", "audit.json")
    )
    assert turns[0] == turns[1] and figures[0] == figures[1]
    rows = [json.loads(line) for line in turns[0].splitlines()]
    assert json.loads(figures[0])["turns"] == len(rows)
    by_member: dict[int, set[float]] = {}
    for row in rows:
        by_member.setdefault(row["episode"], set()).add(row["advantages"]["rloo"])
    # one advantage for all turns of an episode
    assert {len(values) for values in by_member.values()} == {1}
    assert len({row["advantages"]["trico"] for row in rows}) > len(by_member)
    # and beside it one of the solver
    kinds = ({row["advantages"][name] for row in rows} for name in ("cast", "rloo"))
    assert len(next(kinds)) > len(next(kinds))


@pytest.mark.slow
def test_what_cannot_be_audited_is_refused_in_one_line(run, audit, tmp_path):
    assert "algorithms=tricco" in audit(f"ckpt={run}", "algorithms=[tricco]").refused()
    # one group would give intervals without a width
    for key in ("groups", "group_size", "continuations"):
        assert (
            f"{key}=1: expected a whole number, at least 2"
            in audit(f"ckpt={run}", f"{key}=1").refused()
        )
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    settings = (run / "config.yaml").read_text()
    (foreign / "config.yaml").write_text(settings + "# of somebody else\n")
    (foreign / "checkpoints").mkdir()
    (foreign / "checkpoints" / "last.ckpt").write_bytes(
        (run / "checkpoints" / "last.ckpt").read_bytes()
    )
    refused = audit(f"ckpt={foreign}").refused()
    assert "somebody else's run" in refused and "trust=true" in refused


@pytest.mark.slow
def test_algorithms_that_need_what_an_environment_has_not_are_left_out(silent_run, audit, tmp_path):
    names = "algorithms=[gigpo,gagpo,graphgpo,maxrl,cast,rloo]"
    audit(f"ckpt={silent_run}", "groups=2", "group_size=3", names, f"to={tmp_path}")
    figures = json.loads((tmp_path / "audit.json").read_text())
    assert [*figures["algorithms"]] == ["rloo", CHANCE]


@pytest.mark.slow
def test_a_run_of_several_environments_is_refused(run, audit, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(
        (run / "checkpoints" / "last.ckpt").read_bytes()
    )
    mixture = compose_overrides(
        "fit", ["env=mixture", "env.environments={frozenlake: 1, bandit: 1}"]
    )
    OmegaConf.save(mixture, tmp_path / "config.yaml")
    refused = audit(f"ckpt={tmp_path}", "trust=true").refused()
    assert "is a mixture of frozenlake, bandit, and an audit takes a run of one" in refused
