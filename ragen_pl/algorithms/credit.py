"""Input and output of advantage estimators, and the placement of rewards on tokens.

Everything is in the credit layout: a row is one trajectory, its sampled tokens in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from ragen_pl.algorithms.turns import at_turn_start, nearest_in_turn, turn_ends
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.base.run_facts import RunFacts


@dataclass(kw_only=True, slots=True)
class AdvantageInputs:
    """A batch of trajectories in the credit layout.

    Attributes:
        rewards: `[trajectories, tokens]`, nonzero only inside `advantage_mask`.
        values: `[trajectories, tokens]`, None without a critic.
        advantage_mask: Bool `[trajectories, tokens]`.
        loss_mask: Bool `[trajectories, tokens]`.
        turn: int64 `[trajectories, tokens]`, -1 off the sampled tokens.
        group: int64 `[trajectories]`.
        bootstrap: `[trajectories]`, value after the last turn, 0 where the task ended.
        returns: `[trajectories]`, undiscounted and centered.
        center: `[trajectories]`, what an estimator without a critic subtracts from returns-to-go; None for nothing. The
            rewards are not centered: a reward of minus the mean in the last turn would, discounted, pay for longer
            episodes.
        state: int64 `[trajectories, turns]`, number of the state that a turn starts in, -1 for unknown; None
            where no state is known.
        final_state: int64 `[trajectories]`, number of the state after the last turn, likewise.
        potential: `[trajectories, turns]`, the environment's potential of the state that a turn starts in, -inf where
            it is not known; None where none is.
        final_potential: `[trajectories]`, that of the state after the last turn, likewise.
        advances: Bool `[trajectories, turns]`, whether a turn is a step that discounts count; None where all are.
        success: int8 `[trajectories]`, whether the task was solved: 1 or 0, -1 where no step says so, and -2 where none
            could: no action was carried out, or the episode was truncated. None where it is not known.
        terms: `[trajectories]` by the name of a reward term, its sum over an episode; None where they are not known.
        penalty: `[trajectories, tokens]`, the KL penalty that rewards and returns are less; None for none.
        logprobs: `[trajectories, tokens]`, log-probs of the tokens before the update; None where they are not known.

    Raises:
        ValueError: Shapes disagree, a nonzero reward lies outside `advantage_mask`, a token of a
            mask has no turn, or turn indices fall along a row.
    """

    rewards: Tensor
    values: Tensor | None
    advantage_mask: Tensor
    loss_mask: Tensor
    turn: Tensor
    group: Tensor
    bootstrap: Tensor
    returns: Tensor
    center: Tensor | None = None
    state: Tensor | None = None
    final_state: Tensor | None = None
    potential: Tensor | None = None
    final_potential: Tensor | None = None
    advances: Tensor | None = None
    success: Tensor | None = None
    terms: Mapping[str, Tensor] | None = None
    penalty: Tensor | None = None
    logprobs: Tensor | None = None

    def __post_init__(self) -> None:
        self.advantage_mask, self.loss_mask = self.advantage_mask.bool(), self.loss_mask.bool()
        self._check_shapes()
        lost = ((self.rewards != 0) & ~self.advantage_mask).nonzero()
        if len(lost):
            row, token = lost[0].tolist()
            raise ValueError(
                f"found reward {self.rewards[row, token].item():g} at trajectory {row}, token "
                f"{token}, outside advantage_mask, expected rewards inside it only (no mask may "
                "swallow a reward); place them with credit.place_turn_rewards"
            )
        if bool(((self.advantage_mask | self.loss_mask) & (self.turn < 0)).any()):
            raise ValueError("found a token inside a mask with turn -1, expected its turn's index")
        reached = self.turn.cummax(dim=1).values if self.turn.numel() else self.turn
        if bool(((self.turn >= 0) & (self.turn < reached)).any()):
            raise ValueError("found turn indices that fall along a row; keep tokens in order")

    def _check_shapes(self) -> None:
        tokens, rows = self.rewards.shape, self.rewards.shape[:1]
        expected = {"advantage_mask": tokens, "loss_mask": tokens, "turn": tokens, "values": tokens}
        expected |= {"logprobs": tokens}
        expected |= {"group": rows, "bootstrap": rows, "returns": rows, "center": rows}
        expected |= {"success": rows, "final_state": rows, "final_potential": rows}
        for name, shape in expected.items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"found {name} of shape {list(tensor.shape)}, expected {list(shape)} to go "
                    f"with rewards of shape {list(tokens)}"
                )

    def turn_rewards(self, turns: int) -> Tensor:
        """Return the rewards of each turn, `[trajectories, turns]`, 0 beyond the last one.

        Args:
            turns: Number of columns, at least the number of turns of the longest trajectory.
        """
        inside = torch.where(self.turn >= 0, self.rewards.float(), 0.0)
        of_turn = torch.zeros(len(inside), turns, device=inside.device)
        return of_turn.scatter_add(1, self.turn.clamp(min=0), inside) if turns else of_turn

    @property
    def turns(self) -> Tensor:
        """Number of turns of each trajectory, int64 `[trajectories]`."""
        return self.turn.amax(1) + 1 if self.turn.numel() else torch.zeros_like(self.group)

    @property
    def learned(self) -> Tensor:
        """Tokens at which a critic has a target, bool `[trajectories, tokens]`: those of either mask."""
        return self.loss_mask | self.advantage_mask

    def turn_values(self, values: Tensor) -> Tensor:
        """Return the value of the state that the turn of each token starts in, `[trajectories, tokens]`.

        It is read at the turn's first learned token, before which the policy has chosen nothing in the turn.

        Args:
            values: `[trajectories, tokens]`.
        """
        return at_turn_start(values.float(), turn=torch.where(self.learned, self.turn, -1))

    @property
    def advancing(self) -> Tensor:
        """Whether the turn of a token is a step that discounts count, bool `[trajectories, tokens]`."""
        if self.advances is None:
            return torch.ones_like(self.loss_mask)
        return self.advances.gather(1, self.turn.clamp(min=0))

    def at_tokens(self, setting: float | Tensor) -> float | Tensor:
        """Return a discount or lambda per turn for the turn of each token: 1 where it does not advance.

        Args:
            setting: One for all turns that advance, or `[trajectories, tokens]`.

        Returns:
            `setting` itself where all turns advance, else float64 `[trajectories, tokens]`.
        """
        return setting if self.advances is None else _or_one(setting, self.advancing)

    def at_turns(self, setting: float, *, turns: int) -> float | Tensor:
        """Return a discount per turn for each turn: 1 where it does not advance.

        Args:
            setting: One for all turns that advance.
            turns: Number of columns.

        Returns:
            `setting` itself where all turns advance, else float64 `[trajectories, turns]`.
        """
        return setting if self.advances is None else _or_one(setting, self.advances[:, :turns])

    def need_values(self, estimator: object) -> Tensor:
        """Return the values.

        Raises:
            ValueError: There are none; the message names the estimator.
        """
        if self.values is None:
            raise ValueError(
                f"found values=None, expected critic values for {type(estimator).__name__}; train "
                "with a critic or choose an estimator with needs_values = False"
            )
        return self.values

    def need_states(self, estimator: object) -> Tensor:
        """Return the states that turns start in.

        Raises:
            ValueError: There are none; the message names the estimator.
        """
        if self.state is None:
            raise ValueError(
                f"found state=None, expected those of the environment's state_key() for {type(estimator).__name__}; "
                "choose an environment that has it or an estimator with needs_states = False"
            )
        return self.state

    def need_potentials(self, estimator: object) -> tuple[Tensor, Tensor]:
        """Return the potentials of the states that turns start in, and of those after the last turns.

        Raises:
            ValueError: One is not known; the message names the estimator.
        """
        name = type(estimator).__name__
        if self.potential is None or self.final_potential is None:
            raise ValueError(
                f"found potential=None, expected those of the environment's potential() for {name}; choose an "
                "environment that has it or an estimator with needs_potentials = False"
            )
        is_turn = (
            torch.arange(self.potential.shape[1], device=self.turn.device) < self.turns[:, None]
        )
        known = self.potential.isfinite() | ~is_turn
        if not bool(known.all() & self.final_potential.isfinite().all()):
            raise ValueError(
                f"algorithm.estimator={name}: a state has no potential; let the environment's potential() return a "
                "finite number for each state, the ends of the task included, or set algorithm=rloo"
            )
        return self.potential, self.final_potential

    def need_success(self, estimator: object, *, all_reduce: AllReduce | None = None) -> Tensor:
        """Return whether each task was solved, bool `[trajectories]`. All ranks must call it.

        Args:
            estimator: The estimator.
            all_reduce: Sums a tensor over the ranks; None on one rank.

        Raises:
            ValueError: No step of an episode says so, on any rank, and some could; the message names the estimator.
        """
        is_silent = False
        if self.success is not None:
            counts = torch.stack([(self.success >= 0).sum(), (self.success == -1).sum()])
            saying, silent = (counts if all_reduce is None else all_reduce(counts)).tolist()
            is_silent = silent > 0 and not saying
        if self.success is None or is_silent:
            raise ValueError(
                f"algorithm.estimator={type(estimator).__name__}: found no episode that says whether the task is "
                'solved; let the environment set info["success"] in its steps, or set algorithm=rloo'
            )
        return self.success > 0


Credit = AdvantageInputs
"""Its former name."""


def _or_one(setting: float | Tensor, where: Tensor) -> Tensor:
    return torch.where(
        where, torch.as_tensor(setting, dtype=torch.float64, device=where.device), 1.0
    )


@dataclass(kw_only=True, slots=True)
class Advantages:
    """Estimates per token.

    Attributes:
        advantages: float32 `[trajectories, tokens]`, 0 off the loss mask.
        returns: float32 `[trajectories, tokens]`, the critic's target, 0 off both masks.
    """

    advantages: Tensor
    returns: Tensor


StandardizationScope = Literal["group", "batch"]
"""Trajectories that share a shift and a scale of their returns."""


class Estimator(Protocol):
    """Advantage estimator: a callable that a config names by class path.

    Subclasses live next to their formula in `ragen_pl.algorithms.advantages`. Whitening is a separate step
    (`whitening.whiten` over M_loss), except in REINFORCE++, which includes it.

    Attributes:
        needs_values: The estimator reads the values of a critic.
        needs_states: The estimator reads the states that turns start in (`AdvantageInputs.state`).
        needs_potentials: The estimator reads the potentials of states (`AdvantageInputs.potential`).
        needs_success: The estimator reads whether tasks were solved (`AdvantageInputs.success`).
        needs_groups: The estimator compares the trajectories of a group, so a group needs several.
        reads_returns: The estimator reads the returns or the rewards of turns, after normalization and penalties, and
            not what they are made of.
    """

    needs_values: ClassVar[bool] = False
    needs_states: ClassVar[bool] = False
    needs_potentials: ClassVar[bool] = False
    needs_success: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    reads_returns: ClassVar[bool] = True

    @property
    def standardizes(self) -> StandardizationScope | None:
        """Trajectories over which the estimator standardizes returns, None if it does not."""
        return None

    @property
    def baseline(self) -> StandardizationScope | None:
        """Trajectories whose mean return the estimator subtracts, None if it subtracts none."""
        return "group" if self.needs_groups else self.standardizes

    @property
    def turn_discount(self) -> float | None:
        """Discount per turn of the returns-to-go that the estimator reads.

        None if it reads returns of whole episodes, or discounts tokens.
        """
        return None

    def check_run(self, facts: RunFacts) -> None:
        """Check that the run has the critic, the states and the groups that the estimator needs, and no idle critic.

        Raises:
            ValueError: It has not.
        """
        name = type(self).__name__
        if self.needs_values and facts.critic == "none":
            raise ValueError(
                f"algorithm.critic=none: {name} needs values; set algorithm.critic=shared (or own)"
            )
        if not self.needs_values and facts.critic != "none":
            raise ValueError(
                f"algorithm.critic={facts.critic}: {name} reads no values; set algorithm.critic=none"
            )
        if not self.needs_values and facts.turn_limit_bootstraps:
            raise ValueError(
                f"env.turn_limit_bootstraps=true: {name} has no values to bootstrap from; set false, or an algorithm "
                "with a critic"
            )
        if self.needs_states and "state_key" not in facts.environment_members:
            raise ValueError(
                f"algorithm.estimator={name}: {facts.environment} has no state_key() to compare turns from the same "
                "state by; give it one, or set algorithm=grpo"
            )
        if self.needs_potentials and "potential" not in facts.environment_members:
            raise ValueError(
                f"algorithm.estimator={name}: {facts.environment} has no potential() that says how near to the goal a "
                "state is; give it one, or set algorithm=rloo"
            )
        if self.needs_groups:
            facts.require_groups(self, key="algorithm.estimator")
        if not self.reads_returns and facts.rewards_penalized:
            raise ValueError(
                f"algorithm.loss.kl.place=reward: {name} does not read the returns, which the penalty is taken from; "
                "set algorithm.loss.kl.place=loss"
            )
        if not self.reads_returns and facts.rewards_normalized:
            raise ValueError(
                f"algorithm.normalize: {name} does not read the returns, which are normalized; set "
                "algorithm.normalize.by._target_=ragen_pl.algorithms.normalization.Raw without bounds"
            )

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Estimate the advantages of a batch of trajectories.

        Args:
            inputs: The trajectories of this rank.
            all_reduce: Sums a tensor over the ranks; None on one rank.
        """
        ...


