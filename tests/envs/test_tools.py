"""Tools that return pictures."""

import numpy as np
import pytest

from envs.tools import ToolEnvironment, ToolError, call_text, tool
from ragen_pl.rollout.environments import EnvironmentManager, EpisodeSpec
from ragen_pl.rollout.parsing import ParsedResponse

MAP = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)


class Atlas(ToolEnvironment):
    """Shows a map on request."""

    rules = "Find the country."

    def __init__(self):
        super().__init__(max_observation_length=20)

    def reset(self, *, seed=None, options=None):
        self._begin(seed=seed, options=options)
        return {"text": "which country?", "image": MAP}, {}

    @tool
    def look(self, page: int) -> dict:
        """Show a page."""
        if page > 2:
            raise ToolError("no such page")
        return {"text": "page " * page * 10, "images": [MAP] * page}

    @tool
    def listing(self) -> list:
        """Return what is no observation."""
        return ["a", "b"]


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])
    return EnvironmentManager(target="test_tools.Atlas", timeout_s=None)


def test_a_tool_shows_pictures_and_its_text_is_cut(manager):
    (slot,) = manager.open([EpisodeSpec(group=0, member=0, seed=0)])

    def turn(call):
        return manager.step([slot], [ParsedResponse(actions=[call])])[0]

    shown = turn(call_text("look", page=2)).observation
    assert shown.text == "page page page page " and len(shown.images) == 2
    assert np.array_equal(shown.images[0], MAP)
    refused = turn(call_text("look", page=3))
    assert refused.observation.text == "error: no such page" and not refused.observation.images
    assert refused.valid and not refused.effective
    assert "returned an observation of type list" in turn(call_text("listing")).error
