"""`ragen_pl.play` from its config: the responder, the display and the saved files. Imported late."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from ragen_pl.assembly.build import (
    build_context,
    build_endpoint,
    build_engine,
    build_environments,
    build_proxy,
    device_named,
)
from ragen_pl.base.error_text import error_text
from ragen_pl.base.prompt_formats import format_response
from ragen_pl.config.errors import ConfigError
from ragen_pl.data.validation import HELD_OUT, initial_state_seed
from ragen_pl.environments.manager import EnvironmentSlot, EpisodeSpec
from ragen_pl.playing.film import save_episode
from ragen_pl.playing.terminal import Screen, printable
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.rollout.endpoint import EndpointResponder
from ragen_pl.rollout.proxy import AgentProxy, OnTurn
from ragen_pl.rollout.responders import EngineResponder, Responder, TextResponder
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.rollout.settings import FailureSettings
from ragen_pl.rollout.turns import Episode
from ragen_pl.trajectory import Trajectory

_STOP = ("q", "quit", "exit")
_SEPARATOR = "||"


@dataclass(kw_only=True, slots=True)
class HumanResponder(TextResponder):
    """A person at the keyboard.

    Attributes:
        screen: Shows the state and reads the answers.
        max_actions: Number of actions accepted in one turn.
    """

    screen: Screen
    max_actions: int = 1

    def respond(self, episode: Episode) -> str | None:
        """Ask for the actions of the present turn; None once the person stops."""
        actions = ask(episode.slot, screen=self.screen, max_actions=self.max_actions)
        if actions is None:
            return None
        answer = f" {_SEPARATOR} ".join(map(episode.slot.action_text, actions))
        if episode.conversation.native is not None:
            return episode.conversation.native.response_text(answer)
        return format_response(episode.prompt_format, answer, blocks={})


def play(cfg: DictConfig, *, console: Console | None = None) -> Trajectory:
    """Play an episode, show it and save it.

    Raises:
        ConfigError: The policy or the environment cannot play.
    """
    console = console or Console()
    screen = Screen(console, width=cfg.width)
    seed = initial_state_seed(HELD_OUT, cfg.episode)
    spec = EpisodeSpec(group=cfg.episode, member=0, seed=seed, held_out=True)
    try:
        runners = {"agent": _play_agent, "endpoint": _play_endpoint}
        runner = _play_against if cfg.seat is not None else runners.get(cfg.policy, _play)
        trajectory = runner(cfg, spec, screen)
        if trajectory.error is not None and not trajectory.turns:
            raise RuntimeError(trajectory.error)
    except (RuntimeError, AttributeError, TypeError) as error:
        if cfg.debug:
            raise
        raise ConfigError(
            f"policy={cfg.policy} cannot play {cfg.env.name}: {error_text(error)}"
        ) from error
    screen.end(trajectory)
    if cfg.save is not None and trajectory.turns:
        path = save_episode(trajectory, Path(cfg.save).expanduser())
        console.print(f"saved    {path.absolute()}", soft_wrap=True, highlight=False, markup=False)
    return trajectory


def _play(cfg: DictConfig, spec: EpisodeSpec, screen: Screen) -> Trajectory:
    """Play without a model: a person, or one of the config's scripted policies."""
    environments = build_environments(cfg.env)
    proxy = AgentProxy(
        environments=environments,
        context=TextContext(),
        max_response_tokens=sys.maxsize,
        # a person may think for long
        failures=FailureSettings(stall_s=None),
    )
    responder: Responder
    is_human = cfg.policy == "human"
    if is_human:
        responder = HumanResponder(screen=screen, max_actions=environments.max_actions_per_turn)
    else:
        responder = ScriptedResponder(policy=instantiate(cfg.validation.baselines[cfg.policy]))
    (trajectory,) = proxy.rollout(
        responder,
        [spec],
        seed_key=(cfg.seed, "play", str(cfg.policy)),
        on_turn=show_turns(screen, delay=cfg.delay, state_is_shown=is_human),
    )
    return trajectory


def _play_agent(cfg: DictConfig, spec: EpisodeSpec, screen: Screen) -> Trajectory:
    """Play with a trained model, which samples as in an evaluation."""
    from ragen_pl.assembly.weights import load_bundle

    bundle = load_bundle(cfg).to(device_named(cfg.device))
    context = build_context(bundle, cfg.context)
    proxy = build_proxy(cfg.rollout, environments=build_environments(cfg.env), context=context)
    with closing(build_engine(cfg.rollout.engine, bundle)) as engine:
        engine.load_weights(0)
        (trajectory,) = proxy.rollout(
            EngineResponder(engine=engine, context=context, greedy=cfg.greedy),
            [spec],
            seed_key=("evaluate", cfg.seed),
            on_turn=show_turns(screen, delay=cfg.delay),
        )
    return trajectory


def _play_against(cfg: DictConfig, spec: EpisodeSpec, screen: Screen) -> Trajectory:
    """Play a game of a person against a trained model, and return the person's trajectory.

    Where the game ends before the person's first turn, there is the model's only.

    Raises:
        ConfigError: The environment has no such seat besides others.
    """
    from ragen_pl.assembly.weights import load_bundle
    from ragen_pl.data.opponents import OpponentResponder

    bundle = load_bundle(cfg).to(device_named(cfg.device))
    context, environments = build_context(bundle, cfg.context), build_environments(cfg.env)
    proxy = replace(
        build_proxy(cfg.rollout, environments=environments, context=context),
        failures=FailureSettings(stall_s=None),
    )
    person = HumanResponder(screen=screen, max_actions=environments.max_actions_per_turn)

    def is_persons(episode: Episode) -> bool:
        if not 0 <= cfg.seat < len(episode.seats) or len(episode.seats) == 1:
            raise ConfigError(
                f"seat={cfg.seat}: the environment has seats={len(episode.seats)} in this game; give one of a game "
                "whose others are free, such as with env.kwargs.validation_opponent=null"
            )
        return episode.seat == cfg.seat

    with closing(build_engine(cfg.rollout.engine, bundle)) as engine:
        engine.load_weights(0)
        agent = EngineResponder(engine=engine, context=context, greedy=cfg.greedy)
        played = proxy.rollout(
            OpponentResponder(policy=agent, opponent=person, is_opponents=is_persons),
            [spec],
            seed_key=("evaluate", cfg.seed),
            on_turn=_show_game(screen, seat=cfg.seat),
        )
    for one in played:
        if one.seat == cfg.seat:
            return one
    screen.console.print("the game ended before your first turn; this is the agent's result:")
    return played[0]


