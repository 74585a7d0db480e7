"""Findings as data: what was claimed, the runs that repeat it, and the criterion, written before the runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

Overrides = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """Criterion of a finding: the difference of two arms in a metric on the same held-out episodes.

    Attributes:
        more: Arm that is claimed to be better.
        less: Arm that it is compared with.
        metric: A metric of `ragen_pl.evaluation.comparison.METRICS`, of the last weights.
        least: Smallest difference that counts as an effect.
        seeds: Number of seeds that a verdict needs.
    """

    more: str
    less: str
    metric: str = "success"
    least: float = 0.02
    seeds: int = 5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A published finding and the runs that repeat it.

    Attributes:
        question: What is asked.
        claim: What was published.
        source: Where.
        figure: Its published figure, None where none is known.
        task: A name of `TASKS`.
        overrides: Of all arms.
        arms: Overrides of each arm by its name.
        remark: What a reader has to know of the runs; None for nothing.
        start: Overrides of all arms that change the warm start too.
        starts: The same, of single arms.
        criterion: What decides.
        iterations: Iterations of a run.
        followed: Metric of a validation, without `val/`, that is shown before and after RL; None for none.
        repeats: Name of the finding that this one repeats on another task; None for none.
    """

    question: str
    claim: str
    source: str
    task: str
    arms: Mapping[str, Overrides]
    criterion: Criterion
    iterations: int
    figure: str | None = None
    overrides: Overrides = ()
    start: Overrides = ()
    starts: Mapping[str, Overrides] | None = None
    remark: str | None = None
    followed: str | None = None
    repeats: str | None = None

    def start_of(self, arm: str) -> Overrides:
        """Return the overrides that an arm's warm start depends on."""
        return (*TASKS[self.task], *self.start, *(self.starts or {}).get(arm, ()))

    @property
    def may_differ(self) -> list[str]:
        """Settings of the episodes that differ between the arms: those that the arms change."""
        changed = [
            line
            for arm in self.arms
            for line in (*self.arms[arm], *(self.starts or {}).get(arm, ()))
        ]
        return sorted({line.partition("=")[0] for line in changed if line.startswith("env.")})


# demonstrations without plans, so that what the agent knows of acting, RL has taught it
TASKS: dict[str, Overrides] = {
    "frozenlake_visual": (
        "env=frozenlake_visual", "curriculum=null", "warm_start.episodes=2048", "validation.episodes=256",
    ),
    "frozenlake": (
        "env=frozenlake", "model=small_lm", "env.kwargs.plans=false", "curriculum=null",
        "rollout.max_response_tokens=24", "warm_start.steps=300", "warm_start.episodes=4096", "warm_start.stages=null",
        "warm_start.demonstrator.noise=0.85", "warm_start.demonstrator.base=blind",
    ),
    "sokoban": (
        "env=sokoban", "model=small_lm", "env.kwargs.max_pushes=2", "rollout.max_response_tokens=56",
        "warm_start.steps=500", "warm_start.episodes=4096",
    ),
}  # fmt: skip
_TITLES = {
    "frozenlake_visual": "the lake in images",
    "frozenlake": "the lake in text",
    "sokoban": "Sokoban",
}
_RAGEN = "RAGEN, Wang et al. 2025, arXiv 2504.20073"
_VAGEN = "VAGEN, Wang et al. 2025"
_NO_KL = ("algorithm.loss.kl.coefficient=0.0", "algorithm.loss.kl.reference=null")
_ALL_SAMPLED = "algorithm.masks.advantage._target_=ragen_pl.algorithms.masks.sampled"
_LOSS_OF_ACTIONS = "algorithm.masks.loss._target_=ragen_pl.algorithms.masks.action_span"
_ADVANTAGE_OF_ACTIONS = "algorithm.masks.advantage._target_=ragen_pl.algorithms.masks.action_span"
_REWARDS_LAST = "algorithm.rewards.placement.place=end"
_TURN_LEAVE_ONE_OUT = (
    "algorithm.estimator._target_=ragen_pl.algorithms.advantages.turn_baseline.TurnLeaveOneOut"
)
_SHAPING = "{_target_: ragen_pl.rewards.potential.PotentialShaping, scale: 0.1, gamma: 1.0}"
_ALL_ONE = tuple(
    f"algorithm.estimator.{name}=1.0"
    for name in ("gamma_turn", "lam_turn", "gamma_token", "lam_token")
)

