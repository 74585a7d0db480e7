"""CollapseMonitor: watches the diagnostics, warns and, if configured, stops, rolls back or mitigates."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import lightning.pytorch as pl

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, CountOrZero, Fraction, declared, shown
from ragen_pl.base.files import atomic_write
from ragen_pl.base.instances import instances
from ragen_pl.base.json_text import json_text
from ragen_pl.base.run_facts import RunFacts
from ragen_pl.callbacks.access import callbacks_of, mlflow_loggers, rollouts_of, run_folder
from ragen_pl.callbacks.diagnostics import Diagnostics
from ragen_pl.callbacks.mitigation import Mitigation
from ragen_pl.loops.rollout_update import rollout_loop
from ragen_pl.modules.agent import AgentModule
from ragen_pl.modules.frozen import with_frozen
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.viewing.plots import EVENTS

log = logging.getLogger(__name__)

GOOD = "good.ckpt"
# Characters that MLflow takes in a tag's value.
_TAG_LENGTH = 5000


@checked
@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A limit on one diagnostic of `Diagnostics`; exactly one of `below` and `above` is given.

    Attributes:
        diagnostic: Name of the diagnostic, without `diagnostics/`.
        below: Lower limit.
        above: Upper limit.
        patience: Number of iterations in a row that must pass the limit.
        max_success: No alarm at a success rate of at least this: the responses of a successful run may become alike.
    """

    needs_trust = ()

    diagnostic: Annotated[str, declared("DIAGNOSTICS")]
    below: float | None = None
    above: float | None = None
    patience: Count = 1
    max_success: Fraction | None = None

    def __post_init__(self) -> None:
        """Check that there is exactly one limit."""
        if (self.below is None) == (self.above is None):
            raise ValueError(
                f"alarm on {self.diagnostic}: found below={shown(self.below)} and above={shown(self.above)}, "
                "expected one of below and above; set the other to null"
            )

    def holds(self, diagnostics: Mapping[str, float]) -> bool:
        """Return whether the limit is passed: never by a missing diagnostic, always by NaN, at any success."""
        value = diagnostics.get(self.diagnostic)
        if value is None:
            return False
        if math.isnan(value):
            return True
        if self.max_success is not None and diagnostics.get("success", 0.0) >= self.max_success:
            return False
        return value < self.below if self.below is not None else value > (self.above or 0.0)

    def describe(self, value: float) -> str:
        """Return the diagnostic's value and the limit as text."""
        limit = f"below {self.below:g}" if self.below is not None else f"above {self.above:g}"
        return f"{self.diagnostic} {value:.4g}, {limit}"


class Action(StrEnum):
    """Response to an alarm, in addition to the warning."""

    WARN = "warn"
    STOP = "stop"
    ROLLBACK = "rollback"
    MITIGATE = "mitigate"


