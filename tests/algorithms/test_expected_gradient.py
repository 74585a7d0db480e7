"""Expected gradients of the presets, by enumeration, against the gradient of the returns.

A task is a tree of tokens. The policy chooses how long its action is and where a turn ends. The environment ends the
task after some turns, and goes on or cuts the episode after others. A critic is the fixed point of its own targets.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from ragen_pl.algorithms import masks
from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.advantages.gagpo import GroupGAE
from ragen_pl.algorithms.advantages.turn import TurnGAE
from ragen_pl.algorithms.credit import AdvantageInputs, Advantages, Estimator, place_turn_rewards
from ragen_pl.config import config_dir
from ragen_pl.trajectory import Span

TOKENS = "ab)."  # two of content, one that closes the action, one that ends the turn
CLOSE, END = 2, 3
MASKS = [masks.sampled, masks.until_action, masks.action_span, masks.no_special]


@dataclass(frozen=True)
class Task:
    """A tree of turns; everything in it is drawn from the history and the seed.

    Attributes:
        seed: Seed of logits, rewards and ends.
        turns: Maximum number of turns.
        tokens: Maximum number of tokens of a turn.
        truncates: Whether the limit of turns cuts an episode, with a value afterwards, or ends the task.
        prefix: Whether the action begins after the first closing token, and thoughts come before it.
        fixed: Whether all turns have the maximum number of tokens.
        vocabulary: Tokens that the policy can sample.
    """

    seed: int
    turns: int = 2
    tokens: int = 3
    truncates: bool = False
    prefix: bool = False
    fixed: bool = False
    vocabulary: tuple[int, ...] = (0, 1, CLOSE, END)

    def draw(self, purpose: str, history: object, size: int = 1) -> Tensor:
        """Return normal numbers that depend on seed, purpose and history."""
        key = zlib.crc32(repr((self.seed, purpose, history)).encode())
        return torch.randn(size, generator=torch.Generator().manual_seed(key), dtype=torch.float64)

    def ends(self, turns: tuple[tuple[int, ...], ...]) -> bool:
        """Whether the task ends after these turns."""
        return float(self.draw("end", turns)) > 0.4

    def responses(self) -> list[tuple[int, ...]]:
        """Return all responses of a turn: they end with the end token, or at the limit."""
        if self.fixed:
            return list(itertools.product(self.vocabulary, repeat=self.tokens))
        found = []
        for size in range(1, self.tokens + 1):
            for ids in itertools.product(self.vocabulary, repeat=size):
                if END not in ids[:-1] and (ids[-1] == END or size == self.tokens):
                    found.append(ids)
        return found

    def labels(self, response: tuple[int, ...]) -> list[Span]:
        """Return the spans of a response; without a closing token, or with an empty action, it has no action."""
        labels = [Span.END if token == END else Span.OTHER for token in response]
        closed = response.index(CLOSE) if CLOSE in response else None
        if closed is not None:
            labels[closed] = Span.TAG
            action = range(closed + 1, len(response)) if self.prefix else range(closed)
            for place in action:
                if response[place] < CLOSE:
                    labels[place] = Span.ACTION
        return labels

    def episodes(self) -> list[tuple[tuple[tuple[int, ...], ...], bool]]:
        """Return the turns of all episodes and whether each is cut."""
        found, growing = [], [()]
        while growing:
            before = growing.pop()
            for response in self.responses():
                turns = (*before, response)
                if self.ends(turns) or len(turns) == self.turns:
                    found.append((turns, self.truncates and not self.ends(turns)))
                else:
                    growing.append(turns)
        return found


class Enumerated:
    """All episodes of a task with their probabilities, in the credit layout."""

    def __init__(self, task: Task) -> None:
        episodes, width = task.episodes(), task.turns * task.tokens
        rows = len(episodes)
        self.turn, self.labels = torch.full((rows, width), -1), torch.zeros(rows, width).char()
        self.token, self.history = torch.zeros(rows, width).long(), torch.zeros(rows, width).long()
        self.rewards = torch.zeros(rows, task.turns)
        self.state = torch.full((rows, task.turns), -1)
        self.bootstrap, self.length = torch.zeros(rows), torch.zeros(rows).long()
        histories: dict[object, int] = {}
        for row, (turns, cut) in enumerate(episodes):
            place = 0
            self.length[row] = len(turns)
            for number, response in enumerate(turns):
                before = turns[:number]
                self.state[row, number] = histories.setdefault((before, ()), len(histories))
                self.rewards[row, number] = task.draw("reward", turns[: number + 1])
                for at, token in enumerate(response):
                    self.turn[row, place], self.token[row, place] = number, token
                    self.labels[row, place] = task.labels(response)[at]
                    state = histories.setdefault((before, response[:at]), len(histories))
                    self.history[row, place] = state
                    place += 1
            if cut:
                self.bootstrap[row] = task.draw("value", turns)
        self.on = self.turn >= 0
        logits = torch.stack([task.draw("logits", key, len(TOKENS)) for key in histories])
        banned = [token for token in range(len(TOKENS)) if token not in task.vocabulary]
        self.policy = logits.index_fill(1, torch.tensor(banned).long(), -torch.inf).softmax(1)
        chosen = torch.where(self.on, self.policy[self.history, self.token], 1.0)
        self.chance = chosen.prod(1)

    def gradient(self, advantages: Tensor, chance: Tensor | None = None) -> Tensor:
        """Return the expected gradient for the logits of each history, `[histories, tokens]`."""
        chance = self.chance if chance is None else chance
        weight = torch.where(self.on, chance[:, None] * advantages.double(), 0.0)
        total = torch.zeros_like(self.policy[:, 0])
        total.index_add_(0, self.history.flatten(), weight.flatten())
        chosen = torch.zeros_like(self.policy).flatten()
        place = (self.history * len(TOKENS) + self.token).flatten()
        chosen.index_add_(0, place, weight.flatten())
        return chosen.reshape(self.policy.shape) - self.policy * total[:, None]

    def true_gradient(self, gamma: float) -> Tensor:
        """Return the gradient with the return from each turn on, discounted per turn, cut episodes bootstrapped."""
        rest = torch.zeros_like(self.rewards).double()
        for turn in reversed(range(rest.shape[1])):
            following = rest[:, turn + 1] if turn + 1 < rest.shape[1] else self.bootstrap.double()
            following = torch.where(self.length == turn + 1, self.bootstrap.double(), following)
            rest[:, turn] = self.rewards[:, turn] + gamma * following
        return self.gradient(rest.gather(1, self.turn.clamp(min=0)))

    def credit(self, mask: Callable[..., Tensor], values: Tensor | None = None) -> AdvantageInputs:
        """Return the batch with M_adv and the values of the histories."""
        kept = masks.filled(mask(self.labels, self.turn), self.labels, self.turn)
        return AdvantageInputs(
            rewards=place_turn_rewards(self.rewards, self.turn, kept),
            values=None if values is None else values.float()[self.history],
            advantage_mask=kept,
            loss_mask=self.on,
            turn=self.turn,
            group=torch.arange(len(self.turn)),
            bootstrap=self.bootstrap,
            returns=self.rewards.sum(1),
            state=self.state,
        )

    def with_critic(self, estimator: Estimator, mask: Callable[..., Tensor]) -> Advantages:
        """Return the estimates with the values that are the means of their own targets."""
        values = torch.zeros(len(self.policy), dtype=torch.float64)
        # a target depends on the values of later turns only
        for _ in range(self.rewards.shape[1] + 1):
            given = self.credit(mask, values)
            estimates = estimator(given)
            weight = torch.where(given.learned, self.chance[:, None], 0.0).flatten()
            sums, counts = torch.zeros_like(values), torch.zeros_like(values)
            targets = weight * estimates.returns.double().flatten()
            sums.index_add_(0, self.history.flatten(), targets)
            counts.index_add_(0, self.history.flatten(), weight)
            values = torch.where(counts > 0, sums / counts.clamp(min=1e-300), values)
        return estimator(self.credit(mask, values))

    def in_groups(self, estimator: Estimator, members: int) -> Tensor:
        """Return the expected gradient of a member with all groups of this size."""
        rows = torch.cartesian_prod(*[torch.arange(len(self.turn))] * members)
        given = self.credit(masks.sampled)
        parts = {field.name: getattr(given, field.name) for field in fields(AdvantageInputs)}
        parts = {
            name: None if part is None else part[rows.flatten()] for name, part in parts.items()
        }
        parts["group"] = torch.arange(len(rows)).repeat_interleave(members)
        advantages = estimator(AdvantageInputs(**parts)).advantages.double()
        first = advantages.reshape(*rows.shape, -1)[:, 0]
        weighted = first * self.chance[rows[:, 1:]].prod(1)[:, None]
        mean = torch.zeros_like(first[: len(self.turn)]).index_add_(0, rows[:, 0], weighted)
        return self.gradient(mean)


def off_direction(found: Tensor, expected: Tensor) -> float:
    """Return the part of a gradient that is not along the expected one, in units of the latter."""
    slope = (found * expected).sum() / expected.square().sum()
    return float((found - slope * expected).norm() / (slope * expected).norm())


def preset(name: str) -> tuple[Estimator, Callable[..., Tensor]]:
    """Return a preset's estimator and its M_adv; what it leaves out is that of `trico` or all sampled tokens."""
    files = [OmegaConf.load(config_dir() / "algorithm" / f"{name}.yaml")]
    if "trico" in files[0].defaults:
        files.insert(0, OmegaConf.load(config_dir() / "algorithm" / "trico.yaml"))
    merged = OmegaConf.merge(*[{"algorithm": file.algorithm} for file in files]).algorithm
    mask = OmegaConf.select(merged, "masks.advantage._target_") or ""
    return instantiate(merged.estimator), getattr(masks, mask.rsplit(".", 1)[-1], masks.sampled)


