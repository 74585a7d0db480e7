"""`ragen_pl.play` from its config: who plays, what is shown, what is saved. Imported late."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from ragen_pl.config.errors import ConfigError
from ragen_pl.rollout.environments import EnvironmentSlot, EpisodeSpec
from ragen_pl.run.build import build_environments, engine_factory, plain, rollout_settings
from ragen_pl.seeding import derive_seed
from ragen_pl.trajectory import Trajectory, Turn
from ragen_pl.viewing.episode import Watch, WatchedProxy, play_by_hand
from ragen_pl.viewing.film import save_episode
from ragen_pl.viewing.terminal import Screen

_STOP = ("q", "quit", "exit")


def play(cfg: DictConfig, *, console: Console | None = None) -> Trajectory:
    """Play an episode, show it and save it.

    Raises:
        ConfigError: the policy, or the environment, can't play.
    """
    console = console or Console()
    screen = Screen(console, width=cfg.width)
    seed = derive_seed("panel", "held_out", cfg.episode)
    start = EpisodeSpec(group=cfg.episode, member=0, seed=seed)
    try:
        trajectory = _played(cfg, start, screen=screen)
    except (RuntimeError, AttributeError, TypeError) as error:
        if cfg.debug:
            raise
        raise ConfigError(f"policy={cfg.policy} can't play {cfg.env.name}: {error}") from error
    screen.end(trajectory)
    if cfg.save is not None and trajectory.turns:
        path = save_episode(trajectory, Path(cfg.save).expanduser())
        console.print(f"saved    {path.absolute()}", soft_wrap=True, highlight=False, markup=False)
    return trajectory


def _played(cfg: DictConfig, start: EpisodeSpec, *, screen: Screen) -> Trajectory:
    by_hand = cfg.policy == "human"
    watch = _watcher(screen, delay=cfg.delay, seen=by_hand)
    if cfg.policy == "agent":
        return _agent(cfg, start, watch=watch)
    choose = partial(ask, screen=screen) if by_hand else _Scripted(cfg, start)
    return play_by_hand(
        build_environments(cfg), start, choose=choose, watch=watch, thinks=not by_hand
    )


def _watcher(screen: Screen, *, delay: float, seen: bool) -> Watch:
    shown: list[Turn] = []

    def watch(turn: Turn) -> None:
        shown.append(turn)
        screen.turn(turn, number=len(shown), seen=seen)
        if delay:
            time.sleep(delay)

    return watch


def _agent(cfg: DictConfig, start: EpisodeSpec, *, watch: Watch) -> Trajectory:
    from ragen_pl.evaluation.evaluator import device_named
    from ragen_pl.modules.policy import PolicyModule
    from ragen_pl.rollout.context import ContextManager
    from ragen_pl.run.weights import load_bundle

    bundle = load_bundle(cfg).to(device_named(cfg.device))
    proxy = WatchedProxy(
        environments=build_environments(cfg),
        context=ContextManager(bundle, **plain(cfg.context)),
        **rollout_settings(cfg),
        watch=watch,
    )
    key = ("evaluate", cfg.seed)  # as an evaluation samples
    engine = engine_factory(cfg)(PolicyModule(bundle))
    engine.load_weights(0)
    (trajectory,) = proxy.rollout(engine, [start], seed_key=key, greedy=cfg.greedy)
    engine.close()
    return trajectory


class _Scripted:
    """Asks one of the config's players."""

    def __init__(self, cfg: DictConfig, start: EpisodeSpec) -> None:
        self.baseline = instantiate(cfg.validation.baselines[cfg.policy])
        self.key = (cfg.seed, "play", str(cfg.policy), start.group)

    def __call__(self, slot: EnvironmentSlot) -> list[int]:
        seed = derive_seed(*self.key, slot.turn)
        return [self.baseline.act(slot.env, np.random.Generator(np.random.Philox(key=seed)))]


def ask(slot: EnvironmentSlot, *, screen: Screen) -> list[int] | None:
    """Show the present state and ask a person for a turn's actions; None when they stop."""
    assert slot.observation is not None
    screen.console.rule(f"turn {slot.turn + 1}", align="left")
    if slot.turn == 0 and (rules := getattr(slot.env.unwrapped, "instructions", "")):
        screen.console.print(str(rules), markup=False, highlight=False)
    screen.state(slot.observation.images, slot.observation.text)
    offers = "  ".join(f"{number} {name}" for number, name in enumerate(slot.action_names))
    while True:
        screen.console.print(f"{offers}  (q stops)", markup=False, highlight=False)
        try:
            said = screen.console.input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        if said.casefold() in _STOP:
            return None
        actions = [named_action(part, slot.action_names) for part in said.split("||")]
        if None not in actions:
            return [action for action in actions if action is not None]


def named_action(said: str, names: Sequence[str]) -> int | None:
    """Return the action that a word means: its number, its name, or the only name that begins so.

    >>> [named_action(said, ("Left", "Down", "Loop")) for said in ("1", "down", "d", "l", "x")]
    [1, 1, 1, None, None]
    """
    known = [str(name).casefold() for name in names]
    word = said.strip().casefold()
    if word in known:
        return known.index(word)
    if word.isdecimal() and int(word) < len(known):
        return int(word)
    has_started = [index for index, name in enumerate(known) if word and name.startswith(word)]
    return has_started[0] if len(has_started) == 1 else None
