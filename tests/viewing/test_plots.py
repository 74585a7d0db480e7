"""Plots of a run: drawn from the rows of its record, which has one an iteration and is continued after a resume."""

from __future__ import annotations

import importlib
import math
import sys
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch.utils.data import DataLoader

from ragen_pl.callbacks.clock import RunClock
from ragen_pl.callbacks.plots import PlotRun
from ragen_pl.callbacks.summary import page_and_plots
from ragen_pl.loops.rollout_update import RolloutUpdate
from ragen_pl.metrics.record import RecordReader
from ragen_pl.metrics.shown import PHASES
from ragen_pl.tracking.loggers import RecordLogger
from ragen_pl.trajectory import Trajectory
from ragen_pl.viewing.plots import draw_plots, stage_starts


class Data(pl.LightningDataModule):
    """DataModule whose rollouts are played at once."""

    seed = 0

    def __init__(self) -> None:
        super().__init__()
        self.iteration: int | None = None

    def collect(self, iteration, module, *, progress) -> list[Trajectory]:
        self.iteration = iteration
        progress(1, 1)
        return []

    def has_buffer(self, iteration: int) -> bool:
        return self.iteration == iteration

    def drop_buffer(self) -> None:
        self.iteration = None

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(4, 1), batch_size=2)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(2, 1), batch_size=2)


class ScriptedPolicy(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch).mean()

    def on_train_epoch_end(self) -> None:
        iteration = float(self.trainer.current_epoch + 1)
        metrics = {"rollout/success": 0.25, "rollout/episodes": 8.0, "rollout/return": math.nan}
        metrics |= {"rollout/reward/form": 0.5, "update/approx_kl": 0.01 * iteration}
        self.log_dict(metrics | {"other": 1.0, "step": iteration})

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        step = float(self.trainer.fit_loop.epoch_progress.current.ready)
        self.log_dict({"val/success": 0.75, "val/episodes": 400.0, "step": step})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(folder: Path, **settings: object) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", enable_model_summary=False, enable_progress_bar=False,
        logger=RecordLogger(run_dir=str(folder)), default_root_dir=folder, num_sanity_val_steps=0,
        check_val_every_n_epoch=2, callbacks=[
            RunClock(), RolloutUpdate(validate_first=False), PlotRun(),
            pl.callbacks.ModelCheckpoint(folder / "kept", save_last=True),
        ], **settings,
    )  # fmt: skip


def rows_in(folder: Path) -> list[dict[str, float]]:
    return RecordReader(folder).rows()


def test_run_has_a_row_an_iteration_and_draws_at_its_end(tmp_path: Path) -> None:
    fitted = trainer(tmp_path, max_epochs=3)
    fitted.fit(ScriptedPolicy(), datamodule=Data())
    rows = rows_in(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    # the last weights are validated at any interval
    assert [row.get("val/success") for row in rows] == [None, 0.75, 0.75]
    assert rows[0]["rollout/success"] == 0.25 and "rollout/return" not in rows[0]
    assert rows[0]["rollout/reward/form"] == 0.5
    assert [row["update/approx_kl"] for row in rows] == pytest.approx([0.01, 0.02, 0.03])
    assert set(rows[1]) >= {"time/rollout_s", "time/update_s", "time/validation_s"}
    seconds = [
        sum(value for name, value in row.items() if name.startswith("time/")) for row in rows
    ]
    assert rows[-1]["elapsed_s"] == pytest.approx(sum(seconds))
    names = {file.name for file in (tmp_path / "plots").iterdir()}
    assert names == {"learning_by_iteration.png", "learning_by_time.png", "time_by_phase.png"}
    assert page_and_plots(tmp_path) == {"plots": str(tmp_path / "plots")}


def test_resumed_run_continues_the_curves(tmp_path: Path) -> None:
    trainer(tmp_path, max_epochs=2).fit(ScriptedPolicy(), datamodule=Data())
    before = rows_in(tmp_path)
    again = trainer(tmp_path, max_epochs=4)
    again.fit(ScriptedPolicy(), datamodule=Data(), ckpt_path=str(tmp_path / "kept" / "last.ckpt"))
    rows = rows_in(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4] and rows[0] == before[0]
    # the checkpoint was written at the end of the second iteration's validation
    assert rows[1]["val/success"] == 0.75 and rows[1]["time/update_s"] == before[1]["time/update_s"]
    elapsed = [row["elapsed_s"] for row in rows]
    assert elapsed == sorted(elapsed)


def test_plots_need_a_record(tmp_path: Path) -> None:
    alone = pl.Trainer(accelerator="cpu", logger=False, callbacks=[PlotRun()], max_epochs=1)
    with pytest.raises(ValueError, match=r"give the Trainer a logger .*RecordLogger"):
        alone.fit(ScriptedPolicy(), datamodule=Data())


def test_many_rows_are_one_shape_of_each_phase(tmp_path: Path) -> None:
    times = {f"time/{phase}_s": 1.0 for phase in PHASES}
    rows = [{"iteration": float(n), "elapsed_s": n, **times} for n in range(1, 5001)]
    figures = []
    original = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Figure,
            "savefig",
            lambda figure, *a, **k: (figures.append(figure), original(figure, *a, **k)),
        )
        draw_plots(rows, tmp_path, title="long")
    assert [len(figure.axes[0].patches) for figure in figures] == [len(PHASES)]


def test_plots_are_drawn_from_rows(tmp_path: Path) -> None:
    row = {"iteration": 1.0, "elapsed_s": 60.0, "val/success": 0.5, "val/episodes": 64.0}
    (first, second) = draw_plots([row, row | {"iteration": 2.0}], tmp_path, title="a $run_1")
    for file in (first, second):
        with Image.open(file) as image:
            assert image.width > 600
    assert draw_plots([], tmp_path / "none", title="t") == []


def test_stages_of_the_curriculum_are_marked(tmp_path: Path) -> None:
    rows = [
        {"iteration": float(n), "elapsed_s": 60.0 * n, "rollout/success": 0.5, "rollout/curriculum_stage": stage}
        for n, stage in enumerate((0, 0, 1, 1, 2))
    ]  # fmt: skip
    assert [(row["iteration"], stage) for row, stage in stage_starts(rows)] == [(2, 1), (4, 2)]

    def colored(drawn: list[dict[str, float]], name: str) -> int:
        (file, _) = draw_plots(drawn, tmp_path / name, title="t")
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB")).astype(int).reshape(-1, 3)
        # lines of a pixel are blended with the background
        return int((np.abs(pixels - (0x8A, 0x5A, 0xA8)).max(axis=1) < 30).sum())

    unmarked = [row | {"rollout/curriculum_stage": 0} for row in rows]
    assert colored(unmarked, "none") == 0
    assert colored(rows, "two") > 1.5 * colored(rows[:3], "one") > 0


def test_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="every_n_iterations=0"):
        PlotRun(every_n_iterations=0)


def test_figures_wait_for_an_import_that_another_thread_makes(tmp_path, monkeypatch):
    # a figure reads the version of IPython, which MLflow imports in its own thread
    (tmp_path / "IPython.py").write_text("import time\ntime.sleep(0.5)\nversion_info = (9, 0)\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "IPython"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    importing = threading.Thread(target=importlib.import_module, args=("IPython",))
    importing.start()
    while "IPython" not in sys.modules:
        time.sleep(0.01)
    try:
        rows = [{"iteration": 1.0, "elapsed_s": 1.0, "rollout/success": 0.5}]
        assert draw_plots(rows, tmp_path, title="run")
    finally:
        importing.join()
        del sys.modules["IPython"]
