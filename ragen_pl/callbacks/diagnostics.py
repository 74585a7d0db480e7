"""The readings that explain a run, logged as `diagnostics/…`; `docs/diagnostics.md` teaches to read them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import MLFlowLogger

from ragen_pl.callbacks.cross_scoring import cross_score, first_thoughts
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.metrics.diversity import ResponseDiversity
from ragen_pl.metrics.probes import ReasoningProbe, probe_reasoning
from ragen_pl.metrics.sums import ratio
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.trajectory import Trajectory

log = logging.getLogger(__name__)

# Readings that are also told as a ratio to their mean over the first iterations, where that mean is at least
# this: a share of noise says nothing.
_COMPARED = {
    "deviation": 1e-3,
    "entropy": 1e-3,
    "think_tokens": 1.0,
    "distinct_responses": 1e-3,
    "mutual_information_share": 0.1,
    "true_thoughts": 0.1,
}
# What is compared to its first reading alone: a probe is rare, and thoughts may turn false within five iterations.
_FIRST_ALONE = ("mutual_information_share", "true_thoughts")


class Diagnostics(RolloutCallback):
    """Take an iteration's readings and log them at its end.

    It draws no random number and changes no weight: a run with it is bit for bit the run without.

    Args:
        probe_every_n_iterations: iterations from one cross-scoring of first thoughts to the next.
        prompts: N of the probes, at most one a group; N² short sequences are scored. 0 for no probes.
        first: iterations that ratios compare to.
        window: earlier iterations whose median gradient norm a spike is measured against.
    """

    def __init__(
        self,
        *,
        probe_every_n_iterations: int = 10,
        prompts: int = 16,
        first: int = 5,
        window: int = 10,
    ) -> None:
        for name, value, least in (
            ("probe_every_n_iterations", probe_every_n_iterations, 1),
            ("prompts", prompts, 0), ("first", first, 1), ("window", window, 2),
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"diagnostics.{name}={value}: expected at least {least}")
        self.probe_every_n_iterations, self.prompts = probe_every_n_iterations, prompts
        self.first, self.window = first, window
        self.readings: dict[str, float] = {}  # taken of this iteration
        self._known: dict[str, float] = {}  # the last of each, which is what is logged
        self._rollout: dict[str, float] = {}  # of the iteration under way
        self._firsts: dict[str, list[float]] = {name: [] for name in _COMPARED}
        self._norms: dict[str, list[float]] = {}

    def on_rollout_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        trajectories: Sequence[Trajectory],
    ) -> None:
        """Read the iteration's trajectories; all ranks do."""
        diversity = ResponseDiversity().to(pl_module.device)
        diversity.update(trajectories)
        self._rollout = diversity.compute()
        if self.prompts and trainer.current_epoch % self.probe_every_n_iterations == 0:
            probe = self._probe(trainer, pl_module, trajectories)
            if probe is not None:
                self._rollout |= probe.metrics()
                self._tell(trainer, probe)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Complete the readings and log them."""
        metrics = getattr(getattr(trainer, "datamodule", None), "metrics", {})
        self.readings = self._rollout | _of_rollout(metrics) | self._gradients(pl_module)
        self.readings |= self._ratios()
        # all that was ever read is logged, so that what a run shows at last does not depend on where it was resumed
        gone = {name: 0.0 for name in self._known if name.startswith("action/")}
        self._known |= gone | self.readings
        figures = {f"diagnostics/{name}": value for name, value in self._known.items()}
        figures["step"] = float(trainer.current_epoch + 1)
        pl_module.log_dict(figures, rank_zero_only=False)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to take the same readings."""
        return {
            "readings": dict(self.readings),
            "known": dict(self._known),
            "rollout": dict(self._rollout),
            "firsts": {name: list(values) for name, values in self._firsts.items()},
            "norms": {name: list(values) for name, values in self._norms.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.readings, self._known = dict(state_dict["readings"]), dict(state_dict["known"])
        self._rollout = dict(state_dict["rollout"])
        self._firsts = {name: list(values) for name, values in state_dict["firsts"].items()}
        self._norms = {name: list(values) for name, values in state_dict["norms"].items()}

    def _probe(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        trajectories: Sequence[Trajectory],
    ) -> ReasoningProbe | None:
        policy = getattr(pl_module, "policy", None)
        thoughts = first_thoughts(trajectories, count=self.prompts)
        if not isinstance(policy, PolicyModule) or len(thoughts) < 2:
            return None
        with trainer.precision_plugin.forward_context():
            scores, tokens = cross_score(policy, thoughts)
        return probe_reasoning(scores, tokens)

    def _tell(self, trainer: pl.Trainer, probe: ReasoningProbe) -> None:
        if not trainer.is_global_zero:
            return
        log.info("iteration %d, first reasoning: %s", trainer.current_epoch + 1, probe)
        for logger in trainer.loggers:
            if isinstance(logger, MLFlowLogger):
                logger.experiment.set_tag(logger.run_id, "diagnostics.regime", str(probe.regime()))

    def _gradients(self, pl_module: pl.LightningModule) -> dict[str, float]:
        """Return each parameter group's largest norm of the update, and how it stands out of the last ones."""
        readings: dict[str, float] = {}
        norms: Mapping[str, float] = getattr(pl_module, "gradient_norms", {})
        for group, norm in norms.items():
            earlier = self._norms.setdefault(group, [])
            readings[f"gradient_norm_{group}"] = norm
            if len(earlier) >= 2:
                readings[f"gradient_spike_{group}"] = ratio(norm, median(earlier))
            earlier.append(norm)
            del earlier[: -self.window]
        spikes = [value for name, value in readings.items() if "spike" in name]
        return readings | ({"gradient_spike": max(spikes)} if spikes else {})

    def _ratios(self) -> dict[str, float]:
        """Return readings as shares of their mean over the first iterations, once those are over."""
        ratios: dict[str, float] = {}
        for name in _COMPARED:
            known = self._firsts[name]
            if name not in self.readings:
                continue
            if len(known) < (1 if name in _FIRST_ALONE else self.first):
                known.append(self.readings[name])
            elif fmean(known) >= _COMPARED[name]:
                ratios[f"{name}_ratio"] = self.readings[name] / fmean(known)
        return ratios


def _of_rollout(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what the iteration's own metrics say; deviation within groups, or over all where groups are single."""
    names = {
        "success": "success", "return": "return_mean", "entropy": "entropy", "think_tokens": "think_tokens",
        "valid_actions": "valid_actions", "true_thoughts": "true_thoughts",
    }  # fmt: skip
    readings = {told: metrics[name] for name, told in names.items() if name in metrics}
    deviation = metrics.get("group_return_std", metrics.get("return_std"))
    return readings if deviation is None else readings | {"deviation": deviation}