# demonstrations of shortest paths, without plans
_SOLVER = ("warm_start.demonstrator.noise=0.0", "warm_start.demonstrator.base=optimal")

_COPY = "rollout.engine._target_=support.models.copy_engine.CopyEngine"
_SLIPPERY = ("env.kwargs.slip_probability=0.6667", "env.max_turns=20")
_WHOLE_HISTORY = ("context.window=all", "warm_start.batch_size=16", "warm_start.steps=600")

# none has a penalty on the divergence
_SOLVER_OVERRIDES = ("rollout.groups=16", "rollout.group_size=8", *_NO_KL)
_SOLVER_ARMS: dict[str, Overrides] = {
    "episodes": ("algorithm=rloo",),
    "solver": ("algorithm=cast",),
    "returns to go": ("algorithm=rloo", _TURN_LEAVE_ONE_OUT),
    # the unbiased use of the same solver
    "shaping": ("algorithm=rloo", _TURN_LEAVE_ONE_OUT, f"algorithm.rewards.shaping={_SHAPING}"),
}


def _several_actions(most: int, *, turns: int) -> Overrides:
    """Return the settings of up to so many actions a turn, which are demonstrated."""
    return (
        f"env.max_actions_per_turn={most}", f"env.max_turns={turns}", "~warm_start.demonstrator.noise",
        "~warm_start.demonstrator.base", f"+warm_start.demonstrator.most={most}",
        "warm_start.demonstrator._target_=ragen_pl.envs.policies.SeveralActions",
        "+warm_start.demonstrator.policy={_target_: ragen_pl.envs.policies.NoisyPolicy, noise: 0.5, base: optimal}",
    )  # fmt: skip


def _actions_of_a_turn(fixed: str, *, turns: Mapping[int, int]) -> Finding:
    """Return the finding on actions a turn, with the limit of turns for each number of actions."""
    starts = {
        "1 action" if most == 1 else f"{most} actions": _several_actions(most, turns=limit)
        for most, limit in turns.items()
    }
    return Finding(
        question=f"Do several actions a turn help, with the number of {fixed} fixed?",
        claim="A medium number of actions a turn (5 or 6) helps planning.",
        source=_RAGEN,
        task="sokoban",
        overrides=("algorithm=starpo",),
        arms=dict.fromkeys(starts, ()),
        starts=starts,
        criterion=Criterion(more="4 actions", less="1 action"),
        iterations=16,
    )


