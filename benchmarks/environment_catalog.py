"""Write docs/environment_catalog.md: what each shipped environment is, how policies do, and an episode of each.

Each environment of `conf/env` is played as shipped, with the policies of its `validation.baselines`, through the
trainer's own turn loop. Success has a 95% interval (Wilson). An environment whose library is not installed keeps what
the page says of it. Run `python benchmarks/environment_catalog.py`, or with `--only NAME …` for some of them.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.progress import track

from ragen_pl.config.errors import ConfigError
from ragen_pl.config.paths import config_dir
from ragen_pl.data.validation import HELD_OUT, initial_state_seed
from ragen_pl.environments.calls import make_environment, manager_settings
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.metrics.proportions import wilson
from ragen_pl.playing.film import save_episode
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.trajectory import Trajectory

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "environment_catalog.md"
IMAGES = ROOT / "docs" / "environments"
LEFT_OUT = ("custom", "mixture", "openenv")  # your own one, several, and one on a server
# extra and licence of the library that an environment plays, by a part of its target
LIBRARIES = {
    "minigrid": ("minigrid", "Apache-2.0"),
    "babyai": ("minigrid", "Apache-2.0"),
    "reasoning_gym": ("reasoning", "Apache-2.0"),
    "textarena": ("textarena", "MIT"),
    "textworld": ("textworld", "MIT, with GPL-2.0 Jericho"),
    "miniwob": ("miniwob", "MIT, and a Chromium"),
    "metaworld": ("metaworld", "MIT"),
    "miniworld": ("miniworld", "Apache-2.0"),
    "svg": ("svg", "MIT"),
}
HEAD = (
    "| environment | observation | actions | turns | return | garbage | random policy | trivial | best policy "
    "| turns/s | library |"
)
INTRODUCTION = """\
# Environments