def finish(
    advantages: Tensor, returns: Tensor, inputs: AdvantageInputs, *, values: Tensor | None = None
) -> Advantages:
    """Extend advantages and returns on M_adv to all tokens of M_loss.

    A token of M_loss outside M_adv has the return of its neighbor in M_adv (`spread_to_loss_tokens`) as its return.
    Its advantage is that return less its own value. The neighbor's advantage would subtract the value of another
    state, so the baseline would depend on whether the token belongs to M_adv, which the policy chooses: sampled there,
    a closing tag ends the action and any other token continues it.

    The critic learns at all these tokens. Whether a token is in M_adv depends on what was sampled, so a critic that
    learned on M_adv alone would know such a state only by the responses that went wrong, and could not tell that they
    did.

    Args:
        advantages: `[trajectories, tokens]`, read inside M_adv.
        returns: `[trajectories, tokens]`, likewise.
        inputs: The trajectories.
        values: `[trajectories, tokens]`, each token's own baseline. None gives tokens outside M_adv the advantage of
            their neighbor: for estimates without a baseline of the token's state.
    """
    masks = {"advantage_mask": inputs.advantage_mask, "turn": inputs.turn}
    targets = spread_to_loss_tokens(returns, loss_mask=inputs.learned, **masks)
    if values is None:
        extended = spread_to_loss_tokens(advantages, loss_mask=inputs.loss_mask, **masks)
    else:
        own = torch.where(inputs.advantage_mask, advantages, targets - values.float())
        extended = torch.where(inputs.loss_mask, own, 0.0)
    return Advantages(advantages=extended, returns=targets)


