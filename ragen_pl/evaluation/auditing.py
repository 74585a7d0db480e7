"""Audit of credit: how the advantages that algorithms give to turns agree with the turns' true effects.

The effect of a turn is A(s, a) = Q(s, a) - V(s): what its response has changed in the expected return of the policy.
It is measured by execution. The policy plays episodes; from the state before each turn, which the episode's seed and
responses lead to again, it plays others to their ends. V is their mean return, and Q the turn's reward with V of the
state after it. Each algorithm then credits the first episodes as in training, with the masks of its own and the critic
of the checkpoint. (Step credit is compared with executed replay in arXiv 2608.19760.)
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from hydra import compose
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.pytorch.utilities import move_data_to_device
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table

from ragen_pl.algorithms.credit import Estimator
from ragen_pl.algorithms.normalization import RewardNormalizer
from ragen_pl.assembly.build import (
    build_bundle,
    build_context,
    build_critic,
    build_engine,
    build_environments,
    build_policy,
    build_proxy,
    device_named,
)
from ragen_pl.assembly.weights import load_initial_weights
from ragen_pl.base.files import atomic_write
from ragen_pl.base.json_text import json_text
from ragen_pl.base.phases import phase, wide_console
from ragen_pl.base.seeding import derive_seed
from ragen_pl.checkpoints.folder import make_time_stamped
from ragen_pl.config.environments import is_mixture
from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.config.hydra_errors import translated
from ragen_pl.config.own_files import is_own, run_settings
from ragen_pl.config.paths import config_dir
from ragen_pl.data.batch import CreditLayout, TrajectoryBatch
from ragen_pl.data.collate import collate, usable
from ragen_pl.data.microbatches import split_for_scoring
from ragen_pl.engines.protocol import Generation
from ragen_pl.environments.slot import EpisodeSpec
from ragen_pl.modules.credit import assign_credit
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.modules.masking import Masks, compute_token_masks
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.scorer import Scorer
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.attempts import RecordedResponse
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.responders import EngineResponder, Responder
from ragen_pl.tracking.checkpoints import find_checkpoint
from ragen_pl.trajectory import Action, Trajectory, Turn

log = logging.getLogger(__name__)

CHANCE = "chance"
"""Name of the row of advantages that have nothing to do with the turns."""

_RESAMPLES = 2000
# width of a log, which has none of its own
_LOG_WIDTH = 120
_FIGURES, _TURNS = "audit.json", "turns.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnEffect:
    """The measured effect of a turn.

    Attributes:
        episode: Index of the episode.
        turn: Index of the turn in it.
        group: Group of the episode.
        effect: Q(s, a) - V(s), in units of the undiscounted return.
        variance: Squared standard error of `effect`.
    """

    episode: int
    turn: int
    group: int
    effect: float
    variance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How an algorithm's advantages of turns agree with their effects.

    Attributes:
        correlation: Pearson's, over all turns.
        low: Lower end of its 95% interval, by the bootstrap over groups.
        high: Upper end.
        exact: The correlation with effects that had no noise of their own (Spearman's correction for attenuation), NaN
            where the effects are nothing but noise.
        signal_to_noise: Variance of the advantages that the effects explain, over the rest of it; likewise.
    """

    correlation: float
    low: float
    high: float
    exact: float
    signal_to_noise: float


@dataclass(slots=True)
class _Models:
    policy: PolicyModule
    critic: CriticModule | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """Figures of an audit.

    Attributes:
        effects: The turns that were measured.
        advantages: Of these turns, by the name of the algorithm.
        agreements: By the name of the algorithm, the largest first, `chance` the last.
        reliability: Part of the effects' variance that is not noise of the continuations.
    """

    effects: list[TurnEffect]
    advantages: dict[str, list[float]]
    agreements: dict[str, Agreement]
    reliability: float