def _show_game(screen: Screen, *, seat: int) -> OnTurn:
    """Return a hook that shows each turn of a game in which a person has a seat."""
    shown: dict[int, int] = {}

    def on_turn(episode: Episode) -> None:
        for number, one in enumerate(episode.seats):
            turns = one.trajectory.turns
            if len(turns) > shown.get(number, 0):
                shown[number] = len(turns)
                who = "you" if number == seat else "the agent"
                screen.console.rule(f"{who}, turn {len(turns)}", align="left")
                screen.turn(turns[-1], number=len(turns), state_is_shown=True)

    return on_turn


def _play_endpoint(cfg: DictConfig, spec: EpisodeSpec, screen: Screen) -> Trajectory:
    """Play with a model behind an API."""
    endpoint = build_endpoint(cfg)
    assert endpoint is not None
    proxy = build_proxy(
        cfg.rollout,
        environments=build_environments(cfg.env),
        context=endpoint.context,
        max_response_tokens=endpoint.max_tokens,
    )
    (trajectory,) = proxy.rollout(
        EndpointResponder(endpoint=endpoint, greedy=cfg.greedy),
        [spec],
        seed_key=("evaluate", cfg.seed),
        on_turn=show_turns(screen, delay=cfg.delay),
    )
    screen.console.print(f"{endpoint.model}: {endpoint.usage}", highlight=False, markup=False)
    endpoint.close()
    return trajectory


def show_turns(screen: Screen, *, delay: float = 0.0, state_is_shown: bool = False) -> OnTurn:
    """Return a hook that shows each turn and keeps the latest images for the end of the episode.

    Args:
        screen: Where turns are shown.
        delay: Seconds to wait after a turn.
        state_is_shown: Whether the responder has shown the turn's observation already.
    """

    def on_turn(episode: Episode) -> None:
        if len(episode.seats) > 1:
            raise RuntimeError(
                "the environment has several seats, and one is played here; set a scripted player in the others, such "
                "as by env.kwargs.validation_opponent, or play against a trained agent: ckpt=… policy=human seat=0"
            )
        trajectory, observation = episode.trajectory, episode.slot.observation
        if observation is not None:
            trajectory.final_images = observation.images
        screen.turn(
            trajectory.turns[-1], number=len(trajectory.turns), state_is_shown=state_is_shown
        )
        time.sleep(delay)

    return on_turn


def ask(slot: EnvironmentSlot, *, screen: Screen, max_actions: int = 1) -> list[int | str] | None:
    """Show the present state and ask a person for the turn's actions; None when they stop."""
    assert slot.observation is not None
    screen.console.rule(f"turn {slot.turn + 1}", align="left")
    rules = slot.members.seat_instructions(slot.seat) if slot.seats > 1 else None
    rules = rules or slot.members.instructions
    if slot.turn == 0 and rules:
        screen.console.print(printable(rules), markup=False, highlight=False)
    screen.state(slot.observation.images, slot.observation.text)
    names = slot.action_names
    offers = "free text" if names is None else printable("  ".join(_offers(names)))
    is_several = max_actions > 1 and names is not None
    several = f"up to {max_actions} with {_SEPARATOR} between them, " if is_several else ""
    while True:
        screen.console.print(f"{offers}  ({several}q stops)", markup=False, highlight=False)
        try:
            answer = screen.console.input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        if answer.casefold() in _STOP:
            return None
        if names is None:
            if answer:
                return [answer]
            continue
        actions = [named_action(word, names) for word in answer.split(_SEPARATOR)]
        if None not in actions and len(actions) <= max_actions:
            return [action for action in actions if action is not None]


def _offers(names: Sequence[str]) -> list[str]:
    """Return the actions as they are shown to a person: with their numbers, unless names are numbers.

    >>> _offers(("Left", "Right")), _offers(("1", "2"))
    (['0 Left', '1 Right'], ['1', '2'])
    """
    return [f"{n} {name}" for n, name in enumerate(names)] if _counted(names) else [*names]


def _counted(names: Sequence[str]) -> bool:
    """Return whether actions have numbers besides their names."""
    return not any(name.isdecimal() for name in names)


def named_action(word: str, names: Sequence[str]) -> int | None:
    """Return the action that a word means: its name, its number where no name is one, or the only name it begins.

    >>> [named_action(word, ("Left", "Down", "Loop")) for word in ("1", "down", "d", "l", "x")]
    [1, 1, 1, None, None]
    >>> [named_action(word, ("1", "2")) for word in ("0", "1", "2")]
    [None, 0, 1]
    """
    names = [str(name).casefold() for name in names]
    word = word.strip().casefold()
    if word in names:
        return names.index(word)
    if word.isdecimal() and int(word) < len(names) and _counted(names):
        return int(word)
    matches = [index for index, name in enumerate(names) if word and name.startswith(word)]
    return matches[0] if len(matches) == 1 else None
