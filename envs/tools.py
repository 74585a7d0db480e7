"""Base class of environments whose actions are calls of tools, written as JSON.

An action is `{"name": "refund", "arguments": {"order": "A17", "amount": 20}}`. The methods marked with `tool` are the
tools; their signatures say which arguments they take.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, get_type_hints

import numpy as np
from gymnasium import spaces
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from .base import PRINTABLE, Environment, Observation, call_text

Method = TypeVar("Method", bound=Callable[..., Observation])
_MARK = "_is_tool"
CALL_WORDS = ('{"name": "', '", "arguments": {"', '": "', '", "', '"}}')
"""Text of a call between its names and values, for `Environment.frequent_words`."""

# of a call that is quoted in an error
_QUOTED = 80


class ToolError(Exception):
    """Raised by a tool for a call that is well formed but cannot be carried out, such as an unknown order."""


class _Call(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    arguments: dict[str, Any] = {}


def tool(method: Method) -> Method:
    """Mark a method as a tool. Its docstring's first line describes it, its annotations are checked."""
    setattr(method, _MARK, True)
    return method


class ToolEnvironment(Environment):
    """Environment whose actions are calls of its tools; one call a turn.

    A tool returns the next observation: a text, or a dict with `text` and `image` (or `images`). It raises `ToolError`
    where the call cannot be carried out; the error is the observation, and the action is valid without effect. A call
    that is no JSON, names no tool or has wrong arguments is invalid. A tool ends the episode with `end` and adds
    rewards with `reward`.

    Subclasses set `rules` and call `_begin` first in `reset`.

    Args:
        max_action_length: Largest number of characters of a call.
        max_observation_length: Largest number of characters of a result's text; the rest is cut.
    """

    rules: str = ""
    """Rules in full sentences, without the tools."""

    tools: ClassVar[Mapping[str, type[BaseModel]]] = {}
    """Arguments of each tool, by name."""

    tool_schemas: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Tools in the format of OpenAI's API and of chat templates, in the order of their names: `{"type": "function",
    "function": {"name", "description", "parameters"}}`, where `parameters` is the JSON schema of the arguments."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        marked = [name for name in dir(cls) if getattr(getattr(cls, name, None), _MARK, False)]
        cls.tools = {name: _arguments(getattr(cls, name)) for name in marked}
        cls.tool_schemas = [
            _function_schema(name, _summary(getattr(cls, name)), arguments)
            for name, arguments in sorted(cls.tools.items())
        ]

    def __init__(
        self,
        *,
        max_action_length: int = 1000,
        max_observation_length: int = 4000,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.action_space = spaces.Text(max_action_length, charset=PRINTABLE)
        self.observation_space = spaces.Text(
            max_observation_length, min_length=0, charset=PRINTABLE
        )
        self.max_observation_length = max_observation_length
        self.instructions = f"{self.rules} {self._tool_list()}".strip()
        self._success = False
        self._parts: dict[str, float] = {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Carry out one call."""
        text = self._take_text(action)
        self._success, self._parts = False, {}
        valid = effective = True
        try:
            name, arguments = self._parse(text)
        except ValueError as error:
            result, valid, effective = f"error: {error}", False, False
        else:
            try:
                result = getattr(self, name)(**arguments)
            except ToolError as error:
                result, effective = f"error: {error}", False
        info = {
            "success": self._success,
            "action_is_valid": valid,
            "action_is_effective": effective,
            "reward_parts": self._parts,
        }
        reward = float(sum(self._parts.values()))
        return self._cut(result), reward, self._over, False, info

    def reward(self, **parts: float) -> None:
        """Add named amounts to the reward of the present step."""
        for name, amount in parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + float(amount)

    def end(self, *, success: bool, **parts: float) -> None:
        """End the episode after the present step, with named amounts of reward."""
        self._over, self._success = True, success
        self.reward(**parts)

    def render(self) -> str:
        """Return a description of the present state (`render_mode="ansi"`)."""
        return self.describe()

    def random_action(self, rng: np.random.Generator) -> str:
        """Return a call of any tool; texts are drawn from `argument_values`."""
        names = sorted(self.tools)
        name = names[int(rng.integers(len(names)))]
        arguments = {
            field: self._draw(field, annotation.annotation, rng)
            for field, annotation in self.tools[name].model_fields.items()
        }
        return call_text(name, **arguments)

    def argument_values(self, argument: str) -> list[Any]:
        """Return values that a policy that knows the rules could give to an argument, for `random_action`."""
        return ["none"]

    def _cut(self, result: Observation) -> Observation:
        """Return a result with its text cut; one of another type is left to the trainer to refuse."""
        longest = self.max_observation_length
        if isinstance(result, str):
            return result[:longest]
        if isinstance(result, dict) and isinstance(result.get("text"), str):
            return result | {"text": result["text"][:longest]}
        return result

    def _draw(self, argument: str, annotation: Any, rng: np.random.Generator) -> Any:
        schema = _schema(annotation)
        if choices := _choices(schema):
            values = choices
        elif schema.get("type") == "boolean":
            values = [False, True]
        else:
            values = self.argument_values(argument)
        return values[int(rng.integers(len(values)))]

    def _parse(self, text: str) -> tuple[str, dict[str, Any]]:
        """Return the tool and the arguments of a call.

        Raises:
            ValueError: It is no call of a tool; with the reason, for the player.
        """
        try:
            content = json.loads(text)
            # half a surrogate pair is no text; a tool that repeats it would fail the episode
            json.dumps(content, ensure_ascii=False).encode()
            call = _Call.model_validate(content)
        # deep nesting, numbers of many digits
        except (ValidationError, ValueError, RecursionError):
            raise ValueError(
                f'found {_quoted(text)}, expected {{"name": "...", "arguments": {{...}}}}'
            ) from None
        arguments = self.tools.get(call.name)
        if arguments is None:
            raise ValueError(
                f"no tool {_quoted(call.name)}; the tools are {', '.join(sorted(self.tools))}"
            )
        try:
            # as JSON: a list is a tuple, and the value of an enumeration its member
            values = arguments.model_validate_json(json.dumps(call.arguments))
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, problem["loc"]))
            raise ValueError(f"{call.name}: {_quoted(place)}: {problem['msg']}") from None
        return call.name, {name: getattr(values, name) for name in arguments.model_fields}

    def _tool_list(self) -> str:
        lines = ['Answer with one call of a tool as JSON: {"name": "...", "arguments": {...}}.']
        for name, arguments in sorted(self.tools.items()):
            takes = ", ".join(
                f"{field}: {_type_name(about.annotation)}"
                for field, about in arguments.model_fields.items()
            )
            lines.append(f"{name}({takes}): {_summary(getattr(self, name))}")
        return "\n".join(lines)


def _arguments(method: Callable[..., Observation]) -> type[BaseModel]:
    """Return the model that checks the arguments of a tool; numbers and texts are not converted."""
    hints = get_type_hints(method)
    fields: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(method).parameters.items())[1:]:
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[name] = (hints[name], default)
    config = ConfigDict(extra="forbid", strict=True)
    return create_model(method.__name__, __config__=config, **fields)


class _WithoutTitles(GenerateJsonSchema):
    """JSON schema whose fields have no titles; pydantic's repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _summary(method: Callable[..., Observation]) -> str:
    """Return the first line of a tool's docstring."""
    return (inspect.getdoc(method) or "").partition("\n")[0]


def _function_schema(name: str, description: str, arguments: type[BaseModel]) -> dict[str, Any]:
    parameters = arguments.model_json_schema(schema_generator=_WithoutTitles)
    del parameters["title"]
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


@functools.cache
def _schema(annotation: Any) -> dict[str, Any]:
    return TypeAdapter(annotation).json_schema()


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists; that of a single one has `const`."""
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _type_name(annotation: Any) -> str:
    schema = _schema(annotation)
    if choices := _choices(schema):
        return " or ".join(map(json.dumps, choices))
    names = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
    }
    return names.get(schema.get("type", ""), str(schema.get("type", "value")))


def _quoted(text: str) -> str:
    """Return a text in quotes as printable ASCII, truncated."""
    shown = f"'{text}'" if text.isascii() and text.isprintable() else ascii(text)
    return shown if len(shown) <= _QUOTED + 2 else f"{shown[:_QUOTED]}...'"
