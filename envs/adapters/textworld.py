"""Generated games of TextWorld as an environment."""

from __future__ import annotations

import functools
import json
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from ..adapters.optional import optional_import
from ..base import Count, CountOrZero, Environment, Observation, checked_arguments

# The generator is not made for several threads.
_GENERATOR = threading.Lock()
# Games are played without the interpreter that writes prose: these would tell nothing new.
_IDLE = ("examine ", "inventory", "look")
_EXITS = {f"{direction}_of": direction for direction in ("north", "south", "east", "west")}


class TextWorld(Environment):
    """Do a household task in a generated house by commands in words.

    ## Description
    A game of the library TextWorld (Cote et al., 2018): rooms, containers, keys, and a quest of some commands. The
    observation is written from the facts of the game, so no game needs to be compiled.

    ## Action Space
    `Text`: a command, such as `take key from table`.

    ## Observation Space
    `Text`: the task, the room, what is in sight, what is carried, the exits and the commands that are possible.

    ## Starting State
    Uniform over `games` games, which are generated when they are first drawn.

    ## Rewards
    1 for the completed quest, 0 otherwise.

    ## Episode End
    Terminated when the quest is completed or cannot be completed any more, as the game says.

    ## Information
    `success`: the quest is completed. `action_is_valid`: the command is possible. `action_is_effective`: it changed a
    fact.

    ## Arguments
    - `rooms`, `objects`, `quest_length`: size of a game and commands of its quest.
    - `games`: number of games. `first_game`: number of the first one; other numbers give other games.
    """

    needs_trust = ()

    @checked_arguments
    def __init__(
        self,
        *,
        rooms: Count = 2,
        objects: Count = 3,
        quest_length: Count = 2,
        games: Count = 64,
        first_game: CountOrZero = 0,
        max_action_length: Count = 100,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        library = optional_import("textworld", extra="textworld")
        self.settings = (rooms, objects, quest_length)
        self.games, self.first_game = games, first_game
        self.action_space = spaces.Text(max_action_length)
        self.observation_space = spaces.Text(100_000)
        self.reward_range = (0.0, 1.0)
        self.instructions = (
            "You are in a house and have a task. Each turn tells the task, the room, what is in sight, what you "
            "carry, the exits and the commands that are possible. Answer with one of these commands."
        )
        self._infos = library.EnvInfos(
            admissible_commands=True,
            policy_commands=True,
            won=True,
            lost=True,
            objective=True,
            facts=True,
        )
        self._start = library.start
        self._game: Any = None
        self._state: Any = {}

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a game and begin it."""
        self._begin(seed=seed, options=options)
        number = self.first_game + int(self.np_random.integers(self.games))
        with _GENERATOR:
            path = _game_file(*self.settings, number)
            self._game = self._start(str(path), self._infos)
            self._state = self._game.reset()
        return self.render(), {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Carry out a command."""
        said, before = " ".join(self._take_text(action).casefold().split()), self.state_key()
        # names may have capitals
        command = next((each for each in self._commands() if each.casefold() == said), None)
        valid = command is not None
        if valid:
            self._state, _, done = self._game.step(command)
            self._over = bool(done or self._state["won"] or self._state["lost"])
        won = valid and bool(self._state["won"])
        info = {
            "success": won,
            "action_is_valid": valid,
            "action_is_effective": self.state_key() != before,
        }
        return self.render(), float(won), self._over, False, info

    def state_key(self) -> str:
        """Return the task and all facts."""
        return json.dumps([self._state["objective"], sorted(map(str, self._state["facts"]))])

    def describe(self) -> str:
        """Return the room and the inventory: `in the kitchen, carrying worm`."""
        carried = ", ".join(self._carried())[:120] or "nothing"
        return f"in the {self._room()}, carrying {carried}"

    def difficulty(self) -> int:
        """Return the number of commands that the quest still takes."""
        return max(1, len(self._state["policy_commands"]))

    def optimal_action(self, rng: np.random.Generator) -> str:
        """Return the next command of a shortest solution, or any command where there is none left."""
        plan = self._state["policy_commands"]
        return str(plan[0]) if plan else self.random_action(rng)

    def random_action(self, rng: np.random.Generator) -> str:
        """Return one of the possible commands."""
        commands = self._commands()
        return commands[int(rng.integers(len(commands)))]

    def render(self) -> str:
        """Return the current observation (`render_mode="ansi"`)."""
        room = self._room()
        exits = [
            _EXITS[name] for name, things in self.facts() if name in _EXITS and things[1] == room
        ]
        lines = {
            "task": " ".join(self._state["objective"].split()),
            "room": room,
            "here": ", ".join(self._sights(room)),
            "carried": ", ".join(self._carried()),
            "exits": ", ".join(sorted(exits)),
            "commands": ", ".join(self._commands()),
        }
        return "\n".join(f"{name}: {text or 'nothing'}" for name, text in lines.items())

    def _commands(self) -> list[str]:
        return [
            command
            for command in self._state["admissible_commands"]
            if not command.startswith(_IDLE)
        ]

    def facts(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the facts of the state, hidden ones too: the name of each and the things it is about."""
        return [
            (fact.name, tuple(str(thing.name) for thing in fact.arguments))
            for fact in self._state["facts"]
        ]

    def _room(self) -> str:
        return next(things[1] for name, things in self.facts() if name == "at" and things[0] == "P")

    def _carried(self) -> list[str]:
        return sorted(
            things[0] for name, things in self.facts() if name == "in" and things[1] == "I"
        )

    def _sights(self, room: str) -> list[str]:
        """Return the things of a room with their states and contents, without those of closed containers."""
        facts = self.facts()
        doors = [things[1] for name, things in facts if name == "link" and things[0] == room]
        here = sorted(
            {things[0] for name, things in facts if name == "at" and things[1] == room} - {"P"}
        )
        seen = []
        for thing in [*here, *sorted(set(doors))]:
            states = [
                name
                for name, things in facts
                if things == (thing,) and name in ("open", "closed", "locked")
            ]
            shut = "closed" in states or "locked" in states
            on = [
                f"{things[0]} on it"
                for name, things in facts
                if name == "on" and things[1:] == (thing,)
            ]
            inside = [
                f"{things[0]} in it"
                for name, things in facts
                if name == "in" and things[1:] == (thing,)
            ]
            about = [*states, *sorted(on), *([] if shut else sorted(inside))]
            seen.append(f"{thing} ({', '.join(about)})" if about else thing)
        return seen


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="textworld_")


@functools.cache
def _game_file(rooms: int, objects: int, quest_length: int, number: int) -> Path:
    """Generate a game and return its file."""
    library = optional_import("textworld", extra="textworld")
    options = library.GameOptions()
    options.nb_rooms, options.nb_objects, options.quest_length = rooms, objects, quest_length
    options.seeds = number
    path = Path(_folder().name) / f"{rooms}_{objects}_{quest_length}_{number}.json"
    library.generator.make_game(options).save(str(path))
    return path
