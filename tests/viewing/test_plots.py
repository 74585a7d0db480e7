"""Plots of a run: a row an iteration, drawn at the end, continued after a resume."""

from __future__ import annotations

import importlib
import json
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

from ragen_pl.callbacks.plots import PlotRun, RowsFile
from ragen_pl.callbacks.summary import page_and_plots
from ragen_pl.viewing.plots import PHASES, draw_plots, stage_starts


class Data(pl.LightningDataModule):
    """DataModule with the metrics of its last rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = {
            "success": 0.25,
            "episodes": 8.0,
            "return": float("nan"),
            "reward/form": 0.5,
        }

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(4, 1), batch_size=2)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(2, 1), batch_size=2)


class ScriptedPolicy(pl.LightningModule):
    """Module that reports a rollout to its callbacks before each epoch, as the rollout/update loop does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def on_train_epoch_start(self) -> None:
        for callback in self.trainer.callbacks:
            if isinstance(callback, PlotRun):
                callback.on_rollout_start(self.trainer, self)
                callback.on_rollout_end(self.trainer, self, [])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch).mean()

    def on_train_epoch_end(self) -> None:
        self.log("update/approx_kl", 0.01 * (self.trainer.current_epoch + 1))

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log_dict({"val/success": 0.75, "val/episodes": 400.0})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(folder: Path, plots: PlotRun, **settings: object) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", enable_model_summary=False, enable_progress_bar=False, logger=False,
        default_root_dir=folder, num_sanity_val_steps=0, check_val_every_n_epoch=2,
        callbacks=[plots, pl.callbacks.ModelCheckpoint(folder / "kept", save_last=True)], **settings,
    )  # fmt: skip


def rows_in(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "plots" / "rows.jsonl").read_text().splitlines()]


def test_run_keeps_a_row_an_iteration_and_draws_at_its_end(tmp_path: Path) -> None:
    fitted = trainer(tmp_path, PlotRun(), max_epochs=3)
    fitted.fit(ScriptedPolicy(), datamodule=Data())
    rows = rows_in(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert [row.get("val/success") for row in rows] == [None, 0.75, None]
    # the return is NaN, which JSON does not have
    assert rows[0]["rollout/success"] == 0.25 and rows[0]["rollout/return"] is None
    assert rows[0]["rollout/reward/form"] == 0.5
    assert [row["update/approx_kl"] for row in rows] == pytest.approx([0.01, 0.02, 0.03])
    assert set(rows[1]) >= {"time/rollout_s", "time/update_s", "time/validation_s"}
    seconds = [
        sum(value for name, value in row.items() if name.startswith("time/")) for row in rows
    ]
    assert rows[-1]["elapsed_s"] == pytest.approx(sum(seconds))
    names = {file.name for file in (tmp_path / "plots").glob("*.png")}
    assert names == {"learning_by_iteration.png", "learning_by_time.png", "time_by_phase.png"}
    assert page_and_plots(tmp_path) == {"plots": str(tmp_path / "plots")}
    fitted.validate(fitted.lightning_module, datamodule=Data(), verbose=False)
    # The validation after the fit measures the last weights.
    assert rows_in(tmp_path)[-1]["val/success"] == 0.75


def test_resumed_run_continues_the_curves(tmp_path: Path) -> None:
    trainer(tmp_path, PlotRun(), max_epochs=2).fit(ScriptedPolicy(), datamodule=Data())
    before = rows_in(tmp_path)
    again = trainer(tmp_path, PlotRun(), max_epochs=4)
    again.fit(ScriptedPolicy(), datamodule=Data(), ckpt_path=str(tmp_path / "kept" / "last.ckpt"))
    rows = rows_in(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4] and rows[0] == before[0]
    # the checkpoint was written at the end of the second iteration's validation
    assert rows[1]["update/approx_kl"] == pytest.approx(0.02)
    assert rows[1]["val/success"] == 0.75 and rows[1]["time/update_s"] == before[1]["time/update_s"]
    elapsed = [row["elapsed_s"] for row in rows]
    assert elapsed == sorted(elapsed)


def test_rows_are_written_once(tmp_path: Path) -> None:
    file, writer = tmp_path / "rows.jsonl", RowsFile()
    # of an earlier process, which was killed
    file.write_text('{"iteration": 9.0}\n{"itera')
    rows = [{"iteration": 1.0}]
    writer.write(file, rows)
    assert file.read_text() == '{"iteration": 1.0}\n'
    rows += [{"iteration": 2.0}, {"iteration": 3.0, "update/approx_kl": 0.25}]
    writer.write(file, rows)
    before = file.stat().st_ino
    # the last row changes and becomes shorter; those before it stay as they are written
    rows[2] = {"iteration": 3.0}
    rows[0]["iteration"] = 7.0
    writer.write(file, rows)
    rows.append({"iteration": 4.0})
    writer.write(file, rows)
    assert file.read_text().splitlines() == [f'{{"iteration": {n}.0}}' for n in (1, 2, 3, 4)]
    assert file.stat().st_ino == before


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