class CollapseMonitor(pl.Callback):
    """Act when a diagnostic passes its limit.

    Events are kept in `collapse.jsonl` in the run's folder, as the metric `collapse/events`, as a tag and an
    artifact in MLflow, and in checkpoints. A resumed run keeps the switched settings.

    Args:
        alarms: Alarms by name; None leaves one out.
        actions: What to do besides warning.
        mitigation: Settings that `mitigate` switches to, once.
        grace: Number of first iterations without alarms.
        cooldown: Number of iterations without alarms after an action.
        good_every_n_iterations: Interval at which a state without any alarm is kept for `rollback`.
        max_rollbacks: Number of rollbacks after which the run is stopped instead.
    """

    needs_trust = ()

    @checked
    def __init__(
        self,
        *,
        alarms: Mapping[str, Alarm | None],
        actions: Sequence[Action] = (Action.WARN,),
        mitigation: Mitigation | None = None,
        grace: CountOrZero = 2,
        cooldown: CountOrZero = 5,
        good_every_n_iterations: Count = 5,
        max_rollbacks: CountOrZero = 3,
    ) -> None:
        self.alarms = {name: alarm for name, alarm in alarms.items() if alarm is not None}
        self.actions = frozenset(Action(action) for action in actions)
        self.mitigation = mitigation or Mitigation()
        self.grace, self.cooldown = grace, cooldown
        self.good_every_n_iterations, self.max_rollbacks = good_every_n_iterations, max_rollbacks
        self.counts = dict.fromkeys(self.alarms, 0)
        self.events: list[dict[str, Any]] = []
        self.quiet_until = grace
        self.mitigated = False
        self.entropy_coefficient = 0.0
        self.rollbacks = 0
        # Iteration of the state kept for a rollback.
        self.good: int | None = None
        # whether this process has written the last good state
        self._is_written = False

    def check_run(self, facts: RunFacts) -> None:
        """Check that the run has the diagnostics and the settings that the mitigation changes."""
        if not instances(facts.callbacks, Diagnostics):
            raise ValueError(
                "callbacks.diagnostics=null: callbacks.collapse reads it; set callbacks.collapse=null too"
            )
        if Action.MITIGATE not in self.actions:
            return
        self.mitigation.check_loss(cast(UpdateLoss, facts.loss))
        group_filter = self.mitigation.group_filter
        if group_filter is not None and group_filter.needs_groups and facts.group_size == 1:
            raise ValueError(
                "rollout.group_size=1: callbacks.collapse.mitigation.group_filter compares the episodes of a group; "
                "set at least 2, or keep all groups"
            )

    # ---- Lightning's hooks

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that the run computes diagnostics and can switch to the mitigation's settings."""
        callbacks = callbacks_of(trainer, pl.Callback)
        before = callbacks[: callbacks.index(self)]
        if not instances(before, Diagnostics):
            raise ValueError(
                "CollapseMonitor reads the values of Diagnostics: put callbacks.diagnostics before it"
            )
        if Action.MITIGATE in self.actions:
            self.mitigation.check(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch the mitigation on again in a resumed run, and drop the events after its checkpoint."""
        if trainer.is_global_zero and (run_folder(trainer) / EVENTS).exists():
            self._write_events(trainer)
        if self.mitigated:
            agent = cast(AgentModule, pl_module)
            self.mitigation.switch_on(trainer, agent)
            if self.mitigation.entropy_target is not None:
                agent.loss.adjust(entropy_coefficient=self.entropy_coefficient)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the iteration's diagnostics with the alarms and act."""
        diagnostics = callbacks_of(trainer, Diagnostics)[0].values
        iteration = trainer.current_epoch + 1
        if self.mitigated and "entropy" in diagnostics:
            self.entropy_coefficient = self.mitigation.steer_entropy(
                cast(AgentModule, pl_module),
                entropy=diagnostics["entropy"],
                coefficient=self.entropy_coefficient,
            )
        holding = [name for name, alarm in self.alarms.items() if alarm.holds(diagnostics)]
        tripped = self._count(holding, diagnostics, quiet=iteration <= self.quiet_until)
        # All ranks act together. Rank 0 decides: a diagnostic's last bit may differ between ranks.
        tripped, holding, diagnostics = trainer.strategy.broadcast((tripped, holding, diagnostics))
        if tripped:
            self._act(trainer, pl_module, tripped, diagnostics=diagnostics, iteration=iteration)
        elif not holding and (iteration % self.good_every_n_iterations == 0 or self.good is None):
            self._keep(trainer, iteration)
        metrics = {"collapse/events": float(len(self.events)), "step": float(iteration)}
        pl_module.log_dict(metrics, rank_zero_only=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a resumed run."""
        state = {
            "counts": self.counts,
            "events": self.events,
            "quiet_until": self.quiet_until,
            "mitigated": self.mitigated,
            "entropy_coefficient": self.entropy_coefficient,
            "rollbacks": self.rollbacks,
            "good": self.good,
        }
        # A deep copy: the run may go on while the checkpoint is written.
        return cast(dict[str, Any], json.loads(json.dumps(state)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`; a new alarm starts from 0."""
        for name, count in state_dict["counts"].items():
            if name in self.counts:
                self.counts[name] = count
        self.events = list(state_dict["events"])
        self.quiet_until = state_dict["quiet_until"]
        self.mitigated = state_dict["mitigated"]
        self.entropy_coefficient = state_dict["entropy_coefficient"]
        self.rollbacks, self.good = state_dict["rollbacks"], state_dict["good"]

    # ---- acting

    def _count(
        self, holding: Collection[str], diagnostics: Mapping[str, float], *, quiet: bool
    ) -> list[str]:
        """Count iterations in a row by alarm and return the alarms that reach their patience."""
        for name, alarm in self.alarms.items():
            if quiet:
                self.counts[name] = 0
            # The diagnostics of a probe are missing in most iterations, which then do not count.
            elif alarm.diagnostic in diagnostics:
                self.counts[name] = self.counts[name] + 1 if name in holding else 0
        return [name for name in holding if self.counts[name] >= self.alarms[name].patience]

    def _act(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        tripped: Sequence[str],
        *,
        diagnostics: Mapping[str, float],
        iteration: int,
    ) -> None:
        done = []
        if Action.ROLLBACK in self.actions:
            done.append(self._roll_back(trainer))
        if Action.MITIGATE in self.actions and not self.mitigated:
            done.append(self._mitigate(trainer, cast(AgentModule, pl_module)))
        if Action.STOP in self.actions:
            trainer.should_stop = True
            done.append("stopped the run")
        self.quiet_until = iteration + self.cooldown
        self.counts = dict.fromkeys(self.alarms, 0)
        alarms = {name: self.alarms[name] for name in tripped}
        values = {alarm.diagnostic: diagnostics[alarm.diagnostic] for alarm in alarms.values()}
        event = {
            "iteration": iteration,
            "alarms": list(alarms),
            "diagnostics": values,
            "message": "; ".join(
                f"{name}: {alarm.describe(values[alarm.diagnostic])}"
                for name, alarm in alarms.items()
            ),
            "done": done or ["warned"],
        }
        self.events.append(event)
        self._publish(trainer, event)

    def _mitigate(self, trainer: pl.Trainer, agent: AgentModule) -> str:
        """Switch to the mitigation's settings and return the changes as text."""
        self.entropy_coefficient = float(agent.loss.entropy_coefficient)
        changes = self.mitigation.switch_on(trainer, agent) | self.mitigation.slow_down(trainer)
        self.mitigated = True
        if not changes:
            return "switched nothing: the settings were in place"
        return "switched " + ", ".join(f"{name} {change}" for name, change in changes.items())

    def _keep(self, trainer: pl.Trainer, iteration: int) -> None:
        """Keep the present state as the last good one; all ranks write it together."""
        if Action.ROLLBACK in self.actions:
            self.good, self._is_written = iteration, True
            trainer.save_checkpoint(_good_checkpoint(trainer))

    def _roll_back(self, trainer: pl.Trainer) -> str:
        """Load weights and optimizer of the last good state; the iteration's number continues."""
        file, strategy = _good_checkpoint(trainer), trainer.strategy
        if not strategy.broadcast(self.good is not None and file.exists()):
            return "found no good state to roll back to"
        if self.rollbacks >= self.max_rollbacks:
            trainer.should_stop = True
            return f"stopped the run after {self.rollbacks} rollbacks"
        # The learning rates stay as the schedule and a mitigation have set them.
        rates = [group["lr"] for group in _parameter_groups(trainer)]
        # a run that is continued may be somebody else's
        checkpoint = strategy.load_checkpoint(file, weights_only=not self._is_written)
        kept = checkpoint["callbacks"].get(self.state_key, {}).get("good")
        if kept != self.good:
            # written after the checkpoint that the run goes on from
            lost, self.good = self.good, None
            return f"found no good state to roll back to: {GOOD} has iteration {kept}, not {lost}"
        module = trainer.lightning_module
        checkpoint["state_dict"] = with_frozen(module, checkpoint["state_dict"])
        strategy.load_model_state_dict(checkpoint, strict=True)
        strategy.load_optimizer_state_dict(checkpoint)
        for group, rate in zip(_parameter_groups(trainer), rates, strict=True):
            group["lr"] = rate
        if (loop := rollout_loop(trainer)) is not None:
            loop.forget_validation()
        if (datamodule := rollouts_of(trainer)) is not None:
            datamodule.drop_ahead()
        self.rollbacks += 1
        return f"rolled weights and optimizer back to iteration {self.good}"

    def _publish(self, trainer: pl.Trainer, event: Mapping[str, Any]) -> None:
        """Log a warning and write the event into the run's folder and MLflow."""
        if not trainer.is_global_zero:
            return
        text = f"{event['message']} ({', '.join(event['done'])})"
        log.warning("iteration %d, collapse? %s", event["iteration"], text)
        file = self._write_events(trainer)
        for logger in mlflow_loggers(trainer):
            client, run = logger.experiment, logger.run_id
            client.set_tag(run, f"collapse.{event['iteration']}", text[:_TAG_LENGTH])
            client.log_artifact(run, str(file), "collapse")

    def _write_events(self, trainer: pl.Trainer) -> Path:
        """Write the events into the run's folder and return the file's path."""
        file = run_folder(trainer) / EVENTS
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as partial:
            partial.write_text("".join(json_text(event) + "\n" for event in self.events))
        return file


def _good_checkpoint(trainer: pl.Trainer) -> Path:
    return Path(trainer.strategy.broadcast(str(run_folder(trainer)))) / GOOD


def _parameter_groups(trainer: pl.Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