def audit(cfg: DictConfig) -> Audit:
    """Audit a checkpoint, print the figures and write them.

    Args:
        cfg: Settings of `conf/audit.yaml`.

    Raises:
        ConfigError: The checkpoint is of no run of one's own, an algorithm does not exist, or the environment can't be
            brought to a state again.
    """
    checkpoint = find_checkpoint(cfg.ckpt, root=cfg.paths.root, run_dir=cfg.paths.run_dir)
    if checkpoint.run is None or checkpoint.is_folder:
        raise ConfigError(f"ckpt={cfg.ckpt}: give a run's checkpoint, which has its critic too")
    if not (cfg.trust or is_own(checkpoint.settings_file)):
        raise ConfigError(
            f"{checkpoint.settings_file}: somebody else's run, and an audit builds what it names; set trust=true if "
            "you trust its author"
        )
    algorithms = _algorithms(cfg)
    run = OmegaConf.create(run_settings(checkpoint.settings_file))
    if is_mixture(run.env):
        raise ConfigError(
            f"ckpt={cfg.ckpt}: its run is a mixture of {', '.join(run.env.environments)}, and an audit takes a run of "
            "one environment; give another run"
        )
    device = device_named(cfg.device)
    log.info("loading the model")
    bundle = build_bundle(run)
    models = _Models(build_policy(bundle, run["update"]), build_critic(run, bundle))
    load_initial_weights(models, checkpoint.path, source=f"ckpt={cfg.ckpt}")
    models.policy.to(device).eval()
    if models.critic is not None:
        models.critic.to(device).eval()
    proxy = build_proxy(
        run.rollout,
        environments=build_environments(
            run.env,
            record_states=True,
            record_potentials=any(
                _estimator(name, algorithm).needs_potentials
                for name, algorithm in algorithms.items()
            ),
        ),
        context=build_context(bundle, run.context),
    )
    with closing(build_engine(run.rollout.engine, bundle)) as engine:
        engine.load_weights(0)
        responder = EngineResponder(engine=engine, context=proxy.context)
        episodes = _episodes(proxy, responder, cfg, env=run.env.name)
        effects = measured_effects(
            proxy, responder, episodes, continuations=cfg.continuations, seed=cfg.seed
        )
    batch = move_data_to_device(collate([trajectory for _, trajectory in episodes], bundle), device)
    with torch.no_grad():
        _add_values(batch, models, tokens_per_forward=run["update"].tokens_per_forward)
    batch = move_data_to_device(batch, torch.device("cpu"))
    advantages = {
        name: of_effects
        for name, algorithm in algorithms.items()
        if (of_effects := _advantages(name, algorithm, batch, models.critic, effects)) is not None
    }
    found = compared(effects, advantages, seed=cfg.seed)
    folder = Path(cfg.to).expanduser() if cfg.to else make_time_stamped(checkpoint.run / "audits")
    sizes = {name: cfg[name] for name in ("groups", "group_size", "continuations", "seed")}
    _write(found, folder, about={"checkpoint": str(checkpoint.path), **sizes})
    _print(found, cfg)
    log.info("written to %s", folder)
    return found


def _algorithms(cfg: DictConfig) -> dict[str, DictConfig]:
    """Return the settings of the algorithms by name, as the running command finds them."""
    shipped = sorted(file.stem for file in (config_dir() / "algorithm").glob("*.yaml"))
    names = shipped if cfg.algorithms is None else list(cfg.algorithms)
    found = {}
    for name in names:
        try:
            found[name] = compose("fit", overrides=[f"algorithm={name}"]).algorithm
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"algorithms={name}: {translated(error)}") from error
    return found


def _estimator(name: str, algorithm: DictConfig) -> Estimator:
    with config_errors(f"algorithms={name}"):
        estimator: Estimator = instantiate(algorithm.estimator, _convert_="all")
    return estimator


