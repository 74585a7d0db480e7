"""Environments that each break the protocol in one way."""

import os
import sys
import threading
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import gymnasium
import numpy as np
from gymnasium import spaces


class Sound(gymnasium.Env):
    action_names = ("Left", "Right")
    instructions = "Go."

    def __init__(self):
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Text(max_length=20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "go", {}

    def step(self, action):
        return "gone", 1.0, True, False, {"success": True}


class EveryStepCosts(Sound):
    def step(self, action):
        return "gone", -1.0, False, False, {"success": False}


class SaysNoSuccess(Sound):
    def step(self, action):
        return "gone", 1.0, True, False, {"coins": 1}


class NoEnvironment:
    pass


class NumberForText(Sound):
    def reset(self, *, seed=None, options=None):
        return 3, {}


class NoNames(Sound):
    action_names = ()


class SameNames(Sound):
    action_names = ("Left", "left ")


class NameWithBars(Sound):
    action_names = ("Left", "Right || Left")


class FourTuple(Sound):
    def step(self, action):
        return "gone", 1.0, True, {}


class NaNReward(Sound):
    def step(self, action):
        return "gone", float("nan"), True, False, {}


class FloatImage(Sound):
    def reset(self, *, seed=None, options=None):
        return {"text": "go", "image": np.zeros((8, 8, 3))}, {}


class ResetRaises(Sound):
    def reset(self, *, seed=None, options=None):
        raise KeyError("door")


class ResetBare(Sound):
    def reset(self, *, seed=None, options=None):
        return "go"


class NoSeed(Sound):
    def reset(self):
        return "go", {}


class Unseeded(Sound):
    resets = 0

    def reset(self, *, seed=None, options=None):
        Unseeded.resets += 1
        return f"go {Unseeded.resets}", {}


class Continuous(Sound):
    def __init__(self):
        self.action_space = spaces.Box(0, 1)


class StepRaises(Sound):
    def step(self, action):
        raise RuntimeError("the floor gave way")


class Unhelpful(Sound):
    def __init__(self):
        raise OSError("no display")


class ThirdResetRaises(Sound):
    """Sound in the two instances that are checked; later ones fail."""

    made = 0

    def __init__(self):
        super().__init__()
        type(self).made += 1

    def reset(self, *, seed=None, options=None):
        if type(self).made > 2:
            raise ConnectionError("the simulator has gone")
        return super().reset(seed=seed)


class FreeText(Sound):
    """Takes any text; sound."""

    action_names = ()

    def __init__(self):
        super().__init__()
        self.action_space = spaces.Text(20)

    def step(self, action):
        return f"heard {action}", 0.0, False, False, {}

    def random_action(self, rng):
        return str(rng.integers(9))


class NumberForFreeText(FreeText):
    def random_action(self, rng):
        return 3


class Black(Sound):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.picture(), {}

    def step(self, action):
        return self.picture(), 0.0, False, False, {}

    def picture(self):
        return {"text": "go", "image": np.zeros((8, 8, 3), np.uint8)}


class OnePicture(Black):
    def picture(self):
        return {"text": "go", "image": np.arange(192, dtype=np.uint8).reshape(8, 8, 3)}


class Growing(FreeText):
    def reset(self, *, seed=None, options=None):
        self.told = "go"
        return self.told, {}

    def step(self, action):
        self.told += f" and {action}"
        return self.told, 0.0, False, False, {}


class MoreThanDeclared(Sound):
    reward_range = (0.0, 0.5)


class RemembersEpisodes(Sound):
    steps = 0

    def step(self, action):
        self.steps += 1
        return f"gone {self.steps}", 0.0, False, False, {}


class DrawnWhenMade(Sound):
    """A map of its own in each instance, which the seed of a reset does not change."""

    def __init__(self):
        super().__init__()
        self.map = os.urandom(8).hex()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.map, {}


class EndsEarlierAgain(Sound):
    """Equal observations and rewards, but an episode after the first one is shorter."""

    episodes = 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.steps += 1
        return "gone", 0.0, self.steps >= 3 + self.episodes % 2, False, {}


FOR_EVER = threading.Event()


class HangsInConstructor(Sound):
    def __init__(self):
        FOR_EVER.wait()


class HangsInReset(Sound):
    def reset(self, *, seed=None, options=None):
        FOR_EVER.wait()


class HangsInStep(Sound):
    def step(self, action):
        FOR_EVER.wait()


class ExitsInConstructor(Sound):
    def __init__(self):
        sys.exit(3)


class SecondResetRaises(Sound):
    resets = 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        if self.resets > 2:
            raise LookupError("no third episode")
        return super().reset(seed=seed)


class NumberNames(Sound):
    action_names = (1, 2)


class StartsAtOne(Sound):
    def __init__(self):
        super().__init__()
        self.action_space = spaces.Discrete(2, start=1)


class WordForSuccess(Sound):
    def step(self, action):
        return "gone", 1.0, True, False, {"success": "no"}


class WordForReward(Sound):
    def step(self, action):
        return "gone", "1.0", True, False, {}


class NumberDescribed(Sound):
    def describe(self):
        return 3


class KeyOfTheObject(Sound):
    """Its key names the moment, not the state."""

    resets = 0

    def state_key(self):
        self.resets += 1
        return f"go {self.resets}"


class NeedsLibrary(Sound):
    def __init__(self):
        import no_such_library.core  # noqa: F401


class Hoards(Sound):
    """Keeps memory of each episode."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def reset(self, *, seed=None, options=None):
        # pages of its own: an array might take those that others in this process have freed
        self.kept.append(mmap(-1, 2**23, flags=MAP_PRIVATE | MAP_ANONYMOUS))
        self.kept[-1].write(bytes([1]) * 2**23)
        return super().reset(seed=seed)


class SomeSeedsBreak(FreeText):
    """Sound while it is checked; three later episodes in eight fail."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed > 1000 and seed % 8 < 3:
            raise ConnectionError(f"no simulator for seed {seed}")
        return "go", {}

    def step(self, action):
        return f"heard {action}", 1.0, True, False, {"success": True}
