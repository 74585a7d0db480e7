"""Forms and e-mail on web pages: tasks of the library MiniWoB++ in a browser without a window."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image

from ...envs.adapters.optional import optional_import
from ...envs.adapters.pictures import on_white
from ...envs.base import Observation
from ...envs.tools import ToolEnvironment, ToolError, tool
from ..adapters.miniwob_pages import CLICK, READ, SELECT, TYPE, Page, read_page
from ..adapters.miniwob_policies import POLICIES, search

# a task ends after this many milliseconds of real time: never
_NO_LIMIT = "core.EPISODE_MAX_TIME = 1e9;"
# What blinks or fades would differ from one episode to the next: the caret, lists, rings around what has the focus, the
# library's marks of clicks.
_STILL = """
const style = document.createElement('style');
style.textContent = '#click-canvas {display: none !important} ' +
  '* {caret-color: transparent !important; transition: none !important; animation: none !important; ' +
  'outline: none !important}';
document.head.appendChild(style);
if (window.jQuery) jQuery.fx.off = true;
"""
_WIDTH, _HEIGHT = 160, 208
_LOADS = 5
_PROGRAMS = {
    "MINIWOB_CHROME_BINARY": ("chromium", "chromium-browser", "google-chrome"),
    "MINIWOB_CHROMEDRIVER": ("chromedriver",),
}


class MiniWoB(ToolEnvironment):
    """Do a task on a web page.

    ## Description
    A page of 160 by 210 pixels shows a form, a list of links or an inbox, and a sentence says what to do. The agent
    calls one tool a turn. The page's own script judges the outcome.

    ## Action Space
    `Text(1000)`: a call of `click(element)`, `type(element, text)` or `select(element, option)` as JSON. `element` is
    the number in the observation.

    ## Observation Space
    `Dict(text=Text, image=Box(0, 255, (208, 160, 3), uint8))`: the task and a line for each element, after an error
    its reason first; and the image of the page, without its last two rows. With `pictures=False` the text alone.

    ## Starting State
    A task of `tasks` and its page are drawn uniformly.

    ## Rewards
    `task`: 1 for the right outcome; the library's partial rewards and its loss for real time are left out.

    ## Episode End
    Terminated when the page ends the task.

    ## Information
    `success`, `action_is_valid`, `action_is_effective`, `reward_parts`.

    ## Arguments
    - `tasks`: names of the library's tasks; None for all that have a scripted policy.
    - `pictures`: whether the observation has an image.
    - `plans`: whether `plan()` tells how the next call's element is found, with which demonstrations then reason.
    - `max_observation_length`: largest number of characters of the text; the rest is cut.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012
    reward_range = (0.0, 1.0)
    frequent_words = (
        '{"name": "click", "arguments": {"element": ', '{"name": "type", "arguments": {"element": ',
        '{"name": "select", "arguments": {"element": ', ', "text": "', ', "option": "', '"}}', "}}", "button", "text",
        "radio", "password", "select", "checkbox", "label", "subbtn", "Submit", "username", "Select", "Enter", "Click",
        "set", "none", "on", "off",
    )  # fmt: skip
    rules = (
        "You see a web page as a picture and as text. The first line of the text says what to do. Each further line is "
        "an element of the page with its number, its kind, its text or name, and its value."
    )

    def __init__(
        self,
        *,
        tasks: Sequence[str] | None = None,
        pictures: bool = True,
        plans: bool = False,
        max_observation_length: int = 4000,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(max_observation_length=max_observation_length, render_mode=render_mode)
        self.tasks = tuple(tasks or POLICIES)
        if unknown := [task for task in self.tasks if task not in POLICIES]:
            raise ValueError(f"tasks: found {unknown}, expected some of {', '.join(POLICIES)}")
        self.pictures, self.plans = pictures, plans
        if pictures:
            image = spaces.Box(0, 255, (_HEIGHT, _WIDTH, 3), np.uint8)
            self.observation_space = spaces.Dict({"text": self.observation_space, "image": image})
        self._task = self.tasks[0]
        self.browser = _open_browser(self._task)
        self.page = Page(task="", elements=(), done=False, reward=0.0)
        self._fields: dict[str, str] = {}

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Load a page and begin its task."""
        self._begin(seed=seed, options=options)
        task = self.tasks[int(self.np_random.integers(len(self.tasks)))]
        number = int(self.np_random.integers(2**31))
        self._open(task)
        self.browser.reset(seed=number)
        self._read()
        self._fields = dict(self.browser.instance.cached_fields)
        return self._observe(self.page.text()), {"task": task}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Carry out one call on the page."""
        text, reward, terminated, truncated, info = super().step(action)
        if not info["action_is_effective"]:
            text = f"{text}\n{self.page.text()}"
        return self._observe(str(text)), reward, terminated, truncated, info

    @tool
    def click(self, element: int) -> str:
        """Click an element."""
        return self._act(CLICK, self.page.numbered(element).ref)

    @tool
    def type(self, element: int, text: str) -> str:
        """Write a text into a field in place of its present one; a date as 2024-12-31."""
        field = self.page.numbered(element)
        if not field.takes_text:
            raise ToolError(f"element {element} is no field for text")
        # a pair half of which is missing cannot be sent
        if not text.isprintable():
            raise ToolError("the text has characters that cannot be typed")
        return self._act(TYPE, field.ref, text)

    @tool
    def select(self, element: int, option: str) -> str:
        """Choose an option of a list by its text."""
        field = self.page.numbered(element)
        if option not in field.options:
            raise ToolError(f"element {element} has no such option")
        return self._act(SELECT, field.ref, field.options.index(option))

    def state_key(self) -> str:
        """Return the task and the page."""
        return f"{self._task}\n{self.page.text()}\nend {self._over}"

    def describe(self) -> str:
        """Return the values on the page by their element."""
        values = [
            f"{element.number} {'on' if element.value is True else element.value}"
            for element in self.page.elements
            if element.value
        ]
        return " ".join(f"set {', '.join(values) or 'none'}".split())[:150]

    def plan(self) -> str | None:
        """Return how the element of the scripted policy's next call is found, `find No: 2 Yes, 3 No`."""
        if not self.plans:
            return None
        return search(self.page, self._next_call())[:300]

    def difficulty(self) -> int:
        """Return about how many calls the task takes."""
        return POLICIES[self._task][0]

    def optimal_action(self, rng: np.random.Generator) -> str:
        """Return the scripted policy's next call."""
        return self._next_call()

    def argument_values(self, argument: str) -> list[Any]:
        """Return numbers of elements, options of lists, or the words of the task."""
        elements = self.page.elements
        if argument == "element":
            return [element.number for element in elements if element.number] or [1]
        if argument == "option":
            return [option for element in elements for option in element.options] or ["none"]
        return [value for value in self._fields.values() if value] or ["none"]

    def render(self) -> NDArray[np.uint8]:  # type: ignore[override]
        """Return the image of the page (`render_mode="rgb_array"`)."""
        png = self.browser.instance.driver.get_screenshot_as_png()
        return on_white(Image.open(io.BytesIO(png)).crop((0, 0, _WIDTH, _HEIGHT)))

    def close(self) -> None:
        """End the browser."""
        self.browser.close()

    def _next_call(self) -> str:
        return POLICIES[self._task][1](self.page, self._fields)

    def _open(self, task: str) -> None:
        instance = self.browser.instance
        if instance.died:
            raise RuntimeError("the browser has ended")
        if task != self._task:
            from miniwob.fields import get_field_extractor

            instance.url = instance.url.replace(f"/{self._task}.html", f"/{task}.html")
            instance.field_extractor = get_field_extractor(task)
            self._task = task
        for _ in range(_LOADS):
            # loaded anew: pages keep the focus, and some what was typed
            instance.driver.get(instance.url)
            # a busy browser may leave out a page's scripts
            if instance.driver.execute_script("return typeof core !== 'undefined';"):
                break
        else:
            raise RuntimeError(f"{instance.url}: the page does not load its scripts")
        instance.driver.execute_script(_NO_LIMIT + _STILL)

    def _act(self, script: str, *arguments: object) -> str:
        worked = self.browser.instance.driver.execute_script(script, *arguments)
        self._read()
        if worked not in (True, None):
            raise ToolError("the page does not take that")
        if self.page.done:
            # partial rewards of the library are below 1
            success = self.page.reward == 1.0
            self.end(success=success, task=float(success))
        return self.page.text()

    def _read(self) -> None:
        self.page = read_page(self.browser.instance.driver.execute_async_script(READ))

    def _observe(self, text: str) -> Observation:
        shown = text[: self.max_observation_length]
        return {"text": shown, "image": self.render()} if self.pictures else shown


def _open_browser(task: str) -> Any:
    """Return the library's environment of a task; its browser is found on the machine where no variable names it."""
    library = optional_import("miniwob.environment", extra="miniwob")
    for variable, names in _PROGRAMS.items():
        found = next(filter(None, map(shutil.which, names)), None)
        if variable not in os.environ:
            if found is None:
                raise ImportError(
                    f"MiniWoB needs {names[0]}, which is not installed; install Debian's chromium and chromium-driver, "
                    f"or set {variable}"
                )
            os.environ[variable] = found
    browser = library.MiniWoBEnvironment(subdomain=task)
    browser.instance.record_screenshots = False
    return browser