def broadcast(per_trajectory: Tensor, inputs: AdvantageInputs) -> Advantages:
    """Give each trajectory's advantage to all its tokens."""
    advantages = torch.where(inputs.loss_mask, per_trajectory.float()[:, None], 0.0)
    returns = torch.where(inputs.learned, inputs.returns.float()[:, None], 0.0)
    return Advantages(advantages=advantages, returns=returns)


def broadcast_turns(per_turn: Tensor, inputs: AdvantageInputs) -> Advantages:
    """Give each turn's advantage to its tokens.

    Args:
        per_turn: `[trajectories, turns]`.
        inputs: The trajectories.
    """
    result = broadcast(inputs.returns, inputs)
    turn = inputs.turn.clamp(min=0)
    of_token = per_turn.gather(1, turn) if per_turn.shape[1] else torch.zeros_like(inputs.rewards)
    result.advantages = torch.where(inputs.loss_mask, of_token.float(), 0.0)
    return result


def spread_to_loss_tokens(
    advantages: Tensor, *, advantage_mask: Tensor, loss_mask: Tensor, turn: Tensor
) -> Tensor:
    """Give tokens inside the loss mask but outside the advantage mask their neighbor's advantage, or return.

    The neighbor is the next token of the turn inside the advantage mask, else the last one before.

    Args:
        advantages: `[trajectories, tokens]`, read inside the advantage mask only.
        advantage_mask: Bool `[trajectories, tokens]`.
        loss_mask: Bool `[trajectories, tokens]`.
        turn: int64 `[trajectories, tokens]`, not decreasing along a row; -1 off the mask.

    Returns:
        `[trajectories, tokens]`, 0 off the loss mask.

    >>> row, turn = torch.tensor([[0.0, 2.0, 0.0, 5.0]]), torch.tensor([[0, 0, 0, 1]])
    >>> everywhere = torch.ones(1, 4, dtype=torch.bool)
    >>> spread_to_loss_tokens(row, advantage_mask=row > 0, loss_mask=everywhere, turn=turn)
    tensor([[2., 2., 2., 5.]])
    """
    nearest = nearest_in_turn(advantage_mask, turn=turn)
    of_neighbor = advantages.gather(1, nearest.clamp(min=0))
    return torch.where(loss_mask & (nearest >= 0), of_neighbor, 0.0)


