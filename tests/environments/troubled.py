"""Environments that cause trouble or count calls. Processes import this module, so it imports little."""

import os
import time
from collections import Counter

import gymnasium
import numpy as np
from gymnasium import spaces


class Troubled(gymnasium.Env):
    """The seed of the reset selects what happens in the step, or in the reset itself."""

    action_names = ("Go",)
    action_space = spaces.Discrete(1)
    observation_space = spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = seed
        if seed == 6:
            time.sleep(600)
        if seed == 7:
            os._exit(7)
        return f"in process {os.getpid()}", {}

    def step(self, action):
        if self.seed == 1:
            os._exit(7)
        if self.seed == 2:
            time.sleep(600)
        if self.seed == 3:
            np.ones(2**28)
        if self.seed == 4:
            print("noise")
        if self.seed == 5:

            class Local(Exception):
                pass

            raise Local("cannot be pickled") from TimeoutError()
        return "went", 1.0, True, False, {"success": True}


class Counting(gymnasium.Env):
    """An environment that says how often its members were computed, and in which state."""

    action_names = ("Go",)
    action_space = spaces.Discrete(1)
    observation_space = spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.counts = 0, Counter()
        return "began", {}

    def step(self, action):
        self.steps += 1
        return "went", 0.0, False, False, {}

    def describe(self):
        self.counts["describe"] += 1
        return f"step {self.steps}"

    def state_key(self):
        self.counts["state_key"] += 1
        if self.steps == 5:
            raise RuntimeError("no key")
        return f"state {self.steps}"

    def skip(self, count):
        self.steps += count

    def counted(self, name):
        return self.counts[name]