def _episodes(
    proxy: AgentProxy[ContextManager], responder: EngineResponder, cfg: DictConfig, *, env: str
) -> list[tuple[EpisodeSpec, Trajectory]]:
    """Play the episodes that are credited; return those without a failure."""
    specs = [
        EpisodeSpec(
            group=group,
            member=member,
            seed=derive_seed(cfg.seed, "audit", group),
            held_out=False,
        )
        for group in range(cfg.groups)
        for member in range(cfg.group_size)
    ]
    with phase("episodes", len(specs)) as progress:
        played = proxy.rollout(
            responder, specs, seed_key=("audit", cfg.seed, "episodes"), progress=progress
        )
    if any(one.seats > 1 for one in played):
        raise ConfigError(
            f"env={env}: an audit takes episodes of one seat, and the policy plays several; set a scripted opponent, "
            "such as env.kwargs.opponent=random"
        )
    episodes = [pair for pair in zip(specs, played, strict=True) if usable(pair[1])]
    if not episodes:
        raise ConfigError(f"env={env}: every episode failed")
    turns = [turn for _, trajectory in episodes for turn in trajectory.turns]
    if any(not isinstance(turn.kind, Action) for turn in turns):
        raise ConfigError(
            f"env={env}: an audit takes actions in an environment, not requests of programs or summaries; give a run "
            "without them"
        )
    return episodes


def measured_effects(
    proxy: AgentProxy[ContextManager],
    responder: Responder,
    episodes: Sequence[tuple[EpisodeSpec, Trajectory]],
    *,
    continuations: int,
    seed: int,
) -> list[TurnEffect]:
    """Measure the effects of all turns of episodes by continuations from the states before them.

    The first state of a group is that of all its members, and measured once.

    Args:
        proxy: Plays the continuations.
        responder: The policy.
        episodes: Episodes of the policy.
        continuations: Episodes from each state.
        seed: Seed of the audit.

    Raises:
        ConfigError: An environment does not come to the same state by the same responses, or there is no effect: of
            all states one continuation at most has not failed.
    """
    states = {
        (spec.group, -1 if turn == 0 else number, turn): (spec, trajectory.turns[:turn])
        for number, (spec, trajectory) in enumerate(episodes)
        for turn in range(len(trajectory.turns))
    }
    specs, known = [], []
    for number, (spec, turns) in enumerate(states.values()):
        given = [_recorded(turn) for turn in turns]
        for continuation in range(continuations):
            # its own member: the seeds of sampling depend on it
            member = number * continuations + continuation
            specs.append(replace(spec, member=member))
            known.append(given)
    with phase("continuations", len(specs)) as progress:
        played = proxy.rollout(
            responder,
            specs,
            seed_key=("audit", seed, "continuations"),
            progress=progress,
            recorded_responses=known,
        )
    returns: dict[tuple[int, int, int], np.ndarray] = {}
    for number, (state, (_, turns)) in enumerate(states.items()):
        of_state = played[number * continuations : (number + 1) * continuations]
        if any(usable(one) and one.replayed_turns < len(turns) for one in of_state):
            raise ConfigError(
                f"env: turn {len(turns) + 1} of an episode does not come again by its seed and responses; an audit "
                "needs an environment that repeats"
            )
        rest = [
            sum(turn.reward for turn in one.turns[len(turns) :]) for one in of_state if usable(one)
        ]
        returns[state] = np.array(rest)
    effects = [
        effect
        for number, (spec, trajectory) in enumerate(episodes)
        for effect in _effects(number, spec.group, trajectory, returns)
    ]
    if not effects:
        raise ConfigError(
            "env: the continuations failed; see their errors above, and fix the environment"
        )
    return effects


def _recorded(turn: Turn) -> RecordedResponse:
    """Return a turn's response as one that is known."""
    response = Generation(
        ids=turn.response_ids,
        logprobs=turn.response_logprobs,
        entropy=turn.response_entropy,
        hit_length_limit=turn.hit_length_limit,
        version=0,
    )
    return RecordedResponse(ids=turn.prompt_ids, images=list(turn.prompt_images), response=response)