def place_turn_rewards(turn_rewards: Tensor, turn: Tensor, advantage_mask: Tensor) -> Tensor:
    """Put each turn's reward on the turn's last token inside the advantage mask.

    Args:
        turn_rewards: `[trajectories, turns]`, padded with 0.
        turn: int64 `[trajectories, tokens]`, not decreasing along a row; -1 off the mask.
        advantage_mask: Bool `[trajectories, tokens]`.

    Returns:
        float32 `[trajectories, tokens]`.

    Raises:
        ValueError: A turn with a reward has no token inside the mask, or a token's turn index has
            no column in `turn_rewards`.

    >>> turn = torch.tensor([[0, 0, 1, 1]])
    >>> mask = torch.tensor([[True, True, True, False]])
    >>> place_turn_rewards(torch.tensor([[0.5, 1.0]]), turn, mask)
    tensor([[0.0000, 0.5000, 1.0000, 0.0000]])
    """
    turns = turn_rewards.shape[1]
    if turn.numel() and int(turn.max()) >= turns:
        raise ValueError(
            f"found turn index {int(turn.max())} in turn, expected below {turns}, the columns of "
            "turn_rewards; pad turn_rewards with zeros to the longest trajectory"
        )
    ends = turn_ends(torch.where(advantage_mask.bool(), turn, -1))
    if not turns:
        return torch.zeros(turn.shape, dtype=torch.float32, device=turn.device)
    placed = turn_rewards.float().gather(1, turn.clamp(min=0))
    _check_rewards_placed(turn_rewards, turn, ends)
    return torch.where(ends, placed, 0.0)


