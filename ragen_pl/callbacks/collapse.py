"""CollapseMonitor: watches the diagnostics, warns early and, where asked to, stops, rolls back or mitigates."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import MLFlowLogger

from ragen_pl.callbacks.alarms import Alarm
from ragen_pl.callbacks.checkpoint import BestCheckpoint
from ragen_pl.callbacks.diagnostics import Diagnostics
from ragen_pl.callbacks.mitigation import Mitigation

log = logging.getLogger(__name__)

GOOD, EVENTS = "good.ckpt", "collapse.jsonl"


class Action(StrEnum):
    """What to do when an alarm trips; a warning is given in any case."""

    WARN = "warn"
    STOP = "stop"
    ROLLBACK = "rollback"
    MITIGATE = "mitigate"


class CollapseMonitor(pl.Callback):
    """Act when a reading passes its limit.

    What happened is kept in `collapse.jsonl` in the run's folder, as a metric (`collapse/events`), a tag
    and an artifact in MLflow, and in checkpoints: a resumed run goes on with what was switched.

    Args:
        alarms: by name.
        actions: what to do, besides warning.
        mitigation: settings that `mitigate` switches to, once.
        grace: first iterations without alarms.
        cooldown: iterations after an action without alarms.
        good_every_n_iterations: how often a state without any alarm is kept for `rollback`.
        max_rollbacks: rollbacks after which the run is stopped instead.
    """

    def __init__(
        self,
        *,
        alarms: Mapping[str, Alarm],
        actions: Sequence[Action | str] = (Action.WARN,),
        mitigation: Mitigation | None = None,
        grace: int = 2,
        cooldown: int = 5,
        good_every_n_iterations: int = 5,
        max_rollbacks: int = 3,
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
        self.good: int | None = None  # iteration of the kept state

    # ---- Lightning's hooks

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the readings, refuse what the run has no place for, take up a mitigation again."""
        before = trainer.callbacks[: trainer.callbacks.index(self)]  # type: ignore[attr-defined]
        if not any(isinstance(callback, Diagnostics) for callback in before):
            raise ValueError(
                "CollapseMonitor reads what Diagnostics takes: put callbacks.diagnostics before it"
            )
        if Action.MITIGATE in self.actions:
            self.mitigation.check(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch on again what had been, in a resumed run."""
        if self.mitigated:
            self.mitigation.switch_on(trainer, pl_module)
            if self.mitigation.entropy_target is not None:
                adjust: Any = pl_module
                adjust.adjust_loss(entropy_coefficient=self.entropy_coefficient)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hold the iteration's readings against the alarms and act."""
        readings, iteration = _readings(trainer), trainer.current_epoch + 1
        if self.mitigated and "entropy" in readings:
            self.entropy_coefficient = self.mitigation.steer(
                pl_module, entropy=readings["entropy"], coefficient=self.entropy_coefficient
            )
        holding = [name for name, alarm in self.alarms.items() if alarm.holds(readings)]
        tripped = self._count(holding, readings, quiet=iteration <= self.quiet_until)
        # what ranks do together they must agree on, whatever the last bit of a reading is on each
        tripped, holding, readings = trainer.strategy.broadcast((tripped, holding, readings))
        if tripped:
            self._act(trainer, pl_module, tripped, readings=readings, iteration=iteration)
        elif not holding and (iteration % self.good_every_n_iterations == 0 or self.good is None):
            self._keep(trainer, iteration)
        metrics = {"collapse/events": float(len(self.events)), "step": float(iteration)}
        pl_module.log_dict(metrics, rank_zero_only=False)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        names = ("counts", "events", "quiet_until", "mitigated", "entropy_coefficient", "rollbacks")
        state = {name: getattr(self, name) for name in (*names, "good")}
        return json.loads(json.dumps(state))  # a copy: the run goes on while it is written

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`; an alarm that is new starts from 0."""
        known = dict(state_dict)
        self.counts |= {
            name: count for name, count in known.pop("counts").items() if name in self.counts
        }
        for name, value in known.items():
            setattr(self, name, value)

    # ---- acting

    def _count(
        self, holding: Collection[str], readings: Mapping[str, float], *, quiet: bool
    ) -> list[str]:
        """Count iterations in a row by alarm and return the alarms whose patience is over."""
        for name, alarm in self.alarms.items():
            if quiet:
                self.counts[name] = 0
            elif alarm.reading in readings:  # probes are not taken every iteration
                self.counts[name] = self.counts[name] + 1 if name in holding else 0
        return [name for name in holding if self.counts[name] >= self.alarms[name].patience]

    def _act(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        tripped: Sequence[str],
        *,
        readings: Mapping[str, float],
        iteration: int,
    ) -> None:
        done = []
        if Action.ROLLBACK in self.actions:
            done.append(self._roll_back(trainer))
        if Action.MITIGATE in self.actions and not self.mitigated:
            settings: Any = pl_module
            self.entropy_coefficient = float(settings.loss.entropy_coefficient)
            changed = self.mitigation.switch_on(trainer, pl_module)
            changed |= self.mitigation.slow_down(trainer)
            self.mitigated = True
            told = ", ".join(f"{name} {change}" for name, change in changed.items())
            done.append(f"switched {told}" if told else "found all settings as they were to be")
        if Action.STOP in self.actions:
            trainer.should_stop = True
            done.append("stopped the run")
        self.quiet_until = iteration + self.cooldown
        self.counts = dict.fromkeys(self.alarms, 0)
        told = "; ".join(
            f"{name}: {self.alarms[name].told(readings[self.alarms[name].reading])}"
            for name in tripped
        )
        values = {
            self.alarms[name].reading: readings[self.alarms[name].reading] for name in tripped
        }
        event = {
            "iteration": iteration,
            "alarms": list(tripped),
            "readings": values,
            "told": told,
            "done": done or ["warned"],
        }
        self.events.append(event)
        self._publish(trainer, event)

    def _keep(self, trainer: pl.Trainer, iteration: int) -> None:
        """Keep the present state as the last good one. All ranks take part in writing it."""
        if Action.ROLLBACK in self.actions:
            self.good = iteration
            trainer.save_checkpoint(self._file(trainer, GOOD))

    def _roll_back(self, trainer: pl.Trainer) -> str:
        """Load weights and optimizer of the last good state; the iteration's number goes on."""
        file, strategy = self._file(trainer, GOOD), trainer.strategy
        if not strategy.broadcast(self.good is not None and file.exists()):
            return "found no good state to roll back to"
        if self.rollbacks >= self.max_rollbacks:
            trainer.should_stop = True
            return f"stopped the run after {self.rollbacks} rollbacks"
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = [
            group["lr"] for group in groups
        ]  # as the schedule, and a mitigation, have them now
        checkpoint = strategy.load_checkpoint(file, weights_only=False)
        strategy.load_model_state_dict(checkpoint, strict=True)
        strategy.load_optimizer_state_dict(checkpoint)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BestCheckpoint):
                callback.forget()  # what was validated is gone
        self.rollbacks += 1
        return f"rolled weights and optimizer back to iteration {self.good}"

    def _file(self, trainer: pl.Trainer, name: str) -> Path:
        return Path(str(trainer.strategy.broadcast(str(trainer.default_root_dir)))) / name

    def _publish(self, trainer: pl.Trainer, event: Mapping[str, Any]) -> None:
        """Warn, and write the event down in the run's folder and in MLflow."""
        if not trainer.is_global_zero:
            return
        done = ", ".join(event["done"])
        log.warning("iteration %d, collapse? %s (%s)", event["iteration"], event["told"], done)
        file = Path(str(trainer.default_root_dir)) / EVENTS
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(one) + "\n" for one in self.events))
        for logger in trainer.loggers:
            if isinstance(logger, MLFlowLogger):
                client, run = logger.experiment, logger.run_id
                client.set_tag(
                    run, f"collapse.{event['iteration']}", f"{event['told']} ({done})"[:5000]
                )
                client.log_artifact(run, str(file), "collapse")


def _readings(trainer: pl.Trainer) -> dict[str, float]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next(one.readings for one in callbacks if isinstance(one, Diagnostics))
