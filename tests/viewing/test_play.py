"""One episode for a person: shown turn by turn, played by anyone, kept as a film or a strip."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from ragen_pl.modules.policy import PolicyModule
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.environments import EnvironmentManager, EpisodeSpec
from ragen_pl.trajectory import Trajectory, Turn
from ragen_pl.viewing.episode import WatchedProxy, play_by_hand
from ragen_pl.viewing.film import episode_frames, save_episode
from ragen_pl.viewing.play import ask, named_action
from ragen_pl.viewing.terminal import Screen, fitted, half_blocks, in_shades, printable

LAKE = "visual_envs:ragen/FrozenLakeVisual-v0"


def played(target: str = LAKE, *, turns: int = 3) -> tuple[Trajectory, list[Turn]]:
    told: list[Turn] = []
    trajectory = play_by_hand(
        EnvironmentManager(target=target, max_turns=turns), EpisodeSpec(group=0, member=0, seed=5),
        choose=lambda slot: [slot.turn % 2], watch=told.append,
    )  # fmt: skip
    return trajectory, told


def test_each_turn_is_told_and_kept() -> None:
    trajectory, told = played()
    assert told == trajectory.turns and 1 <= len(told) <= 3
    assert told[0].actions == ["Up"] and told[0].think
    assert len(told[0].observation.images) == len(trajectory.final_images) == 1


def test_the_agent_is_watched_while_it_plays() -> None:
    from ragen_pl.models.build import build_small_vlm
    from ragen_pl.rollout.transformers_engine import TransformersEngine

    text = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    bundle = build_small_vlm(
        seed=0, vision={"width": 32, "heads": 2}, text={**text, "num_key_value_heads": 2}
    )
    told: list[Turn] = []
    proxy = WatchedProxy(
        environments=EnvironmentManager(target=LAKE, max_turns=2, invalid_ends=False),
        context=ContextManager(bundle, window=1, system_prompt=None),
        max_response_tokens=4,
        watch=told.append,
    )
    engine = TransformersEngine(PolicyModule(bundle))
    engine.load_weights(0)
    (trajectory,) = proxy.rollout(
        engine, [EpisodeSpec(group=0, member=0, seed=5)], seed_key=(1,), greedy=True
    )
    assert told == trajectory.turns and len(told) == 2 and len(trajectory.final_images) == 1


def test_a_image_is_two_pixels_a_character() -> None:
    image = np.zeros((2, 2, 3), np.uint8)
    image[0, 0], image[1, 0] = (255, 0, 0), (0, 0, 255)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=20)
    console.print(half_blocks(image, width=20))
    assert "38;2;255;0;0;48;2;0;0;255m▀" in out.getvalue()
    assert in_shades(image, width=20) == "- " or len(in_shades(image, width=20)) == 2
    assert fitted(np.zeros((40, 100, 3), np.uint8), width=50).shape == (20, 50, 3)
    assert fitted(np.zeros((5, 4, 3), np.uint8), width=50).shape[0] % 2 == 0


def test_a_turn_shows_what_was_thought_done_and_earned_and_cannot_steer_the_terminal() -> None:
    trajectory, (turn, *_) = played()
    turn.think, turn.reward = "so\x1b[2Jthen [bold]", 0.5
    out = io.StringIO()
    screen = Screen(Console(file=out, width=100), width=16)
    screen.turn(turn, number=1)
    screen.end(trajectory)
    shown = out.getvalue()
    assert "so\\x1b[2Jthen [bold]" in shown and "\x1b" not in shown
    assert "Up" in shown and "0.50" in shown and "return" in shown
    assert printable("a\tb\n\u202e") == "a\tb\n\\u202e"


def test_a_person_is_asked_until_the_answer_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = EnvironmentManager(target=LAKE, max_actions_per_turn=2)
    (slot,) = environments.open([EpisodeSpec(group=0, member=0, seed=5)])
    screen = Screen(Console(file=io.StringIO()), width=8)
    said = iter(["", "sideways", "up || 3", "q"])
    monkeypatch.setattr("builtins.input", lambda *prompt: next(said))
    assert ask(slot, screen=screen) == [0, 3]
    assert ask(slot, screen=screen) is None
    assert [named_action(word, ("Left", "Down", "Loop")) for word in ("DOWN", "le", "l", "3")] == [
        1,
        0,
        None,
        None,
    ]


@pytest.mark.parametrize("target", [LAKE, "envs:ragen/Bandit-v0"])
def test_an_episode_becomes_a_film_and_a_strip(target: str, tmp_path: Path) -> None:
    trajectory, told = played(target)
    sizes = {frame.size for frame in episode_frames(trajectory)}
    assert len(sizes) == 1
    with Image.open(save_episode(trajectory, tmp_path / "a.gif")) as film:
        assert film.format == "GIF" and getattr(film, "n_frames", 1) == len(told) + 1
    with Image.open(save_episode(trajectory, tmp_path / "a.png")) as strip:
        assert strip.format == "PNG" and strip.width == min(5, len(told) + 1) * sizes.pop()[0]
    with pytest.raises(ValueError, match=r"expected \.gif or \.png"):
        save_episode(trajectory, tmp_path / "a.jpg")


def command(*arguments: str, folder: Path, said: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, input=said, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


@pytest.mark.slow
def test_a_person_plays_from_the_command_line(tmp_path: Path) -> None:
    done = command(
        "ragen_pl.play",
        "policy=human",
        "env=frozenlake",
        "save=me.png",
        folder=tmp_path,
        said="up\nq\n",
    )
    assert done.returncode == 0, done.stderr
    assert "answer  Up" in done.stdout and (tmp_path / "me.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("ragen_pl.play", "env=bandit"), "ckpt has no value"),
        (("ragen_pl.play", "policy=random", "save=a.jpg"), "save=a.jpg: expected a name"),
        (("ragen_pl.play", "policy=optimla"), "did you mean optimal?"),
        (("ragen_pl.page",), "records has no value"),
        (("ragen_pl.page", "records=."), "records=.:"),
    ],
)
def test_what_can_not_be_done_is_told_in_one_line(
    arguments: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    done = command(*arguments, folder=tmp_path)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1