def _check_rewards_placed(turn_rewards: Tensor, turn: Tensor, ends: Tensor) -> None:
    # One spare column takes the tokens that end no turn.
    turns = turn_rewards.shape[1]
    held = torch.zeros(turn.shape[0], turns + 1, dtype=torch.bool, device=turn.device)
    spare = torch.full_like(turn, turns)
    held.scatter_(1, torch.where(ends, turn, spare), True)
    lost = ((turn_rewards != 0) & ~held[:, :-1]).nonzero()
    if len(lost):
        row, index = lost[0].tolist()
        raise ValueError(
            f"found reward {turn_rewards[row, index].item():g} in turn {index} of trajectory "
            f"{row}, which has no token inside advantage_mask, expected at least one (no mask may "
            "swallow a reward); let a turn whose mask would be empty keep all its sampled tokens"
        )


def carry_into_mask(values: Tensor, advantage_mask: Tensor, turn: Tensor) -> Tensor:
    """Move values outside M_adv to the nearest token of their turn inside it, where they add up.

    Args:
        values: `[trajectories, tokens]`.
        advantage_mask: Bool `[trajectories, tokens]`.
        turn: int64 `[trajectories, tokens]`.

    >>> values, turn = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0, 0, 0]])
    >>> carry_into_mask(values, torch.tensor([[False, True, False]]), turn)
    tensor([[0., 7., 0.]])
    """
    nearest = nearest_in_turn(advantage_mask, turn=turn)
    inside = torch.where(nearest >= 0, values, 0.0)
    return torch.zeros_like(values).scatter_add(1, nearest.clamp(min=0), inside)
