"""Two environments of your own, one with text and one with images. They need no registration.

cd examples/own_environments
python -m ragen_pl.fit --config-dir conf env=guess
python -m ragen_pl.fit --config-dir conf env=bright_side
"""

import gymnasium
import numpy as np
from gymnasium import spaces


class GuessTheNumber(gymnasium.Env):
    """Find a number from 0 to 9 with the feedback lower and higher."""

    action_names = tuple(str(number) for number in range(10))
    instructions = "Guess the number from 0 to 9. After each guess you hear lower, higher or right."

    def __init__(self):
        self.action_space = spaces.Discrete(10)
        self.observation_space = spaces.Text(max_length=20)

    def reset(self, *, seed=None, options=None):
        """Draw the number."""
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(10))
        return "guess", {}

    def step(self, action):
        """Compare a guess with the number."""
        right = action == self.number
        text = "right" if right else "lower" if self.number < action else "higher"
        return f"{action} {text}", float(right), bool(right), False, {"success": bool(right)}


class BrightSide(gymnasium.Env):
    """Say which half of the image is brighter."""

    action_names = ("Left", "Right")
    instructions = "Which side of the image is brighter? Answer Left or Right."

    def __init__(self, *, contrast=80):
        self.contrast = contrast
        self.action_space = spaces.Discrete(2)
        image = spaces.Box(0, 255, (32, 32, 3), np.uint8)
        self.observation_space = spaces.Dict(text=spaces.Text(max_length=20), image=image)

    def reset(self, *, seed=None, options=None):
        """Draw a random image and make one half brighter."""
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2))
        self.image = self.np_random.integers(0, 256 - self.contrast, (32, 32, 3)).astype(np.uint8)
        self.image[:, 16 * self.side : 16 * self.side + 16] += np.uint8(self.contrast)
        return {"text": "look", "image": self.image}, {}

    def step(self, action):
        """Return reward 1 for the brighter side."""
        right = action == self.side
        observation = {"text": "over", "image": self.image}
        return observation, float(right), True, False, {"success": bool(right)}

    def describe(self):
        """Describe the state. Demonstrations write this text in their think block."""
        return f"bright {'left' if self.side == 0 else 'right'}"
