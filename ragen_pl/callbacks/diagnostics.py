"""Diagnostics that explain a run, logged as `diagnostics/...`; `docs/diagnostics.md` explains how to read them.

Each module that computes diagnostics declares their names in its `DIAGNOSTICS`. The config collects these
constants, so an alarm may watch any of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Annotated, Any, Final

import lightning.pytorch as pl
from annotated_types import Ge

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, CountOrZero
from ragen_pl.callbacks.access import agent_of, mlflow_loggers, rollout_metrics_of
from ragen_pl.callbacks.reasoning_probe import (
    ReasoningProbe,
    cross_score,
    first_thoughts,
    probe_reasoning,
)
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.metrics.diversity import MAX_ACTIONS, ResponseDiversity
from ragen_pl.metrics.rollout import DIAGNOSTICS as ROLLOUT_DIAGNOSTICS
from ragen_pl.trajectory import Trajectory

log = logging.getLogger(__name__)

DIAGNOSTICS: Final = (
    "deviation",
    "gradient_norm_*",
    "gradient_spike",
    "gradient_spike_*",
    "deviation_ratio",
    "entropy_ratio",
    "think_tokens_ratio",
    "distinct_responses_ratio",
    "mutual_information_share_ratio",
    "think_accuracy_ratio",
)
"""Names of the diagnostics of this module. The config reads this constant without importing the module."""

# Diagnostics with a ratio to their mean over the first iterations, and the smallest mean that a ratio makes
# sense for.
_COMPARED = {
    "deviation": 1e-3,
    "entropy": 1e-3,
    "think_tokens": 1.0,
    "distinct_responses": 1e-3,
    "mutual_information_share": 0.1,
    "think_accuracy": 0.1,
}
# Diagnostics compared with their first value alone: a probe is rare, and thoughts may turn false within five
# iterations.
_COMPARED_WITH_FIRST = ("mutual_information_share", "think_accuracy")


class Diagnostics(RolloutCallback):
    """Compute an iteration's diagnostics and log them at its end.

    It draws no random number and changes no weight: a run with it is bit for bit the run without.

    Args:
        probe_every_n_iterations: Iterations between two cross-scorings of first thoughts.
        prompts: Number N of prompts of a probe, at most one a group; N² short sequences are scored. 0 for
            no probes.
        first: Number of first iterations that ratios compare with.
        window: Number of earlier iterations whose median gradient norm a spike is measured against.
    """

    needs_trust = ()

    @checked
    def __init__(
        self,
        *,
        probe_every_n_iterations: Count = 10,
        prompts: CountOrZero = 16,
        first: Count = 5,
        window: Annotated[int, Ge(2)] = 10,
    ) -> None:
        self.probe_every_n_iterations, self.prompts = probe_every_n_iterations, prompts
        self.first, self.window = first, window
        # Diagnostics of the iteration that just ended.
        self.values: dict[str, float] = {}
        # The latest value of each diagnostic, which is what is logged.
        self._latest: dict[str, float] = {}
        # Diagnostics of the current iteration's rollout.
        self._rollout: dict[str, float] = {}
        self._firsts: dict[str, list[float]] = {name: [] for name in _COMPARED}
        self._norms: dict[str, list[float]] = {}
        # whether there were too many actions for a metric each, such as free texts
        self._has_many_actions = False

    def on_rollout_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        trajectories: Sequence[Trajectory],
    ) -> None:
        """Compute the diagnostics of the iteration's trajectories, on all ranks."""
        diversity = ResponseDiversity().to(pl_module.device)
        diversity.update(trajectories)
        self._rollout = diversity.compute()
        if self.prompts and trainer.current_epoch % self.probe_every_n_iterations == 0:
            probe = self._probe(trainer, pl_module, trajectories)
            if probe is not None:
                self._rollout |= probe.metrics()
                self._report(trainer, probe)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Complete the diagnostics and log them."""
        metrics = rollout_metrics_of(trainer)
        self.values = self._rollout | _rollout_diagnostics(metrics) | self._gradients(pl_module)
        agent = agent_of(pl_module)
        if "entropy" not in self.values and agent is not None:
            self.values["entropy"] = agent.preparation.compute()["policy_entropy"]
        self.values |= self._ratios()
        # Every diagnostic ever computed is logged: a resumed run ends with the same metrics as the whole run.
        actions = sorted(name for name in self._latest | self.values if name.startswith("action/"))
        is_hidden = "action_entropy" in self.values and not self.values.keys() & set(actions)
        self._has_many_actions |= is_hidden or len(actions) > MAX_ACTIONS
        self._latest |= dict.fromkeys(actions, 0.0) | self.values
        for name in actions if self._has_many_actions else ():
            del self._latest[name]
            trainer.callback_metrics.pop(f"diagnostics/{name}", None)
        logged = {f"diagnostics/{name}": value for name, value in self._latest.items()}
        logged["step"] = float(trainer.current_epoch + 1)
        pl_module.log_dict(logged, rank_zero_only=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to compute the same diagnostics."""
        return {
            "readings": dict(self.values),
            "latest": dict(self._latest),
            "rollout": dict(self._rollout),
            "firsts": {name: list(values) for name, values in self._firsts.items()},
            "norms": {name: list(values) for name, values in self._norms.items()},
            "has_many_actions": self._has_many_actions,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.values, self._latest = dict(state_dict["readings"]), dict(state_dict["latest"])
        self._rollout = dict(state_dict["rollout"])
        self._firsts = {name: list(values) for name, values in state_dict["firsts"].items()}
        self._norms = {name: list(values) for name, values in state_dict["norms"].items()}
        # none in a checkpoint of an earlier version
        self._has_many_actions = state_dict.get("has_many_actions", False)

    def _probe(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        trajectories: Sequence[Trajectory],
    ) -> ReasoningProbe | None:
        thoughts = first_thoughts(trajectories, count=self.prompts)
        agent = agent_of(pl_module)
        if agent is None or len(thoughts) < 2:
            return None
        with trainer.precision_plugin.forward_context():
            scores, tokens = cross_score(agent.policy, thoughts)
        return probe_reasoning(scores, tokens)

    def _report(self, trainer: pl.Trainer, probe: ReasoningProbe) -> None:
        if not trainer.is_global_zero:
            return
        iteration = trainer.current_epoch + 1
        log.info("iteration %d: the thoughts of first turns %s", iteration, probe.in_words())
        for logger in mlflow_loggers(trainer):
            logger.experiment.set_tag(logger.run_id, "diagnostics.regime", str(probe.regime()))

    def _gradients(self, pl_module: pl.LightningModule) -> dict[str, float]:
        """Return each parameter group's largest gradient norm and its ratio to the recent median.

        A norm that is not finite is infinitely large, and no later one is compared with it.
        """
        agent = agent_of(pl_module)
        norms = {} if agent is None else agent.gradient_norms
        values: dict[str, float] = {}
        spikes = []
        for group, norm in norms.items():
            earlier = self._norms.setdefault(group, [])
            values[f"gradient_norm_{group}"] = norm
            if not math.isfinite(norm):
                spikes.append(math.inf)
                values[f"gradient_spike_{group}"] = math.inf
                continue
            if len(earlier) >= 2 and median(earlier) > 0:
                spikes.append(norm / median(earlier))
                values[f"gradient_spike_{group}"] = spikes[-1]
            earlier.append(norm)
            del earlier[: -self.window]
        return values | ({"gradient_spike": max(spikes)} if spikes else {})

    def _ratios(self) -> dict[str, float]:
        """Return diagnostics as ratios to their mean over the first iterations, once these are over."""
        ratios: dict[str, float] = {}
        for name, smallest in _COMPARED.items():
            if name not in self.values:
                continue
            firsts = self._firsts[name]
            if len(firsts) < (1 if name in _COMPARED_WITH_FIRST else self.first):
                if math.isfinite(self.values[name]):
                    firsts.append(self.values[name])
            elif fmean(firsts) >= smallest:
                ratios[f"{name}_ratio"] = self.values[name] / fmean(firsts)
        return ratios


def _rollout_diagnostics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the diagnostics of the rollout's metrics; deviation is over all episodes if groups are single."""
    values = {name: metrics[name] for name in ROLLOUT_DIAGNOSTICS if name in metrics}
    deviation = metrics.get("group_return_std", metrics.get("return_std"))
    return values if deviation is None else values | {"deviation": deviation}
