"""One episode in the terminal: turns, human and scripted responders, films and strips."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from support.runs.module_process import run_module

from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.playing import film
from ragen_pl.playing.film import episode_frames, save_episode
from ragen_pl.playing.play import HumanResponder, ask, named_action, show_turns
from ragen_pl.playing.terminal import Screen, fitted, half_blocks, printable, shade_text
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.rollout.turns import Episode
from ragen_pl.trajectory import EpisodeStatus, Observation, Trajectory, Turn

FROZEN_LAKE = "visual_envs:ragen/FrozenLakeVisual-v0"


SPEC = EpisodeSpec(group=0, member=0, seed=5)


class AlternatingPolicy:
    """Chooses actions 0 and 1 in turn."""

    def __init__(self) -> None:
        self.turns = 0

    def act(self, env: object, rng: object) -> int:
        self.turns += 1
        return (self.turns - 1) % 2


def shown_turns(episodes: list[Turn], screen: Screen):
    """Return a hook that shows turns on a screen and collects them."""
    show = show_turns(screen)

    def on_turn(episode: Episode) -> None:
        show(episode)
        episodes.append(episode.trajectory.turns[-1])

    return on_turn


def quiet_screen() -> Screen:
    return Screen(Console(file=io.StringIO()), width=8)


def played(target: str = FROZEN_LAKE, *, turns: int = 3) -> tuple[Trajectory, list[Turn]]:
    shown: list[Turn] = []
    proxy = AgentProxy(
        environments=EnvironmentManager(target=target, max_turns=turns), context=TextContext()
    )
    (trajectory,) = proxy.rollout(
        ScriptedResponder(policy=AlternatingPolicy()),
        [SPEC],
        seed_key=(),
        on_turn=shown_turns(shown, quiet_screen()),
    )
    return trajectory, shown


def test_scripted_episode_without_a_model_shows_each_turn() -> None:
    trajectory, shown = played()
    assert shown == trajectory.turns and 1 <= len(shown) <= 3
    assert shown[0].actions == ["Up"] and shown[0].think
    assert len(shown[0].observation.images) == len(trajectory.final_images) == 1


def test_human_episode_ends_when_the_person_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["up", "q"])
    monkeypatch.setattr("builtins.input", lambda *prompt: next(answers))
    proxy = AgentProxy(environments=EnvironmentManager(target=FROZEN_LAKE), context=TextContext())
    responder = HumanResponder(screen=quiet_screen())
    (trajectory,) = proxy.rollout(responder, [SPEC], seed_key=())
    assert trajectory.status is EpisodeStatus.TRUNCATED
    assert [turn.actions for turn in trajectory.turns] == [["Up"]]
    assert len(trajectory.final_images) == 1


def test_agent_episode_shows_each_turn(vlm: ModelBundle) -> None:
    from ragen_pl.engines.in_process.engine import TransformersEngine

    shown: list[Turn] = []
    proxy = AgentProxy(
        environments=EnvironmentManager(target=FROZEN_LAKE, max_turns=2, invalid_ends=False),
        context=ContextManager(vlm, window=1, system_prompt=None),
        max_response_tokens=4,
    )
    engine = TransformersEngine(PolicyModule(vlm))
    engine.load_weights(0)
    (trajectory,) = proxy.rollout(
        EngineResponder(engine=engine, context=proxy.context, greedy=True),
        [SPEC],
        seed_key=(1,),
        on_turn=shown_turns(shown, quiet_screen()),
    )
    assert shown == trajectory.turns and len(shown) == 2 and len(trajectory.final_images) == 1


def test_half_blocks_show_two_pixels_per_character() -> None:
    image = np.zeros((2, 2, 3), np.uint8)
    image[0, 0], image[1, 0] = (255, 0, 0), (0, 0, 255)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=20)
    console.print(half_blocks(image, width=20))
    assert "38;2;255;0;0;48;2;0;0;255m▀" in out.getvalue()
    assert shade_text(image, width=20) == "- " or len(shade_text(image, width=20)) == 2
    assert fitted(np.zeros((40, 100, 3), np.uint8), width=50).shape == (20, 50, 3)
    assert fitted(np.zeros((5, 4, 3), np.uint8), width=50).shape[0] % 2 == 0


def test_turn_shows_reasoning_actions_and_reward_without_control_characters() -> None:
    trajectory, (turn, *_) = played()
    turn.think, turn.reward_terms = "so\x1b[2Jthen [bold]", {"environment": 0.5}
    out = io.StringIO()
    screen = Screen(Console(file=out, width=100), width=16)
    screen.turn(turn, number=1)
    screen.end(trajectory)
    shown = out.getvalue()
    assert "so\\x1b[2Jthen [bold]" in shown and "\x1b" not in shown
    assert "Up" in shown and "0.50" in shown and "return" in shown
    assert printable("a\tb\n\u202e") == "a\tb\n\\u202e"


def test_rules_and_names_of_an_environment_do_not_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (slot,) = EnvironmentManager(target=FROZEN_LAKE).open([SPEC])
    slot.action_names = ("Left\x1b[2J", "Right\udc80")
    monkeypatch.setattr(type(slot.members), "instructions", "Go\x1b[2J")
    monkeypatch.setattr("builtins.input", lambda *prompt: "q")
    out = io.StringIO()
    ask(slot, screen=Screen(Console(file=out, width=100), width=16))
    assert "Go\\x1b[2J" in out.getvalue() and "0 Left\\x1b[2J  1 Right\\udc80" in out.getvalue()


def test_ask_repeats_until_the_answer_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = EnvironmentManager(target=FROZEN_LAKE, max_actions_per_turn=2)
    (slot,) = environments.open([SPEC])
    screen = quiet_screen()
    answers = iter(["", "sideways", "up || 3 || up", "up || 3", "q"])
    monkeypatch.setattr("builtins.input", lambda *prompt: next(answers))
    assert ask(slot, screen=screen, max_actions=2) == [0, 3]
    assert ask(slot, screen=screen) is None
    assert [named_action(word, ("Left", "Down", "Loop")) for word in ("DOWN", "le", "l", "3")] == [
        1,
        0,
        None,
        None,
    ]
    # of names that are numbers, the name is meant
    assert [named_action(word, ("1", "2", "x")) for word in ("0", "1", "2", "x")] == [None, 0, 1, 2]


@pytest.mark.parametrize("target", [FROZEN_LAKE, "envs:ragen/Bandit-v0"])
def test_episode_is_saved_as_film_and_strip(target: str, tmp_path: Path) -> None:
    trajectory, shown = played(target)
    sizes = {frame.size for frame in episode_frames(trajectory)}
    assert len(sizes) == 1
    with Image.open(save_episode(trajectory, tmp_path / "a.gif")) as film:
        assert film.format == "GIF" and getattr(film, "n_frames", 1) == len(shown) + 1
    with Image.open(save_episode(trajectory, tmp_path / "a.png")) as strip:
        assert strip.format == "PNG" and strip.width == min(5, len(shown) + 1) * sizes.pop()[0]
    with pytest.raises(ValueError, match=r"expected \.gif or \.png"):
        save_episode(trajectory, tmp_path / "a.jpg")


@pytest.mark.parametrize("text", ["word " * 40_000, "\n" * 5_000])
def test_a_film_of_long_texts_keeps_what_was_answered(text: str, tmp_path: Path) -> None:
    trajectory, (turn, *_) = played("envs:ragen/Bandit-v0")
    turn.observation = Observation(text=text)
    lines = film._wrapped(film._turn_content(turn, 1).lines)
    assert lines[0] == "turn 1" and lines[-1] == "reward: 0.00" and "…" in lines
    with Image.open(save_episode(trajectory, tmp_path / "a.gif")) as saved:
        assert saved.height < 4_000


def command(*arguments: str, folder: Path, answers: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, input=answers, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.mark.slow
def test_human_plays_from_the_command_line(tmp_path: Path) -> None:
    done = command(
        "ragen_pl.play",
        "policy=human",
        "env=frozenlake",
        "save=me.png",
        folder=tmp_path,
        answers="up\nq\n",
    )
    assert done.returncode == 0, done.stderr
    assert "answer  Up" in done.stdout and (tmp_path / "me.png").exists()


@pytest.mark.slow
def test_a_person_has_a_seat_against_a_model(lm: ModelBundle, tmp_path: Path) -> None:
    lm.save(tmp_path / "model")
    game = (
        "ragen_pl.play", "ckpt=model", "policy=human", "env=tic_tac_toe", "save=null",
        "env.invalid_ends=false",
    )  # fmt: skip
    free = "env.kwargs.validation_opponent=null"
    done = command(*game, "seat=0", free, folder=tmp_path, answers="0\n1\nq\n")
    assert done.returncode == 0, done.stderr
    # an untrained model makes no legal move, and is asked again until its turns are used up
    assert done.stdout.index("you, turn 1") < done.stdout.index("the agent, turn 1")
    assert "the agent, turn 5" in done.stdout and "no valid action" in done.stdout
    # the names of the cells are numbers: there is no cell 0
    assert "1  2  3" in done.stdout and done.stdout.count("(q stops)") >= 2
    stopped = command(*game, "seat=0", free, folder=tmp_path, answers="q\n")
    assert stopped.returncode == 0 and "in 0 turns (truncated)" in stopped.stdout
    # without a legal first move the model loses, which is no result of the person
    name, *given = game
    code, ended = run_module(
        name, [*given, "seat=1", free, "env.invalid_ends=true"], folder=tmp_path, timeout=600
    )
    assert code == 0 and ended.index("this is the agent's result") < ended.index("return -1.05")
    for arguments, message in (
        ([*given, "seat=2", free], "seat=2: the environment has seats=2"),
        ([*given, "seat=0"], "seat=0: the environment has seats=1"),
        (["policy=random", "seat=0"], "set policy=human and ckpt="),
    ):
        code, output = run_module(name, arguments, folder=tmp_path, timeout=600)
        assert code == 2 and message in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ragen_pl.play", "env=bandit"), "ckpt has no value"),
        (("ragen_pl.play", "policy=random", "save=a.jpg"), "save=a.jpg: expected a name"),
        (("ragen_pl.play", "policy=optimla"), "did you mean optimal?"),
        (("ragen_pl.page",), "records has no value"),
        (
            ("ragen_pl.page", "records=."),
            "records=.: there is no trajectories.jsonl in it or below",
        ),
    ],
)
def test_invalid_arguments_end_in_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = command(*arguments, folder=tmp_path)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
