"""Write the files of an environment of your own: python -m ragen_pl.new_environment NAME.

The module `NAME.py` has a small environment whose rules you replace, `conf/env/NAME.yaml` its settings and
`test_NAME.py` a test that passes as written. With --images its observations are images.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template

from ragen_pl.config import ConfigError, config_dir
from ragen_pl.config.ending import or_exit

_MODULE = '''"""An environment of your own. Replace its rules, and keep the names of its members."""

import gymnasium
$imports

class $cls(gymnasium.Env):
    """Walk along a row of cells to the treasure."""

    action_names = ("Left", "Right")
    instructions = (
        "You walk along a row of cells. $seen "
        "Answer Left or Right to reach the treasure."
    )

    def __init__(self, *, cells=6):
        self.cells = cells
        self.action_space = spaces.Discrete(len(self.action_names))
        self.observation_space = $space

    def reset(self, *, seed=None, options=None):
        """Begin an episode. Everything random is drawn from self.np_random, so the seed decides it."""
        super().reset(seed=seed)
        drawn = self.np_random.choice(self.cells, size=2, replace=False)
        self.place, self.treasure = int(drawn[0]), int(drawn[1])
        return self.observation(), {}

    def step(self, action):
        """Take the action with this index in action_names."""
        moved = self.place + (1 if action == 1 else -1)
        inside = 0 <= moved < self.cells
        self.place = moved if inside else self.place
        found = self.place == self.treasure
        info = {"success": found, "action_is_effective": inside}
        # observation, reward, terminated (the task has ended), truncated (a limit from outside), info
        return self.observation(), float(found), found, False, info

    def observation(self):
        """Return what the agent sees."""
$observation
    def optimal_action(self, rng):
        """Return the best action, for the optimal policy. Leave the method out where you know none."""
        return 1 if self.treasure > self.place else 0

    def state_key(self):
        """Return the state as a text, with which validation.held_out=true keeps states for validation only."""
        return f"{self.place} {self.treasure}"
'''
_TEXT = {
    "imports": "from gymnasium import spaces\n",
    "seen": "You read where you are and where the treasure is.",
    "space": "spaces.Text(max_length=80)",
    "observation": '        return f"You are in cell {self.place}, the treasure is in cell {self.treasure}."\n',
}
_IMAGES = {
    "imports": "import numpy as np\nfrom gymnasium import spaces\n\nPIXELS = 16  # of a cell's side\n",
    "seen": "You are the blue cell, the treasure is the yellow one.",
    "space": """spaces.Dict(
            text=spaces.Text(max_length=80),
            image=spaces.Box(0, 255, (PIXELS, PIXELS * cells, 3), np.uint8),
        )""",
    "observation": """        # uint8 [height, width, 3], of any size
        image = np.full((PIXELS, self.cells * PIXELS, 3), 40, np.uint8)
        for cell, color in ((self.treasure, (240, 200, 40)), (self.place, (40, 90, 240))):
            image[:, cell * PIXELS : (cell + 1) * PIXELS] = color
        return {"text": "Where is the treasure?", "image": image}
""",
}
_SETTINGS = """# @package _global_
# python -m ragen_pl.fit --config-dir conf env=$name
defaults:
  - custom  # the default settings of an environment
$model  - override /validation/baselines: optimal  # its table has the random and the optimal policy

env:
  name: $name
  visual: $visual
  target: $name.$cls
  kwargs:
    cells: 6  # arguments of the constructor
  max_turns: 8
"""
_TEST = '''"""Tests of the environment: python -m unittest test_$name."""

import unittest
from pathlib import Path

import numpy as np
from ragen_pl.config.composition import composed
from ragen_pl.environments.check import check_environment

from $name import $cls

CONF = Path(__file__).parent / "conf"


class Test$cls(unittest.TestCase):
    """Rules that the environment keeps."""

    def test_equal_seeds_begin_alike(self):
        first, second = $cls(), $cls()
        for seed in range(20):
            first.reset(seed=seed)
            second.reset(seed=seed)
            self.assertEqual(first.state_key(), second.state_key())

    def test_the_optimal_policy_solves_every_task(self):
        env, rng = $cls(), np.random.default_rng(0)
        for seed in range(20):
            env.reset(seed=seed)
            ended = False
            while not ended:
                _, reward, ended, _, info = env.step(env.optimal_action(rng))
            self.assertEqual((reward, info["success"]), (1.0, True))

    def test_a_run_takes_it_with_its_settings(self):
        check_environment(composed("fit", {"env": "$name"}, directory=CONF))


if __name__ == "__main__":
    unittest.main()
'''


def files_of(name: str, *, images: bool) -> dict[str, str]:
    """Return the text of each file of a new environment, by its path.

    Args:
        name: Name of its module.
        images: Whether its observations are images.

    Raises:
        ConfigError: No module can have this name, or another module or environment has it.
    """
    place = f"NAME={name}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{place}: expected a name of a Python module, of small letters, digits and _, such as my_shop"
        )
    if (config_dir() / "env" / f"{name}.yaml").exists():
        raise ConfigError(f"{place}: env={name} is an environment of ragen_pl; choose another name")
    spec = find_spec(name)
    is_elsewhere = (
        spec is not None and Path(str(spec.origin)).resolve().parent != Path.cwd().resolve()
    )
    # some of Python's own have no file
    if is_elsewhere or name in sys.stdlib_module_names:
        raise ConfigError(f"{place}: Python has a module of this name already; choose another name")
    words = {
        "name": name,
        "cls": "".join(part.capitalize() for part in name.split("_")),
        "visual": str(images).lower(),
        "model": "  - override /model: small_vlm\n" if images else "",
        **(_IMAGES if images else _TEXT),
    }
    templates = {
        f"{name}.py": _MODULE,
        f"conf/env/{name}.yaml": _SETTINGS,
        f"test_{name}.py": _TEST,
    }
    return {file: Template(text).substitute(words) for file, text in templates.items()}


def write(name: str, *, images: bool, folder: Path) -> list[Path]:
    """Write the files of a new environment and return their paths.

    Args:
        name: Name of its module.
        images: Whether its observations are images.
        folder: Folder of the module.

    Raises:
        ConfigError: The name is taken, or a file is there already; nothing is written then.
    """
    texts = {folder / file: text for file, text in files_of(name, images=images).items()}
    for path in texts:
        if path.exists():
            raise ConfigError(f"NAME={name}: {path} exists; choose another name, or another --to")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(texts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files and print the next commands."""
    parser = argparse.ArgumentParser(prog="python -m ragen_pl.new_environment", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="name of its module, such as my_shop")
    parser.add_argument("--images", action="store_true", help="its observations are images")
    parser.add_argument("--to", type=Path, default=Path(), help="folder; default: this one")
    given = parser.parse_args(arguments)
    for path in or_exit(lambda: write(given.name, images=given.images, folder=given.to)):
        print(f"written  {path}")
    if given.to != Path():
        print(f"enter    cd {given.to}")
    print(f"test     python -m unittest test_{given.name}")
    print(f"train    python -m ragen_pl.fit --config-dir conf env={given.name}")