def _effects(
    number: int,
    group: int,
    trajectory: Trajectory,
    returns: Mapping[tuple[int, int, int], np.ndarray],
) -> list[TurnEffect]:
    """Return the effects of an episode's turns whose states have two continuations at least."""
    effects = []
    for index, turn in enumerate(trajectory.turns):
        before = returns[group, -1 if index == 0 else number, index]
        # nothing follows the last turn
        after = returns.get((group, number, index + 1), np.zeros(2))
        if min(len(before), len(after)) < 2:
            continue
        variance = before.var(ddof=1) / len(before) + after.var(ddof=1) / len(after)
        effects.append(
            TurnEffect(
                episode=number,
                turn=index,
                group=group,
                effect=float(turn.reward + after.mean() - before.mean()),
                variance=float(variance),
            )
        )
    return effects


def _add_values(batch: TrajectoryBatch, models: _Models, *, tokens_per_forward: int) -> None:
    """Set the critic's values of the samples and of the states after truncated episodes."""
    if models.critic is None:
        return
    scorer = Scorer(models.policy, models.critic, None, UpdateLoss())
    microbatches = split_for_scoring(batch.samples.length, tokens_per_forward)
    scores = scorer.score(batch.samples, batch.images, microbatches=microbatches)
    assert scores.values is not None
    batch.samples.values = scores.values
    scorer.bootstrap(batch, tokens_per_forward=tokens_per_forward)


def _advantages(
    name: str,
    algorithm: DictConfig,
    batch: TrajectoryBatch,
    critic: CriticModule | None,
    effects: Sequence[TurnEffect],
) -> list[float] | None:
    """Return the mean advantage of the trained tokens of each turn; None where the algorithm can't be audited."""
    estimator = _estimator(name, algorithm)
    with config_errors(f"algorithms={name}"):
        masks: Masks = instantiate(algorithm.masks, _convert_="all")
        normalizer: RewardNormalizer | None = instantiate(
            algorithm.get("normalize"), _convert_="all"
        )
    if algorithm.loss.get("policy_coefficient") == 0:
        log.info("%s is left out: no advantage moves its policy", name)
        return None
    if estimator.needs_values and critic is None:
        log.info("%s is left out: it needs a critic, which the run has not", name)
        return None
    if estimator.needs_states and not bool((batch.episodes.state >= 0).any()):
        log.info("%s is left out: it needs state_key(), which the environment has not", name)
        return None
    says_success = bool((batch.episodes.success >= 0).any())
    if estimator.needs_success and not says_success:
        log.info("%s is left out: it needs success, which the environment does not report", name)
        return None
    if estimator.needs_potentials and not bool(batch.episodes.final_potential.isfinite().any()):
        log.info("%s is left out: it needs potential(), which the environment has not", name)
        return None
    if masks.observations or masks.importance is not None or masks.top_entropy < 1:
        log.info("%s is left out: its masks need more than the sampled tokens", name)
        return None
    layout = CreditLayout.of(batch)
    token_masks = compute_token_masks(batch, layout, masks, kl=None)
    estimates = assign_credit(
        batch,
        layout,
        token_masks,
        estimator,
        whiten_advantages=False,
        normalizers=[normalizer] if normalizer else [],
    )
    turn = torch.where(token_masks.loss, layout.turn, -1)
    means = []
    for effect in effects:
        of_turn = estimates.advantages[effect.episode][turn[effect.episode] == effect.turn].double()
        # a turn may have no trained token
        means.append(float(of_turn.mean()) if len(of_turn) else 0.0)
    return means


