"""Facts of a run that components depend on, and the protocols of components that check them before the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of a run that a component may depend on.

    Attributes:
        group_size: Number of episodes of a group.
        temperature: Base sampling temperature.
        window: Number of turns in the context, or `all`.
        left_out_turns: Fraction of old turns that are left out of the context.
        prompt_format: Name of the prompt format.
        blocks: Tags of the response's blocks.
        environment: Name of the environment's class.
        environment_members: Names of its members.
        turn_limit_bootstraps: Whether the value of the last state follows an episode that the turn limit ends.
        critic: `shared`, `own` or `none`.
        estimator: Name of the estimator's class.
        standardizes: Trajectories over which the estimator standardizes returns; None if it does not.
        baseline: Trajectories whose returns the estimator subtracts a mean of; None if it subtracts none.
        turn_discount: Discount per turn of the estimator's returns-to-go; None if it reads none.
        whitens: Whether the loss whitens advantages over tokens.
        rewards_penalized: Whether a KL penalty is taken from the rewards.
        rewards_normalized: Whether returns are normalized or bounded before credit is assigned.
        iterations_ahead: Updates between the weights of a rollout and those that are trained on it.
        loss: Loss of the updates.
        callbacks: Callbacks of the run, in order.
        environments: Number of environments.
        compacts: Whether summaries replace a full history.
        adapts_temperature: Whether turns are sampled at other temperatures than the base.
        truncates: Whether sampling leaves ids out (top-p, top-k, min-p).
        hinted: Whether the reference reads hints that the policy does not.
    """

    group_size: int
    temperature: float
    window: int | str
    left_out_turns: float
    prompt_format: str
    blocks: frozenset[str]
    environment: str
    environment_members: frozenset[str]
    turn_limit_bootstraps: bool
    critic: str
    estimator: str
    standardizes: str | None
    baseline: str | None
    turn_discount: float | None
    whitens: bool
    rewards_penalized: bool
    rewards_normalized: bool
    iterations_ahead: int
    loss: object
    callbacks: tuple[object, ...]
    environments: int = 1
    compacts: bool = False
    adapts_temperature: bool = False
    truncates: bool = False
    hinted: bool = False

    def require_groups(self, component: object, *, key: str) -> None:
        """Check that a group has several episodes, which a component compares.

        Args:
            component: The component.
            key: Setting that names it.

        Raises:
            ValueError: A group has one episode.
        """
        if self.group_size == 1:
            raise ValueError(
                f"rollout.group_size=1: {type(component).__name__} compares the episodes of a group; set at least 2, "
                f"or change {key}"
            )

    def refuse_whitening(self, component: str, *, scope: str) -> NoReturn:
        """Refuse whitening after a component that subtracts a mean return.

        Args:
            component: Its class.
            scope: Trajectories whose mean it subtracts.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"algorithm.loss.whiten=true: {component} compares returns with the mean of their {scope}, so an advantage "
            "of 0 says that there is nothing to learn; whitening subtracts a mean over tokens, which depends on the "
            "lengths of responses, and would give such a trajectory an advantage; set algorithm.loss.whiten=false"
        )


@runtime_checkable
class ChecksRun(Protocol):
    """Component that needs something from the rest of the run."""

    def check_run(self, facts: RunFacts) -> None:
        """Check that the run has it.

        Raises:
            ValueError: With what was found, what was expected and the remedy.
        """


@runtime_checkable
class ChecksSettings(Protocol):
    """Class that can check the settings of its node before it is built."""

    def check_settings(self, settings: Mapping[str, Any], *, root: str) -> None:
        """Check the settings; a classmethod.

        Args:
            settings: The node of the config.
            root: Folder of all runs.

        Raises:
            ConfigError: They cannot work.
        """
