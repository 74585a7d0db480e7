"""Prompt formats: the blocks of a response and their order (after VAGEN).

One table says what each block is and one what each format holds. `prompts.parsing` reads responses by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal

from ragen_pl.trajectory import Span


@dataclass(frozen=True, kw_only=True)
class Block:
    """A tagged block of a response.

    Attributes:
        span: Label of its tokens.
        hint: Its contents, as the instructions describe them.
        state: For a statement about the environment, the state that it is about: the one `before` the
            turn's actions or the one `after` them.
    """

    span: Span
    hint: str = ""
    state: Literal["before", "after"] | None = None


THINK, ANSWER = "think", "answer"
# of the small model's chat template
TOOL_CALL = "tool_call"
OBSERVATION, REASONING, PREDICTION = "observation", "reasoning", "prediction"

BLOCKS = {
    THINK: Block(span=Span.THINK),
    OBSERVATION: Block(span=Span.OBSERVATION, hint="where things are from you now", state="before"),
    REASONING: Block(span=Span.THINK, hint="your thoughts"),
    PREDICTION: Block(
        span=Span.PREDICTION,
        hint="where things will be from you after your actions",
        state="after",
    ),
    ANSWER: Block(span=Span.ACTION),
}


class PromptFormat(StrEnum):
    """Blocks of a response before its answer, after VAGEN (Wang et al., 2025).

    - `free_think`: `<think>…</think><answer>…</answer>`
    - `no_think`: `<answer>…</answer>`
    - `grounding`: the think block holds `<observation>…</observation><reasoning>…</reasoning>`
    - `worldmodeling`: it holds `<reasoning>…</reasoning><prediction>…</prediction>`
    - `grounding_worldmodeling`: it holds all three, in that order
    - `native`: the model's own chat format, with its own reasoning and tool calls; `ragen_pl.prompts.native` reads it
    """

    FREE_THINK = "free_think"
    NO_THINK = "no_think"
    GROUNDING = "grounding"
    WORLDMODELING = "worldmodeling"
    GROUNDING_WORLDMODELING = "grounding_worldmodeling"
    NATIVE = "native"

    @property
    def thinks(self) -> bool:
        """Whether a response has a think block."""
        return _SECTIONS[self] is not None

    @property
    def sections(self) -> tuple[str, ...]:
        """Blocks inside the think block, in order; empty where its text is free."""
        return _SECTIONS[self] or ()

    @cached_property
    def statements(self) -> tuple[str, ...]:
        """Sections that state something about the environment."""
        return tuple(name for name in self.sections if BLOCKS[name].state is not None)

    @property
    def tags(self) -> tuple[str, ...]:
        """All tag names of the format, outer ones first."""
        return (*((THINK,) if self.thinks else ()), *self.sections, ANSWER)

    @property
    def token_names(self) -> tuple[str, ...]:
        """Names of the tags that are tokens of a small model, besides think and answer, in the order of their ids."""
        if self is PromptFormat.NATIVE:
            return (TOOL_CALL,)
        return tuple(dict.fromkeys((*_VAGEN, *self.sections))) if self.sections else ()


# sections of VAGEN's formats; a small model of one of these formats has tokens for all of them
_VAGEN = (OBSERVATION, REASONING, PREDICTION)
# blocks inside the think block; None for no think block
_SECTIONS: dict[PromptFormat, tuple[str, ...] | None] = {
    PromptFormat.FREE_THINK: (),
    PromptFormat.NO_THINK: None,
    PromptFormat.GROUNDING: (OBSERVATION, REASONING),
    PromptFormat.WORLDMODELING: (REASONING, PREDICTION),
    PromptFormat.GROUNDING_WORLDMODELING: (OBSERVATION, REASONING, PREDICTION),
    PromptFormat.NATIVE: (),
}


def format_response(prompt_format: PromptFormat, answer: str, *, blocks: Mapping[str, str]) -> str:
    """Return a response in a format.

    Args:
        prompt_format: The format.
        answer: Text of the answer block.
        blocks: Texts of the sections by name; a missing one is empty. The text of a free think block is
            that of `reasoning`.

    >>> format_response(PromptFormat.GROUNDING, "Up", blocks={"observation": "goal Up", "reasoning": "go"})
    '<think><observation>goal Up</observation><reasoning>go</reasoning></think><answer>Up</answer>'
    """
    inside = "".join(_tagged(name, blocks.get(name, "")) for name in prompt_format.sections)
    if not prompt_format.sections:
        inside = blocks.get(REASONING, "")
    think = _tagged(THINK, inside) if prompt_format.thinks else ""
    return think + _tagged(ANSWER, answer)


def format_instructions(
    prompt_format: PromptFormat, *, max_actions: int, free_text: bool = False
) -> str:
    """Return the sentences that ask a pretrained model for a format.

    Args:
        prompt_format: The format.
        max_actions: Number of actions in a response.
        free_text: Whether an action is free text; the environment's instructions say which.
    """
    if prompt_format is PromptFormat.NATIVE:
        return _native_instructions(max_actions=max_actions, free_text=free_text)
    texts = dict.fromkeys((*prompt_format.sections, REASONING), "…")
    form = format_response(prompt_format, "…", blocks=texts)
    hints = "; ".join(f"{name}: {BLOCKS[name].hint}" for name in prompt_format.sections)
    sentences = [f"Reply in exactly this form: {form}"]
    if hints:
        sentences.append(f"({hints}).")
    if prompt_format.statements:
        sentences.append(
            "Say where each thing is as its name and Up, Down, Left or Right from you."
        )
    if free_text:
        sentences.append("The whole text of the answer is your action.")
    elif max_actions > 1:
        sentences.append(
            f"The answer is one to {max_actions} actions by name, with || between them."
        )
    else:
        sentences.append("The answer is the name of one action.")
    return " ".join(sentences)


def _native_instructions(*, max_actions: int, free_text: bool) -> str:
    if free_text:
        return ""
    if max_actions > 1:
        return f"Answer with one to {max_actions} actions by name, with || between them."
    return "Answer with the name of one action."


def both_tags(name: str) -> tuple[str, str]:
    """Return the tags before and after a block."""
    return f"<{name}>", f"</{name}>"


def _tagged(name: str, text: str) -> str:
    opening, closing = both_tags(name)
    return f"{opening}{text}{closing}"


_PLAN = " so "


def with_plan(description: str | None, plan: str | None) -> str:
    """Return the reasoning of a demonstration: a description of the state, and a plan where there is one.

    >>> with_plan("me 1 2 box 2 2", "reach 1 2 push Down")
    'me 1 2 box 2 2 so reach 1 2 push Down'
    """
    return (description or "") + (f"{_PLAN}{plan}" if plan else "")


def without_plan(reasoning: str, description: str) -> str:
    """Return reasoning without a plan that follows a description of this length."""
    end = len(description)
    return reasoning[:end] if reasoning[end:].startswith(_PLAN) else reasoning