def gamma_of(estimator: Estimator) -> float:
    return float(getattr(estimator, "gamma_turn", getattr(estimator, "gamma", 1.0)))


TASKS = [Task(0, prefix=True), Task(1, truncates=True), Task(2, truncates=True, prefix=True)]
SMALL = Task(3, turns=3, tokens=2, vocabulary=(0, END))
WITH_CRITIC = ["starpo", "turn_ppo", "trico", "rico", "evpo"]


@pytest.fixture(scope="module")
def enumerated() -> dict[Task, Enumerated]:
    return {task: Enumerated(task) for task in TASKS}


@pytest.mark.parametrize("task", TASKS, ids=str)
@pytest.mark.parametrize("name", WITH_CRITIC)
def test_presets_with_a_critic_are_exact(enumerated, name, task) -> None:
    estimator, mask = preset(name)
    batch = enumerated[task]
    expected = batch.true_gradient(gamma_of(estimator))
    found = batch.gradient(batch.with_critic(estimator, mask).advantages)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.norm()))


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
@pytest.mark.parametrize(
    "estimator",
    [BilevelGAE(gamma_turn=0.9, lam_turn=0.7), TurnGAE(gamma=0.9, lam=0.6)],
    ids=lambda each: type(each).__name__,
)
def test_every_mask_of_credit_is_exact(enumerated, estimator, mask) -> None:
    """M_adv may depend on what was sampled: no baseline depends on it."""
    for task in TASKS[1:]:
        batch = enumerated[task]
        expected = batch.true_gradient(gamma_of(estimator))
        found = batch.gradient(batch.with_critic(estimator, mask).advantages)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.norm()))


