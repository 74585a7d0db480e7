"""Time the environments: steps, resets and images per second, workers, and a comparison with gymnasium's images.

Steps are random and include the resets of finished episodes. Run `python benchmarks/environments.py`. The table of
workers steps 32 environments in one thread, in eight and in processes of their own: one environment that waits 5 ms for
another program, one that computes in Python, and one that draws. The comparison draws the same map with this project's
tiles and with gymnasium's `FrozenLake-v1` (`render_mode="rgb_array"`, needs pygame), in alternation.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from ragen_pl import envs, visual_envs
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.envs.frozen_lake import FrozenLake
from ragen_pl.envs.policies import RandomPolicy
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder

TARGET_RATIO = 20.0


def per_call(action: Callable[[], object], *, seconds: float) -> float:
    """Return the seconds per call, the best of five rounds that last about `seconds` in total."""
    action()
    calls = 1
    while (spent := _timed(action, calls)) < seconds / 10:
        calls = max(calls + 1, int(calls * min(10.0, seconds / 5 / max(spent, 1e-9))))
    return min(_timed(action, calls) for _ in range(5)) / calls


def _timed(action: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        action()
    return time.perf_counter() - start


def _environment(env: gymnasium.Env[Any, Any]) -> Any:
    # Members that are not part of gymnasium's interface.
    return env.unwrapped


def resetter(env: gymnasium.Env[Any, Any]) -> Callable[[], object]:
    """Return a function that resets `env` with a new seed at each call."""
    seeds = iter(range(10**9))
    return lambda: env.reset(seed=next(seeds))


def stepper(env: gymnasium.Env[Any, Any]) -> Callable[[], object]:
    """Return a function that takes a random step and resets finished episodes."""
    rng = np.random.default_rng(0)
    env.reset(seed=0)

    def step() -> None:
        if env.step(_environment(env).random_action(rng))[2]:
            env.reset()

    return step


def compare_images(*, seconds: float, size: int) -> None:
    """Print the images per second of both implementations on one map, and their ratio."""
    desc = generate_random_map(size=size, seed=0)
    ours = gymnasium.make("ragen/FrozenLakeVisual-v0", size=size, render_mode="rgb_array")
    ours.reset(seed=0, options={"layout": desc})
    mine = per_call(_environment(ours).render, seconds=seconds)
    print(f"\nFrozenLake {size}x{size} images: ours {1 / mine:,.0f}/s ({mine * 1e6:.1f} us)")
    theirs = gymnasium.make("FrozenLake-v1", desc=desc, render_mode="rgb_array")
    theirs.reset(seed=0)
    try:
        theirs.render()
    except gymnasium.error.DependencyNotInstalled:
        print("gymnasium's needs pygame: pip install pygame, and run again for the ratio")
        return
    other = per_call(_environment(theirs).render, seconds=seconds)
    again = per_call(_environment(ours).render, seconds=seconds)
    ratio = other / max(mine, again)
    verdict = "met" if ratio >= TARGET_RATIO else "missed"
    pixels = [np.asarray(env.render()).shape[0] for env in (ours, theirs)]
    print(f"gymnasium's rgb_array {1 / other:,.0f}/s ({other * 1e6:.1f} us)")
    print(f"ratio {ratio:.0f}, target {TARGET_RATIO:.0f}: {verdict}", end="")
    print(f" (images of {pixels[0]} and {pixels[1]} pixels a side)")


class Waiting(FrozenLake):
    """FrozenLake whose steps wait for another program."""

    def step(self, action: int | np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Wait, then move."""
        time.sleep(0.005)
        return super().step(action)


WORKED = {
    "waits 5 ms": f"{Path(__file__).stem}.Waiting",
    "text": "ragen_pl.envs:ragen/FrozenLake-v0",
    "images": "ragen_pl.visual_envs:ragen/FrozenLakeVisual-v0",
}
WAYS: dict[str, dict[str, Any]] = {
    "one thread": {"workers": 1},
    "eight threads": {"workers": 8},
    "processes": {"workers": 8, "process": True},
}
_ENVIRONMENTS = 32


def compare_workers() -> None:
    """Print the turns per second of each kind of environment, by the way in which they step."""
    sys.path.insert(0, str(Path(__file__).parent))
    print(f"\n{'turns/s, 32 environments':<30}" + "".join(f"{way:>16}" for way in WAYS))
    specs = [EpisodeSpec(group=group, member=0, seed=group) for group in range(_ENVIRONMENTS)]
    responder = ScriptedResponder(policy=RandomPolicy())
    for name, target in WORKED.items():
        row = f"{name:<30}"
        for settings in WAYS.values():
            manager = EnvironmentManager(target=target, **settings)
            proxy = AgentProxy(environments=manager, context=TextContext())
            play = partial(proxy.rollout, responder, specs, seed_key=(0, "benchmark"))
            # the first time starts threads and processes
            play()
            start = time.perf_counter()
            turns = sum(len(trajectory.turns) for trajectory in play())
            row += f"{turns / (time.perf_counter() - start):>16,.0f}"
        print(row)


def main() -> None:
    """Print the tables and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="time per measurement")
    seconds = parser.parse_args().seconds
    print(f"{'environment':<30}{'resets/s':>12}{'steps/s':>12}{'images/s':>12}")
    for name in envs.ENVIRONMENT_IDS + visual_envs.ENVIRONMENT_IDS:
        env = gymnasium.make(name, disable_env_checker=True)
        resets = 1 / per_call(resetter(env), seconds=seconds)
        steps = 1 / per_call(stepper(env), seconds=seconds)
        row = f"{name:<30}{resets:>12,.0f}{steps:>12,.0f}"
        if "Visual" in name:
            env.reset(seed=0)
            row += f"{1 / per_call(_environment(env).render, seconds=seconds):>12,.0f}"
        print(row)
    compare_workers()
    compare_images(seconds=seconds, size=4)
    compare_images(seconds=seconds, size=8)


if __name__ == "__main__":
    main()
