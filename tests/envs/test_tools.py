"""Tools as JSON schemas, and tools that return pictures."""

import datetime
import json
from enum import StrEnum
from typing import Literal

import gymnasium
import numpy as np
import pytest
from jsonschema import Draft202012Validator

import envs
from envs.support_desk import SupportDesk
from envs.tools import ToolEnvironment, ToolError, call_text, tool
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.prompts.parsing import ParsedResponse
from visual_envs.adapters.miniwob import MiniWoB

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


SHIPPED = {
    "ragen/Invoice-v0": ["decide", "open"],
    "ragen/KnowledgeBase-v0": ["answer", "read", "search"],
    "ragen/SupportDesk-v0": ["find", "move", "refund", "say"],
    "ragen/WebShop-v0": ["back", "buy", "choose", "open", "search"],
}


def schema_of(tools, name):
    (found,) = [each for each in tools.tool_schemas if each["function"]["name"] == name]
    return found


def names_of(tools):
    return [each["function"]["name"] for each in tools.tool_schemas]


def test_every_shipped_environment_with_tools_is_tested():
    made = {id: gymnasium.make(id).unwrapped for id in envs.ENVIRONMENT_IDS}
    assert {id for id, env in made.items() if isinstance(env, ToolEnvironment)} == SHIPPED.keys()


def test_schema_of_a_tool():
    assert schema_of(SupportDesk, "refund") == {
        "type": "function",
        "function": {
            "name": "refund",
            "description": "Pay an amount back for an order; this cannot be undone.",
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "string"}, "amount": {"type": "integer"}},
                "required": ["order", "amount"],
                "additionalProperties": False,
            },
        },
    }


def test_schema_of_an_optional_argument_and_of_a_choice():
    class Shelf(ToolEnvironment):
        @tool
        def put(self, thing: str, place: Literal["top", "bottom"] = "top", careful: bool = False):
            """Put a thing away.

            This is not shown.
            """

    function = schema_of(Shelf, "put")["function"]
    assert function["description"] == "Put a thing away."
    assert function["parameters"]["required"] == ["thing"]
    assert function["parameters"]["properties"] == {
        "thing": {"type": "string"},
        "place": {"type": "string", "enum": ["top", "bottom"], "default": "top"},
        "careful": {"type": "boolean", "default": False},
    }


class Color(StrEnum):
    """Values of an argument."""

    RED = "red"
    BLUE = "blue"


class Painter(ToolEnvironment):
    """Has tools with arguments that JSON has no types for."""

    def reset(self, *, seed=None, options=None):
        self._begin(seed=seed, options=options)
        self.got = None
        return "paint", {}

    @tool
    def paint(self, color: Color, corners: tuple[int, int], on: datetime.date) -> str:
        """Paint a place."""
        self.got = (color, corners, on)
        return "painted"

    @tool
    def mix(self, colors: set[Color], way: Literal["slowly"]) -> str:
        """Mix colors."""
        self.got = (colors, way)
        return "mixed"


def test_arguments_have_the_types_of_their_annotations():
    env = Painter()
    env.reset(seed=0)
    call = {"color": "red", "corners": [1, 2], "on": "2024-05-06"}
    assert env.step(call_text("paint", **call))[-1]["action_is_valid"]
    assert env.got == (Color.RED, (1, 2), datetime.date(2024, 5, 6))
    assert isinstance(env.got[0], Color) and isinstance(env.got[1], tuple)
    assert env.step(call_text("mix", colors=["red", "blue"], way="slowly"))[0] == "mixed"
    assert env.got == ({Color.RED, Color.BLUE}, "slowly")
    for name, value in {"color": "green", "corners": [1], "on": 5}.items():
        shown, *_, info = env.step(call_text("paint", **(call | {name: value})))
        assert not info["action_is_valid"] and shown.startswith(f"error: paint: '{name}")
    # numbers and texts are not converted
    for corners in (["1", "2"], [1.5, 2], [True, 2]):
        assert not env.step(call_text("paint", **(call | {"corners": corners})))[-1][
            "action_is_valid"
        ]


def test_a_single_choice_is_named_and_drawn():
    env, rng = Painter(), np.random.default_rng(0)
    assert 'way: "slowly"' in env.instructions
    calls = [json.loads(env.random_action(rng)) for _ in range(20)]
    assert {call["arguments"]["way"] for call in calls if call["name"] == "mix"} == {"slowly"}


@pytest.mark.parametrize("env_id", SHIPPED)
def test_schemas_accept_the_calls_that_the_environment_accepts(env_id):
    env, rng = gymnasium.make(env_id).unwrapped, np.random.default_rng(0)
    assert names_of(env) == SHIPPED[env_id]
    drawn = set()
    for seed in range(60):
        env.reset(seed=seed)
        call = json.loads(env.random_action(rng))
        drawn.add(call["name"])
        parameters = schema_of(env, call["name"])["function"]["parameters"]
        Draft202012Validator.check_schema(parameters)
        accepts = Draft202012Validator(parameters).is_valid
        others = [call["arguments"] | {"more": 1}]
        others += [
            {key: other for key, other in call["arguments"].items() if key != name}
            for name in call["arguments"]
        ]
        others += [call["arguments"] | {name: ["a list"]} for name in call["arguments"]]
        for arguments in (call["arguments"], *others):
            env.reset(seed=seed)
            info = env.step(call_text(call["name"], **arguments))[-1]
            assert info["action_is_valid"] == accepts(arguments) == (arguments is call["arguments"])
    assert drawn == set(SHIPPED[env_id])


@pytest.mark.parametrize("env_id", SHIPPED)
def test_instructions_and_schemas_describe_the_same_tools(env_id):
    env = gymnasium.make(env_id).unwrapped
    lines = env.instructions.split("\n")[1:]
    for line, schema in zip(lines, env.tool_schemas, strict=True):
        function = schema["function"]
        takes = line.removeprefix(f"{function['name']}(").removesuffix(
            f"): {function['description']}"
        )
        names = [part.split(": ")[0] for part in takes.split(", ") if part]
        assert names == list(function["parameters"]["properties"])


def test_tools_of_web_pages_have_schemas():
    assert names_of(MiniWoB) == ["click", "select", "type"]
    parameters = schema_of(MiniWoB, "select")["function"]["parameters"]
    assert parameters["properties"] == {
        "element": {"type": "integer"},
        "option": {"type": "string"},
    }