@pytest.mark.parametrize(
    ("estimator", "mask", "low", "high"),
    [
        (BilevelGAE(gamma_turn=0.9, lam_turn=1.0, published=True), masks.until_action, 0.02, 0.5),
        (BilevelGAE(gamma_turn=0.9, lam_turn=0.7, published=True), masks.sampled, 0.003, 0.2),
        (TurnGAE(gamma=0.9, lam=0.7, value_at="last_token"), masks.sampled, 0.3, 5.0),
    ],
    ids=["neighbor's advantage", "bootstrap at the last token", "turn PPO at the last token"],
)
def test_published_forms_are_biased(enumerated, estimator, mask, low, high) -> None:
    for task in TASKS[1:]:
        batch = enumerated[task]
        expected = batch.true_gradient(0.9)
        found = batch.gradient(batch.with_critic(estimator, mask).advantages)
        assert low < off_direction(found, expected) < high


def test_a_baseline_at_the_last_token_leaves_the_other_tokens_no_gradient() -> None:
    batch = Enumerated(Task(0, tokens=2, fixed=True))
    estimator = TurnGAE(value_at="last_token")
    found = batch.gradient(batch.with_critic(estimator, masks.sampled).advantages)
    expected = batch.true_gradient(1.0)
    first = batch.history[:, ::2].unique()
    assert float(found[first].norm()) < 1e-6 < float(expected[first].norm())
    others = torch.ones(len(found), dtype=torch.bool).index_fill_(0, first, False)
    torch.testing.assert_close(found[others], expected[others], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["rloo", "arpo", "dr_grpo"])
def test_group_presets_are_exact(name) -> None:
    """Up to (N - 1) / N where an episode's own return is in the mean."""
    batch = Enumerated(SMALL)
    estimator, _ = preset(name)
    scale = 2.0 if name == "dr_grpo" else 1.0
    expected = batch.true_gradient(1.0)
    found = scale * batch.in_groups(estimator, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.norm()))


@pytest.mark.parametrize("lam", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_values_of_other_visits_are_exact(gamma, lam) -> None:
    """Also with a trace that bootstraps, since it goes on over states that no other member has visited."""
    batch = Enumerated(SMALL)
    expected = batch.true_gradient(gamma)
    found = batch.in_groups(GroupGAE(gamma=gamma, lam=lam), 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.norm()))


@pytest.mark.parametrize(("name", "low", "high"), [("grpo", 0.02, 0.7), ("gigpo", 0.02, 0.7)])
def test_division_by_a_deviation_is_biased(name, low, high) -> None:
    for seed in (3, 4):
        batch = Enumerated(replace(SMALL, seed=seed))
        estimator, _ = preset(name)
        assert low < off_direction(batch.in_groups(estimator, 2), batch.true_gradient(1.0)) < high
