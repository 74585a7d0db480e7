"""KeepValidations: keep how each episode of every validation ended, with what the run had cost until then."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from ragen_pl.base.distributed import exchanged, sum_over_ranks
from ragen_pl.callbacks.access import run_folder
from ragen_pl.data.validation import ValidationChunk
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.trajectory import Trajectory
from ragen_pl.viewing.validations import SCHEMA, Outcome, drop_later, outcome_of, write_validation


class KeepValidations(RolloutCallback):
    """Write `<run>/validations/<validation set>/iteration_<n>.json` of every validation, for `ragen_pl.compare`.

    A file has about 170 bytes an episode. It holds what learning had cost too: sampled episodes and tokens, seconds and
    processor seconds of all ranks, without validations. Checkpoints hold these sums. What a killed run did after its
    last checkpoint is not counted.
    """

    needs_trust = ()

    def __init__(self) -> None:
        # over all ranks: episodes, response tokens, processor seconds
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._seconds = 0.0
        # where this process's clocks were when its time was added up last; None outside of learning
        self._marks: tuple[float, float] | None = None
        self._outcomes: dict[str, list[Outcome]] = defaultdict(list)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clocks, and drop the validations of weights after the checkpoint that the run goes on from."""
        if trainer.is_global_zero:
            drop_later(run_folder(trainer), iteration=trainer.current_epoch)
        self._start()

    def on_rollout_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        trajectories: Sequence[Trajectory],
    ) -> None:
        """Count what was sampled."""
        tokens = sum(len(turn.response_ids) for one in trajectories for turn in one.turns)
        self._sums += sum_over_ranks(
            torch.tensor([len(trajectories), tokens, 0], dtype=torch.float64)
        )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add up the time of the iteration, before a checkpoint is written."""
        self._stop()
        self._start()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clocks, and forget the episodes of another validation."""
        self._stop()
        self._outcomes.clear()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep how the episodes ended."""
        if isinstance(batch, ValidationChunk) and isinstance(outputs, Mapping):
            played = outputs.get("trajectories", ())
            self._outcomes[batch.validation_set.name] += map(outcome_of, played)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file of each validation set, on rank 0, and start the clocks again."""
        # of other ranks
        outcomes = {} if trainer.is_global_zero else {0: dict(self._outcomes)}
        every = [dict(self._outcomes), *exchanged(outcomes)]
        self._outcomes.clear()
        if trainer.is_global_zero and not trainer.sanity_checking:
            for name in every[0]:
                episodes = [outcome for part in every for outcome in part.get(name, ())]
                episodes.sort(key=lambda one: (one["group"], one["member"]))
                write_validation(
                    {
                        "schema": SCHEMA,
                        "iteration": trainer.fit_loop.epoch_progress.current.ready,
                        "validation_set": name,
                        "cost": {
                            "episodes": round(float(self._sums[0])),
                            "response_tokens": round(float(self._sums[1])),
                            "seconds": self._seconds,
                            "processor_seconds": float(self._sums[2]),
                        },
                        "episodes": episodes,
                    },
                    run_folder(trainer),
                )
        if trainer.state.fn == TrainerFn.FITTING:
            self._start()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clocks."""
        self._stop()

    def _start(self) -> None:
        self._marks = time.perf_counter(), time.process_time()

    def _stop(self) -> None:
        """Add up the time since the clocks were started. All ranks must call it."""
        if self._marks is None:
            return
        seconds, processor = self._marks
        self._seconds += time.perf_counter() - seconds
        spent = torch.tensor([0, 0, time.process_time() - processor], dtype=torch.float64)
        self._sums += sum_over_ranks(spent)
        self._marks = None

    # ---- resume

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far, with the time until now. All ranks must call it."""
        if self._marks is not None:
            self._stop()
            self._start()
        return {"sums": self._sums.tolist(), "seconds": self._seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self._sums = torch.tensor(state_dict["sums"], dtype=torch.float64)
        self._seconds = state_dict["seconds"]