FINDINGS: dict[str, Finding] = {
    "filter": Finding(
        question="Does it help to train on the groups with the highest deviation of returns only?",
        claim="StarPO-S keeps a quarter of the groups, and is more stable and better than without the filter.",
        source=_RAGEN,
        task="frozenlake_visual",
        # a minibatch has 32 episodes in each arm, as in the paper
        overrides=("algorithm=starpo_s", "rollout.groups=16", "rollout.group_size=8"),
        arms={
            "keep 25%": ("algorithm.filter.keep.fraction=0.25", "update.minibatches=1"),
            "keep 50%": ("algorithm.filter.keep.fraction=0.5", "update.minibatches=2"),
            "keep 75%": ("algorithm.filter.keep.fraction=0.75", "update.minibatches=3"),
            "keep 100%": ("algorithm.filter.keep.fraction=1.0", "update.minibatches=4"),
        },
        criterion=Criterion(more="keep 25%", less="keep 100%"),
        iterations=12,
    ),
    "group_size": Finding(
        question="At a fixed number of episodes, are more initial states better than more episodes of each?",
        claim="Diverse initial states with a few responses each (4) generalize better than few with many.",
        source=_RAGEN,
        task="frozenlake_visual",
        overrides=("algorithm=starpo",),
        arms={
            f"{128 // size} states, {size} each": (f"rollout.groups={128 // size}", f"rollout.group_size={size}")
            for size in (1, 2, 4, 8, 16)
        },
        criterion=Criterion(more="32 states, 4 each", less="8 states, 16 each"),
        iterations=16,
    ),
    "actions_turns_fixed": _actions_of_a_turn("turns", turns={1: 6, 2: 6, 4: 6}),
    "actions_moves_fixed": _actions_of_a_turn("moves", turns={1: 24, 2: 12, 4: 6}),
    "freshness": Finding(
        question="Are fresh rollouts better than several epochs on one?",
        claim="One update a rollout is the most stable; more frequent sampling is better.",
        source=_RAGEN,
        task="frozenlake_visual",
        overrides=("algorithm=starpo",),
        arms={
            "1 epoch": ("update.epochs=1",),
            "2 epochs": ("update.epochs=2",),
            "5 epochs": ("update.epochs=5",),
            # the rollout is sampled by a copy of the policy, as a server would
            "1 epoch, one iteration ahead": ("update.epochs=1", "rollout.iterations_ahead=1", _COPY),
        },
        criterion=Criterion(more="1 epoch", less="5 epochs"),
        iterations=16,
    ),
    "reasoning": Finding(
        question="Does reasoning before the answer help?",
        claim="Reasoning hardly emerges without a reward for it; it helps in single-turn tasks and decays in others.",
        source=_RAGEN,
        task="frozenlake",
        overrides=("algorithm=starpo",),
        arms={
            "with": (),
            "without": (),
            "with, its length rewarded": (
                "algorithm.rewards.think_length.amount=0.1", "algorithm.rewards.think_length.high=16",
            ),
        },
        starts={"without": ("env.prompt_format=no_think",)},
        criterion=Criterion(more="with", less="without"),
        iterations=30,
        followed="think_tokens",
    ),
    "horizon": Finding(
        question="Does a long horizon make training worse?",
        claim="Training collapses at long horizons, even with StarPO-S.",
        source=_RAGEN,
        task="frozenlake_visual",
        overrides=("algorithm=starpo_s",),
        arms={f"{turns} turns": () for turns in (4, 8, 16, 32)},
        # a board needs four moves at least
        starts={f"{turns} turns": ("env.kwargs.min_distance=4", f"env.max_turns={turns}") for turns in (4, 8, 16, 32)},
        remark="On boards of size 5, after 16 iterations, all arms were at 0.02 to 0.05.",
        criterion=Criterion(more="8 turns", less="32 turns"),
        iterations=32,
    ),
    "horizon_discount": Finding(
        question="Do a discount and a decay of the traces by turns help at a long horizon?",
        claim="Bi-level GAE has a discount by turns; what it does at a long horizon is not published.",
        source=_VAGEN,
        task="frozenlake_visual",
        overrides=("algorithm=trico", *_NO_KL),
        arms={
            f"discount {gamma}, decay {lam}": (
                f"algorithm.estimator.gamma_turn={gamma}", f"algorithm.estimator.lam_turn={lam}",
            )
            for gamma in (0.9, 1.0) for lam in (0.7, 1.0)
        },
        start=("env.kwargs.size=5", "env.kwargs.min_distance=4", "env.max_turns=32"),
        criterion=Criterion(more="discount 0.9, decay 0.7", less="discount 1.0, decay 1.0"),
        iterations=16,
    ),
    "trico_parts": Finding(
        question="Which part of TRICO helps: its masks, or credit by turns?",
        claim="Selective masks and bi-level GAE together are better than StarPO.",
        source=_VAGEN,
        task="frozenlake_visual",
        arms={
            "trico": ("algorithm=trico",),
            "masks only": ("algorithm=trico", *_ALL_ONE),
            "credit only": ("algorithm=trico", _ALL_SAMPLED),
            "neither": ("algorithm=starpo",),
        },
        criterion=Criterion(more="trico", less="neither"),
        iterations=16,
    ),
    "trico_parts_long": Finding(
        question="And each part alone, where most of a response states where things are and will be?",
        claim="Selective masks and bi-level GAE together are better than StarPO.",
        source=_VAGEN,
        task="frozenlake_visual",
        # rewards of turns: for true statements, and against moves without effect
        overrides=(
            "algorithm.rewards.world_model.grounding_weight=0.02",
            "algorithm.rewards.world_model.worldmodeling_weight=0.02",
            "algorithm.rewards.action_efficiency.penalty=0.1",
        ),
        arms={
            "none": ("algorithm=starpo", _REWARDS_LAST),
            "M_loss of actions": ("algorithm=starpo", _REWARDS_LAST, _LOSS_OF_ACTIONS),
            "M_adv of actions": ("algorithm=starpo", _REWARDS_LAST, _ADVANTAGE_OF_ACTIONS),
            "bi-level GAE": ("algorithm=trico", _REWARDS_LAST, _ALL_SAMPLED),
            "turn rewards": ("algorithm=starpo",),
            "bi-level GAE, turn rewards": ("algorithm=trico", _ALL_SAMPLED),
            "trico": ("algorithm=trico",),
            "trico, M_adv of actions": ("algorithm=trico", _ADVANTAGE_OF_ACTIONS),
            "trico, M_loss of actions": ("algorithm=trico", _LOSS_OF_ACTIONS),
        },
        start=("env.prompt_format=grounding_worldmodeling", "rollout.max_response_tokens=96"),
        remark="`trico` has bi-level GAE, turn rewards, M_loss of all sampled tokens and M_adv up to the end of the "
        "action. Where rewards of turns are not named, they are added up in the last turn.",
        criterion=Criterion(more="trico", less="none"),
        iterations=16,
    ),
    "turn_value": Finding(
        question="May the value at a turn's last token be the baseline of the whole turn?",
        claim="Turn-level PPO with that baseline is better than PPO by tokens. By exact enumeration the turn's other "
        "tokens get no gradient then.",
        source="HyGAE, arXiv 2607.23605; also VAGEN's first version and AgileRL",
        task="frozenlake_visual",
        overrides=("algorithm=turn_ppo", *_NO_KL),
        arms={
            "value before the first token": (),
            "value at the last token": ("algorithm.estimator.value_at=last_token",),
        },
        criterion=Criterion(more="value before the first token", less="value at the last token"),
        iterations=16,
    ),
    "supervised": Finding(
        question="Is RL after a solver's demonstrations better than more of them, at equal processor time?",
        claim="RL generalizes beyond what supervised training on demonstrations reaches.",
        source="Chu et al. 2025, arXiv 2501.17161; RAGEN compares RL with supervised training too",
        task="frozenlake_visual",
        overrides=("algorithm=trico",),
        arms={
            "supervised, then RL": (),
            "supervised": ("trainer.max_epochs=0", "trainer.check_val_every_n_epoch=1"),
            "RL after random demonstrations": (),
        },
        starts={
            "supervised, then RL": _SOLVER,
            # 16 iterations take as long as 165 steps
            "supervised": (*_SOLVER, "warm_start.steps=565"),
        },
        criterion=Criterion(more="supervised, then RL", less="supervised"),
        iterations=16,
    ),
    "importance": Finding(
        question="Does it help to train on the tokens that matter for the action, where most of the context does not?",
        claim="None is published. The method is this project's: M_loss keeps the half of a turn's other tokens with "
        "the highest gradient times input.",
        source="docs/adaptive.md",
        task="frozenlake_visual",
        # of a history of boards only the last matters
        overrides=_NO_KL,
        arms={"trico_importance": ("algorithm=trico_importance",), "trico": ("algorithm=trico",)},
        start=_WHOLE_HISTORY,
        criterion=Criterion(more="trico_importance", less="trico"),
        iterations=16,
    ),
    "adaptive_discount": Finding(
        question="Does a discount that follows the progress of the episode help, in a task with subgoals?",
        claim="None is published. The method is this project's: the future counts more after success and less after a "
        "setback.",
        source="docs/adaptive.md",
        task="sokoban",
        overrides=_NO_KL,
        arms={"trico_adaptive": ("algorithm=trico_adaptive",), "trico": ("algorithm=trico",)},
        criterion=Criterion(more="trico_adaptive", less="trico"),
        iterations=16,
    ),
    "estimators": Finding(
        question="Which estimator learns most from the same number of episodes?",
        claim="Credit by turns is better than one advantage for the whole episode.",
        source=_VAGEN,
        task="frozenlake_visual",
        # none has a penalty on the divergence, which differs between the presets
        overrides=("rollout.groups=16", "rollout.group_size=8"),
        arms={
            "trico": ("algorithm=trico", *_NO_KL),
            "trico_published": ("algorithm=trico_published", *_NO_KL),
            "turn_ppo": ("algorithm=turn_ppo", *_NO_KL),
            "starpo": ("algorithm=starpo", *_NO_KL),
            "gigpo": ("algorithm=gigpo", *_NO_KL),
            "grpo": ("algorithm=grpo", *_NO_KL),
            "rloo": ("algorithm=rloo", *_NO_KL),
            "reinforce_pp": ("algorithm=reinforce_pp", *_NO_KL),
        },
        criterion=Criterion(more="trico", less="grpo"),
        iterations=16,
    ),
    "solver_teacher": Finding(
        question="Do a solver's advantages of turns help, beside those of the episode?",
        claim="In Sokoban, Minesweeper and Rush Hour they reach the success of DAPO in 50 to 60% of its steps.",
        source="CAST, 2026, arXiv 2607.25308",
        task="frozenlake",
        overrides=_SOLVER_OVERRIDES,
        arms=_SOLVER_ARMS,
        criterion=Criterion(more="solver", less="episodes"),
        iterations=16,
    ),
    "solver_teacher_sokoban": Finding(
        question="Do a solver's advantages of turns help in Sokoban, one of the tasks of the paper?",
        claim="In Sokoban, Minesweeper and Rush Hour they reach the success of DAPO in 50 to 60% of its steps.",
        source="CAST, 2026, arXiv 2607.25308",
        task="sokoban",
        overrides=_SOLVER_OVERRIDES,
        arms=_SOLVER_ARMS,
        criterion=Criterion(more="solver", less="episodes"),
        iterations=16,
        repeats="solver_teacher",
    ),
    "group_methods": Finding(
        question="Do later methods of groups learn more than leave-one-out from the same number of episodes?",
        claim="Each is better than GRPO or PPO: credit of turns from visits of equal states (GAGPO, GraphGPO), success "
        "relative to its mean (MaxRL), a mask by divergence (DPPO), terms standardized apart (GDPO).",
        source="arXiv 2602.02710, 2602.04879, 2601.05242, 2605.26684 and GAGPO; [algorithms](algorithms.md#presets)",
        task="frozenlake_visual",
        overrides=("rollout.groups=16", "rollout.group_size=8"),
        arms={
            "rloo": ("algorithm=rloo", *_NO_KL),
            "gagpo": ("algorithm=gagpo", *_NO_KL),
            "graphgpo": ("algorithm=graphgpo", *_NO_KL),
            "maxrl": ("algorithm=maxrl", *_NO_KL),
            "dppo": ("algorithm=dppo",),
            "dppo by turn": ("algorithm=dppo", "algorithm.loss.policy.level=turn"),
            "gdpo": ("algorithm=gdpo", *_NO_KL),
            "gigpo": ("algorithm=gigpo", *_NO_KL),
        },
        remark="The verdict is that of GAGPO. The criterion of every other arm is the same, in docs/algorithms.md.",
        criterion=Criterion(more="gagpo", less="rloo"),
        iterations=16,
    ),
    "divergence_mask": Finding(
        question="Does a mask by the divergence of a whole episode help, in place of none?",
        claim="A mask by divergence is better than clipped ratios.",
        source="DPPO, Qi et al. 2026, arXiv 2602.04879",
        task="frozenlake_visual",
        overrides=("rollout.groups=16", "rollout.group_size=8"),
        arms={
            "dppo by sequence": ("algorithm=dppo", "algorithm.loss.policy.level=sequence"),
            "rloo": ("algorithm=rloo", *_NO_KL),
        },
        # a sample is an episode
        start=_WHOLE_HISTORY,
        remark="Where a sample is a turn, this is the mask by turn of [group_methods](#group_methods).",
        criterion=Criterion(more="dppo by sequence", less="rloo"),
        iterations=16,
    ),
    "group_methods_slippery": Finding(
        question="And where two of three moves slip to a side?",
        claim="Credit of turns from visits of equal states is better than one advantage for the whole episode.",
        source="GiGPO, Feng et al. 2025, arXiv 2505.10978; GAGPO and GraphGPO, [algorithms](algorithms.md#presets)",
        task="frozenlake_visual",
        overrides=("rollout.groups=16", "rollout.group_size=8"),
        arms={
            "rloo": ("algorithm=rloo", *_NO_KL),
            "gagpo": ("algorithm=gagpo", *_NO_KL),
            "gigpo": ("algorithm=gigpo", *_NO_KL),
            "graphgpo": ("algorithm=graphgpo", *_NO_KL),
        },
        start=_SLIPPERY,
        criterion=Criterion(more="gagpo", less="rloo"),
        iterations=16,
    ),
    "critic_gate": Finding(
        question="Does it help to leave out a critic that does not explain the returns?",
        claim="A gate by explained variance is better than the critic alone and than the batch's mean alone.",
        source="EVPO, Pan et al. 2026, arXiv 2604.19485",
        task="frozenlake_visual",
        overrides=_NO_KL,
        arms={
            "evpo": ("algorithm=evpo",),
            # the same estimator, whose critic is always used
            "critic": ("algorithm=evpo", "algorithm.estimator.threshold=-1e9"),
            "mean": ("algorithm=evpo", "algorithm.estimator.threshold=1e9"),
        },
        criterion=Criterion(more="evpo", less="critic"),
        iterations=16,
    ),
    "echo": Finding(
        question="Does it help to predict what the environment says?",
        claim="A loss on the next observation, beside that of RL, teaches to act.",
        source="ECHO, Shrivastava et al. 2026, arXiv 2605.24517",
        task="frozenlake",
        overrides=("algorithm=echo", *_NO_KL),
        arms={
            "echo": (),
            "weight 0": ("algorithm.loss.echo.observation=0.0", "algorithm.loss.echo.result=0.0"),
        },
        start=_WHOLE_HISTORY,
        criterion=Criterion(more="echo", less="weight 0"),
        iterations=16,
    ),
}  # fmt: skip


def _elsewhere(name: str, task: str) -> Finding:
    """Return the two deciding arms of a finding on another task."""
    finding = FINDINGS[name]
    more, less = finding.criterion.more, finding.criterion.less
    return replace(
        finding,
        question=f"On {_TITLES[task]}: is *{more}* better than *{less}*?",
        task=task,
        arms={arm: finding.arms[arm] for arm in (more, less)},
        repeats=name,
    )


_ELSEWHERE = (
    "trico_parts",
    "filter",
    "group_size",
    "freshness",
    "estimators",
    "turn_value",
    "reasoning",
)
FINDINGS |= {
    f"{name}_{task}": _elsewhere(name, task)
    for name in _ELSEWHERE
    for task in TASKS
    if task != FINDINGS[name].task
}
"""By name."""