Written by `python benchmarks/environment_catalog.py` from the settings in `conf/env`. Each environment is played as
shipped, by the random policy, by trivial policies, and by the scripted or optimal one, on the first initial
states of the validation set. Garbage is the return of responses without a valid action. Of the trivial policies
(`envs/trivial_policies.py`, `validation.baselines` of the environment's file) the table has the one with the most
success; what none of them exceeds is in the docstring of the environment's class. Success has 95% intervals. Turns are
those of the best policy, and the most allowed. Turns per second are those of one thread of a busy machine, without
prompts and model. [Bring your own environment](own_environments.md) has the protocol.
"""
# policies that are not trivial, or have a column of their own
_OTHERS = ("random", "garbage", "optimal", "fair")
_TURNS_SHOWN = 4
_CHARACTERS_SHOWN = 400


@dataclass(frozen=True, slots=True)
class Play:
    """Episodes of a policy, and the seconds that they took."""

    trajectories: list[Trajectory]
    seconds: float

    @property
    def turns(self) -> int:
        """Number of turns of all episodes."""
        return sum(len(trajectory.turns) for trajectory in self.trajectories)

    @property
    def mean_return(self) -> float:
        """Mean return of the episodes."""
        return float(np.mean([trajectory.reward for trajectory in self.trajectories]))

    @property
    def success(self) -> float:
        """Fraction of successes."""
        return float(np.mean([trajectory.success for trajectory in self.trajectories]))

    def interval(self) -> str:
        """Return the fraction of successes with its interval."""
        fraction = wilson(self.success, count=len(self.trajectories))
        return f"{fraction.value:.2f} [{fraction.low:.2f}, {fraction.high:.2f}]"


def play(cfg: DictConfig, policy: str, *, episodes: int, seconds: float) -> Play | None:
    """Play with a scripted policy of the config for a number of episodes, or less when the time is over."""
    settings = cfg.validation.baselines.get(policy)
    if settings is None:
        return None
    proxy = AgentProxy(
        environments=EnvironmentManager(**manager_settings(cfg.env)),
        context=TextContext(),
        max_response_tokens=sys.maxsize,
    )
    responder = ScriptedResponder(policy=instantiate(settings))
    trajectories: list[Trajectory] = []
    begun = time.perf_counter()
    for number in range(episodes):
        seed = initial_state_seed(HELD_OUT, number)
        spec = EpisodeSpec(group=number, member=0, seed=seed, held_out=True)
        trajectories += proxy.rollout(responder, [spec], seed_key=(0, "catalog", policy))
        if time.perf_counter() - begun > seconds:
            break
    if failed := [trajectory.error for trajectory in trajectories if trajectory.error]:
        raise RuntimeError(f"env={cfg.env.name}: {len(failed)} episodes failed: {failed[0]}")
    return Play(trajectories, time.perf_counter() - begun)


def row(cfg: DictConfig, env: Any, plays: Mapping[str, Play | None]) -> str:
    """Return the environment's line of the table."""
    # garbage takes no step
    present = [play for name, play in plays.items() if play is not None and name != "garbage"]
    trajectories = [trajectory for play in present for trajectory in play.trajectories]
    images = trajectories[0].turns[0].observation.images
    sizes = " and ".join(f"{image.shape[1]} by {image.shape[0]}" for image in images)
    returns = [trajectory.reward for trajectory in trajectories]
    # of a game without an optimal player the fair one
    best, garbage = plays.get("optimal", plays.get("fair")), plays.get("garbage")
    trivial = {name: play for name, play in plays.items() if play and name not in _OTHERS}
    luckiest = max(trivial, key=lambda name: trivial[name].success, default="")
    mean_turns = f"{best.turns / len(best.trajectories):.1f} of " if best else ""
    cells = [
        f"[`{cfg.env.name}`](#{cfg.env.name})",
        f"images of {sizes}" if images else "text",
        actions(env),
        f"{mean_turns}{cfg.env.max_turns}",
        f"{min(returns):.2f} to {max(returns):.2f}",
        f"{garbage.mean_return:.2f}" if garbage else "",
        _interval(plays.get("random")),
        f"{_interval(trivial[luckiest])} `{luckiest}`" if luckiest else "",
        _interval(best),
        f"{sum(play.turns for play in present) / sum(play.seconds for play in present):,.0f}",
        library(cfg),
    ]
    return f"| {' | '.join(cells)} |"


def _interval(play: Play | None) -> str:
    return play.interval() if play else ""


def actions(env: Any) -> str:
    """Return the actions of an environment in a few words."""
    if not isinstance(env.action_space, spaces.Text):
        return f"{len(env.action_names)} names"
    if tools := getattr(env, "tools", None):
        return f"tools: {', '.join(sorted(tools))}"
    return f"text, at most {env.action_space.max_length}"


def library(cfg: DictConfig) -> str:
    """Return licence and installation of the library behind an environment."""
    target = f"{cfg.env.target} {cfg.env.name}".lower()
    for part, (extra, licence) in LIBRARIES.items():
        if part in target:
            return f"`pip install 'ragen_pl[{extra}]'`, {licence}"
    return "gymnasium, MIT" if ".gym." in target else "own"


def section(cfg: DictConfig, env: Any, summary: str, play: Play) -> str:
    """Return the environment's section: its rules and the beginning of an episode."""
    trajectory = min(play.trajectories[:20], key=lambda episode: abs(len(episode.turns) - 3))
    lines = [f"## {cfg.env.name}", "", f"{summary}.", "", quoted(env.instructions), ""]
    if trajectory.turns[0].observation.images:
        IMAGES.mkdir(exist_ok=True)
        image = save_episode(trajectory, IMAGES / f"{cfg.env.name}.png")
        lines += [f"![An episode of {cfg.env.name}]({image.relative_to(PAGE.parent)})", ""]
    lines += ["```text"]
    for turn in trajectory.turns[:_TURNS_SHOWN]:
        lines += [cut(turn.observation.text), f"> {cut(' || '.join(turn.actions))}"]
    if len(trajectory.turns) > _TURNS_SHOWN:
        lines += ["…"]
    return "\n".join([*lines, "```", ""])


def quoted(text: str) -> str:
    """Return a text as a quotation in Markdown, its marks shown as they are."""
    escaped = html.escape(text, quote=False).replace("*", "\\*").replace("_", "\\_")
    return "\n".join(f"> {line}".rstrip() for line in escaped.splitlines())


def cut(text: str) -> str:
    """Return the beginning of a text, without what would end a block of code."""
    shown = text if len(text) <= _CHARACTERS_SHOWN else text[:_CHARACTERS_SHOWN] + " …"
    return shown.replace("```", "'''")


def catalog(names: Sequence[str], *, episodes: int, seconds: float) -> dict[str, tuple[str, str]]:
    """Return line and section of each environment that can be played here."""
    entries = {}
    for name in track(names, description="environments"):
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            cfg = compose("fit", overrides=[f"env={name}", "logger=none"])
        try:
            env = make_environment(cfg.env)
        except ConfigError as error:
            print(f"{name}: left as it is: {error}")
            continue
        try:
            env.reset(seed=0)
            plays = {
                policy: play(cfg, policy, episodes=episodes, seconds=seconds)
                for policy in map(str, cfg.validation.baselines)
            }
            comment = (config_dir() / "env" / f"{name}.yaml").read_text().splitlines()[1]
            shown = plays.get("optimal") or plays["random"]
            assert shown is not None
            text = section(cfg, env.unwrapped, comment.removeprefix("# "), shown)
            entries[name] = (row(cfg, env.unwrapped, plays), text)
        finally:
            env.close()
    return entries


def present_entries(page: str) -> dict[str, tuple[str, str]]:
    """Return the lines and sections that a page has."""
    lines = dict(re.findall(r"^(?=\| \[`(\w+)`\])(.*)$", page, re.M))
    sections = dict(re.findall(r"^(?=## (\w+)$)(.*?)(?=^## |\Z)", page, re.M | re.S))
    return {name: (line, sections[name]) for name, line in lines.items() if name in sections}


def written(entries: Mapping[str, tuple[str, str]]) -> str:
    """Return the page."""
    lines = [line for _, (line, _) in sorted(entries.items())]
    sections = [text.rstrip() + "\n" for _, (_, text) in sorted(entries.items())]
    rule = "|" + "---|" * HEAD.count(" | ") + "---|"
    return "\n".join(
        [
            INTRODUCTION,
            HEAD,
            rule,
            *lines,
            "",
            *sections,
        ]
    )


def main() -> None:
    """Play the environments and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted(path.stem for path in (config_dir() / "env").glob("*.yaml"))
    names = [name for name in names if name not in LEFT_OUT]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--episodes", type=int, default=200, help="episodes of each policy")
    parser.add_argument("--seconds", type=float, default=20.0, help="longest time of a policy")
    parser.add_argument("--page", type=Path, default=PAGE)
    chosen = parser.parse_args()
    entries = present_entries(chosen.page.read_text()) if chosen.page.exists() else {}
    entries |= catalog(chosen.only, episodes=chosen.episodes, seconds=chosen.seconds)
    chosen.page.write_text(written({name: entries[name] for name in names if name in entries}))
    print(f"wrote {chosen.page}")


if __name__ == "__main__":
    main()
