"""Hints: what a teacher reads about the state, and the policy does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from string import Formatter
from typing import ClassVar

from ragen_pl.base.checked import checked
from ragen_pl.base.run_facts import RunFacts
from ragen_pl.trajectory import Observation

_KEY = "algorithm.loss.kl.hint"
HINTED_REQUEST = f"{_KEY}: a program's request has no place for a hint; set {_KEY}=null"
"""Problem of hints for an agent program."""
UNHINTED = (
    "so the teacher would read what the policy reads; let plan() and describe() of the environment return a text (of a "
    f"lake: env.kwargs.plans=true), or set {_KEY}=null"
)
"""Consequence of episodes without a hint, and the remedies."""


@checked
@dataclass(frozen=True, kw_only=True)
class Hint:
    """Text that the reference policy reads in place of each observation, before the policy's own responses.

    The reference is then a teacher that knows more than the policy, and may have the policy's weights (Shenfeld et al.,
    2026, arXiv 2601.19897; Zhao et al., 2026, arXiv 2601.18734).

    Attributes:
        template: Text with the fields {observation}, {state} (the environment's `describe()`) and {plan} (its
            `plan()`). Where a method that it names returns None, the observation stands alone.
        shows_images: Whether the teacher sees the observation's images.

    Raises:
        ValueError: The template has other fields, or its text is that of the observation.
    """

    needs_trust = ()

    members: ClassVar[dict[str, str]] = {"state": "describe", "plan": "plan"}
    """Method of the environment by field."""

    template: str = "{observation} {plan}"
    shows_images: bool = True

    def __post_init__(self) -> None:
        known = ("observation", *self.members)
        try:
            unknown = sorted(self.fields - {*known})
        except ValueError as error:
            raise ValueError(f"{_KEY}.template={self.template!r}: {error}") from None
        if unknown:
            raise ValueError(
                f"{_KEY}.template={self.template!r}: unknown fields {unknown}; known: {', '.join(known)}"
            )
        if self.template.strip() == "{observation}" and self.shows_images:
            raise ValueError(
                f"{_KEY}.template={self.template!r}: the teacher would read what the policy reads; add {{plan}} or "
                "{state}, or set algorithm.loss.kl.hint=null"
            )

    @property
    def fields(self) -> frozenset[str]:
        """Fields of the template."""
        return frozenset(
            name for _, name, _, _ in Formatter().parse(self.template) if name is not None
        )

    def check_run(self, facts: RunFacts) -> None:
        """Check that the environment has what the template shows.

        Raises:
            ValueError: It has not, or summaries replace the history.
        """
        if facts.compacts:
            raise ValueError(
                f"{_KEY} with context.compaction: a summary is no part of the teacher's own history; set "
                f"context.compaction=null, or {_KEY}=null"
            )
        for name in sorted(self.fields & {*self.members}):
            if self.members[name] not in facts.environment_members:
                raise ValueError(
                    f"{_KEY}.template={self.template!r}: {facts.environment} has no {self.members[name]}(); give it "
                    f"one, or leave {{{name}}} out"
                )

    def observation(
        self, shown: Observation, *, state: str | None, plan: str | None
    ) -> Observation:
        """Return an observation as the teacher reads it; of several results of tools the last one has the hint.

        Args:
            shown: The policy's observation.
            state: The environment's description of the state.
            plan: Its plan.
        """
        known = {"state": state, "plan": plan}
        if any(known[name] is None for name in self.fields & {*known}):
            return shown
        text = self.template.format(observation=shown.text, **known)
        results = shown.results
        if results:
            results = [*results[:-1], self.template.format(observation=results[-1], **known)]
        hinted = replace(shown, text=text, results=results)
        return hinted if self.shows_images else replace(hinted, images=[], result_images=[])