def compared(
    effects: Sequence[TurnEffect], advantages: Mapping[str, Sequence[float]], *, seed: int
) -> Audit:
    """Compare advantages of turns with their effects, the turns of a group as one in the bootstrap.

    Args:
        effects: Effects of turns.
        advantages: Advantages of these turns by the name of the algorithm.
        seed: Seed of the bootstrap and of the advantages by chance.
    """
    random = np.random.default_rng(derive_seed(seed, "audit", "bootstrap"))
    effect = np.array([one.effect for one in effects])
    noise = np.array([one.variance for one in effects])
    groups = np.array([one.group for one in effects])
    variance = effect.var()
    reliability = max(0.0, 1 - noise.mean() / variance) if variance > 0 else 0.0
    of_group = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    drawn = [
        np.concatenate(
            [of_group[number] for number in random.integers(0, len(of_group), len(of_group))]
        )
        for _ in range(_RESAMPLES)
    ]
    named = {name: np.array(values) for name, values in advantages.items()}
    by_chance = random.normal(size=len(effects))
    agreements = {
        name: _agreement(values, effect, drawn, reliability=reliability)
        for name, values in named.items()
    }
    ordered = dict(sorted(agreements.items(), key=lambda item: -item[1].correlation))
    ordered[CHANCE] = _agreement(by_chance, effect, drawn, reliability=reliability)
    return Audit(
        effects=list(effects),
        advantages={name: list(map(float, values)) for name, values in named.items()},
        agreements=ordered,
        reliability=reliability,
    )


def _agreement(
    advantages: np.ndarray, effects: np.ndarray, drawn: Sequence[np.ndarray], *, reliability: float
) -> Agreement:
    correlation = _correlation(advantages, effects)
    resampled = [_correlation(advantages[rows], effects[rows]) for rows in drawn]
    low, high = np.quantile(resampled, [0.025, 0.975])
    exact = float(np.clip(correlation / np.sqrt(reliability), -1, 1)) if reliability else math.nan
    square = min(exact**2, 1 - 1e-12)
    return Agreement(
        correlation=correlation,
        low=float(low),
        high=float(high),
        exact=exact,
        signal_to_noise=square / (1 - square),
    )


def _correlation(values: np.ndarray, others: np.ndarray) -> float:
    """Return Pearson's correlation, 0 where one of them does not vary."""
    if np.ptp(values) == 0 or np.ptp(others) == 0:
        return 0.0
    return float(np.corrcoef(values, others)[0, 1])


def _print(found: Audit, cfg: DictConfig) -> None:
    console = wide_console(_LOG_WIDTH)
    table = Table(
        title=f"Advantages of {len(found.effects)} turns beside their effects", title_justify="left"
    )
    table.add_column("algorithm")
    for name in ("correlation", "95% interval", "without noise of the effects", "signal to noise"):
        table.add_column(name, justify="right")
    for name, one in found.agreements.items():
        table.add_row(
            name,
            f"{one.correlation:.3f}",
            f"{one.low:.3f} to {one.high:.3f}",
            f"{one.exact:.3f}",
            f"{one.signal_to_noise:.3f}",
        )
    console.print(table)
    if not found.reliability:
        log.warning(
            "the effects of the turns differ by no more than their noise; audit a policy half-way through its training"
        )
    console.print(
        f"Effects from {cfg.continuations} continuations of each state; {found.reliability:.0%} of their variance is "
        "not noise.",
        highlight=False,
    )


def _write(found: Audit, folder: Path, *, about: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        **about,
        "turns": len(found.effects),
        "reliability": found.reliability,
        "algorithms": {name: asdict(one) for name, one in found.agreements.items()},
    }
    with atomic_write(folder / _FIGURES) as file:
        file.write_text(json_text(figures, indent=1) + "\n")
    lines = [
        json.dumps(
            {
                **asdict(effect),
                "advantages": {name: values[row] for name, values in found.advantages.items()},
            }
        )
        for row, effect in enumerate(found.effects)
    ]
    with atomic_write(folder / _TURNS) as file:
        file.write_text("\n".join(lines) + "\n")
