"""The forms that a response may be asked for (VAGEN's prompt formats): which blocks it has, in which order.

Reading a response is `rollout.parsing`'s business, what its statements are worth `rollout.world_model`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class PromptFormat(StrEnum):
    """What a response holds before its answer, after VAGEN (Wang et al., 2025).

    - `free_think`: `<think>…</think><answer>…</answer>`
    - `no_think`: `<answer>…</answer>`
    - `grounding`: the think block holds `<observation>…</observation><reasoning>…</reasoning>`
    - `worldmodeling`: it holds `<reasoning>…</reasoning><prediction>…</prediction>`
    - `grounding_worldmodeling`: it holds all three, in that order
    """

    FREE_THINK = "free_think"
    NO_THINK = "no_think"
    GROUNDING = "grounding"
    WORLDMODELING = "worldmodeling"
    GROUNDING_WORLDMODELING = "grounding_worldmodeling"

    @property
    def thinks(self) -> bool:
        """Whether a response has a think block."""
        return self is not PromptFormat.NO_THINK

    @property
    def sections(self) -> tuple[str, ...]:
        """The blocks inside the think block, in order; none where its text is free."""
        return _SECTIONS.get(self, ())

    @property
    def statements(self) -> tuple[str, ...]:
        """Those of the sections that say something of the environment's state."""
        return tuple(name for name in self.sections if name != REASONING)

    @property
    def tags(self) -> tuple[str, ...]:
        """All tag names of the format, outer ones first."""
        return (*(("think",) if self.thinks else ()), *self.sections, "answer")


OBSERVATION, REASONING, PREDICTION = "observation", "reasoning", "prediction"
_SECTIONS = {
    PromptFormat.GROUNDING: (OBSERVATION, REASONING),
    PromptFormat.WORLDMODELING: (REASONING, PREDICTION),
    PromptFormat.GROUNDING_WORLDMODELING: (OBSERVATION, REASONING, PREDICTION),
}
_TOLD = {
    OBSERVATION: "where things are from you now",
    REASONING: "your thoughts",
    PREDICTION: "where things will be from you after your actions",
}


def format_response(how: PromptFormat, answer: str, *, blocks: Mapping[str, str]) -> str:
    """Return a response in a format; `blocks` are the texts of its sections, a missing one is empty.

    The text of a free think block is that of `reasoning`.

    >>> format_response(PromptFormat.GROUNDING, "Up", blocks={"observation": "goal Up", "reasoning": "go"})
    '<think><observation>goal Up</observation><reasoning>go</reasoning></think><answer>Up</answer>'
    """
    inside = "".join(_block(name, blocks.get(name, "")) for name in how.sections)
    if not how.sections:
        inside = blocks.get(REASONING, "")
    think = _block("think", inside) if how.thinks else ""
    return think + _block("answer", answer)


def format_instructions(how: PromptFormat, *, max_actions: int) -> str:
    """Return the sentences that tell a pretrained model which form its response must have."""
    form = format_response(how, "…", blocks=dict.fromkeys((*how.sections, REASONING), "…"))
    told = "; ".join(f"{name}: {_TOLD[name]}" for name in how.sections)
    words = [f"Reply in exactly this form: {form}"]
    if told:
        words.append(f"({told}).")
    if how.statements:
        words.append("Say where each thing is as its name and Up, Down, Left or Right from you.")
    words.append("The answer is the name of one action.")
    if max_actions > 1:
        words[-1] = f"The answer is one to {max_actions} actions by name, with || between them."
    return " ".join(words)


def _block(name: str, text: str) -> str:
    return f"<{name}>{text}</{name}>"
