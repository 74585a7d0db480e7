"""Assistant messages with tool calls as the real chat templates write them, and transformers' own parser of them.

Templates and response templates are read from the installed package trl, which is never imported: that takes long.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.models.families import FAMILIES, read_template
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_parsing

from ragen_pl.chat_formats.tool_calls.message import (
    THINK_TAGS,
    THOUGHT_CHANNEL,
    AssistantMessage,
    CallFormat,
    ReasoningTags,
)
from ragen_pl.chat_formats.tool_calls.parsing import parse_message

USER = {"role": "user", "content": "Go on."}


@dataclass(frozen=True, kw_only=True)
class Template:
    """A template of trl that writes calls.

    Attributes:
        name: its name in trl.
        call_format: how it writes calls.
        ends: what it writes after a message.
        oracle: the name in trl of the response template for transformers' parser.
        thinks: the tags around reasoning.
        opened: whether its prompt ends with the opening tag.
        several: whether it writes several calls, and text beside them.
        escapes: whether it escapes strings where they need it.
    """

    name: str
    call_format: CallFormat
    ends: tuple[str, ...]
    oracle: str
    thinks: ReasoningTags | None = None
    opened: bool = False
    several: bool = True
    escapes: bool = True

    def write(
        self, calls: list[tuple[str, dict[str, Any]]], *, content: str = "", reasoning: str = ""
    ) -> tuple[str, str]:
        """Return the prompt, and the response with these calls as the template writes it, without its end."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            names = ("reasoning_content", "reasoning", "thinking")
            message |= dict.fromkeys(names, reasoning)
        if calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
            message["tool_calls"] = [
                {"type": "function", "function": function} for function in functions
            ]
        settings = {
            "chat_template": read_template(self.name),
            "tokenize": False,
            "enable_thinking": True,
        }
        prompt = _tokenizer().apply_chat_template([USER], add_generation_prompt=True, **settings)
        whole = _tokenizer().apply_chat_template([USER, message], **settings)
        assert whole.startswith(prompt)
        response = whole[len(prompt) :]
        for end in self.ends:
            response = response.removesuffix(end)
        return prompt, response

    def parse(self, text: str, tools: dict[str, dict[str, Any]] | None = None) -> AssistantMessage:
        return parse_message(
            text,
            call_format=self.call_format,
            thinks=self.thinks,
            opened=self.opened,
            tools=tools or {},
        )

    def parse_as_transformers(
        self, prompt: str, response: str, tools: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """Return a response as transformers' parser reads it."""
        functions = [
            {"type": "function", "function": {"name": name, "parameters": parameters}}
            for name, parameters in tools.items()
        ]
        return chat_parsing.parse_response(
            response + self.ends[0], _oracles()[self.oracle], prefix=prompt, tools=functions
        )


_QWEN: dict[str, Any] = {"ends": ("<|im_end|>\n",)}
_LLAMA: dict[str, Any] = {"ends": ("<|eot_id|>",), "oracle": "llama3_template", "several": False}
_GEMMA: dict[str, Any] = {
    "call_format": CallFormat.GEMMA,
    "ends": ("<|tool_response>", "<turn|>\n"),
    "oracle": "gemma4_template",
}
_LFM: dict[str, Any] = {
    "call_format": CallFormat.LFM,
    "ends": ("<|im_end|>\n",),
    "oracle": "lfm2_2_5_template",
}
TEMPLATES = [
    Template(name="qwen2_5", call_format=CallFormat.HERMES, oracle="qwen3_template", **_QWEN),
    Template(
        name="qwen3",
        call_format=CallFormat.HERMES,
        oracle="qwen3_template",
        thinks=THINK_TAGS,
        **_QWEN,
    ),
    *(
        Template(name=name, call_format=CallFormat.HERMES, oracle="qwen3_template", **_QWEN)
        for name in ("qwen3_instruct_2507", "qwen3_vl")
    ),
    *(
        Template(
            name=name,
            call_format=CallFormat.QWEN_XML,
            oracle="qwen3_5_template",
            thinks=THINK_TAGS,
            opened=True,
            **_QWEN,
        )
        for name in ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8")
    ),
    *(
        Template(name=name, call_format=CallFormat.LLAMA_JSON, **_LLAMA)
        for name in ("llama3_1", "llama3_2")
    ),
    *(
        Template(name=name, thinks=THOUGHT_CHANNEL, **_GEMMA)
        for name in ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5")
    ),
    Template(name="gemma4_v2", **_GEMMA),
    Template(name="lfm2_v2", **_LFM),
    *(
        Template(name=name, thinks=THINK_TAGS, escapes=False, **_LFM)
        for name in ("lfm2_2_5", "lfm2_2_5_v2")
    ),
    Template(name="lfm2_2_5_vl", thinks=THINK_TAGS, **_LFM),
]
BY_NAME = {template.name: template for template in TEMPLATES}

_TYPES = {
    bool: "boolean", dict: "object", float: "number", int: "integer", list: "array", str: "string", type(None): "null",
}  # fmt: skip


def schema_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that arguments follow."""
    properties = {name: {"type": _TYPES[type(value)]} for name, value in arguments.items()}
    return {"type": "object", "properties": properties}


def check_spans(message: AssistantMessage, text: str) -> None:
    """Check that the spans cover the text once, in order."""
    ends = [0, *(end for _, _, end in message.spans)]
    assert [start for _, start, _ in message.spans] == ends[:-1]
    assert all(start < end for _, start, end in message.spans)
    assert ends[-1] == len(text)


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return FAMILIES["qwen2_5"].tokenizer()


@cache
def _oracles() -> dict[str, Any]:
    """Return trl's response templates: the tables of its module, and the patterns that they are made of."""
    package = importlib.util.find_spec("trl")
    assert package is not None and package.origin is not None
    source = (Path(package.origin).parent / "chat_template_utils.py").read_text(encoding="utf-8")
    tables = [node for node in ast.parse(source).body if _is_table(node)]
    values: dict[str, Any] = {"_SUPPORTS_PARSE_RESPONSE_TOOLS": True}
    exec(compile(ast.Module(tables, []), "trl", "exec"), values)
    return values


def _is_table(node: ast.stmt) -> bool:
    if isinstance(node, ast.For):
        return True
    if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
        return False
    name = node.targets[0].id
    return name.startswith(("_XML_", "_LFM2_")) or (
        name.endswith("_template") and isinstance(node.value, ast.Dict)
    )
