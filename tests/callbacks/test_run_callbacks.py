"""Progress, kept trajectories and summary, in a Trainer whose loop reports rollouts."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from PIL import Image
from rich.console import Console
from support.episodes.trajectories import make_trajectory, make_turn
from torch.utils.data import DataLoader

from ragen_pl.base.records import read_records
from ragen_pl.callbacks.clock import RunClock
from ragen_pl.callbacks.progress import RolloutProgress
from ragen_pl.callbacks.summary import (
    RunSummary,
    open_command,
    page_and_plots,
    resume_command,
    runs_page,
    summary_table,
)
from ragen_pl.callbacks.trajectories import LogTrajectories, staying, strip
from ragen_pl.callbacks.validations import KeepValidations
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.tracking.loggers import RecordLogger
from ragen_pl.trajectory import Observation, Trajectory
from ragen_pl.viewing.run_files import episodes_page
from ragen_pl.viewing.validations import validation_files, write_validation


def trajectory(group: int, *, side: int = 8) -> Trajectory:
    turn = make_turn(
        observation=Observation(text="look", images=[np.full((side, side, 3), 9, np.uint8)]),
        response_text="<think>é</think><answer>Up</answer>", think="é", actions=["Up"],
        response_logprobs=np.full(3, -0.5, np.float32), action_is_effective=False, reward=0.25,
        info={"success": np.bool_(True)},
    )  # fmt: skip
    images = [np.zeros((200, 10, 3), np.uint8)]
    return make_trajectory(turn, turn, group=group, seed=3, success=True, final_images=images)


class ScriptedPolicy(pl.LightningModule):
    """Module that reports a rollout to its callbacks before each epoch, as the rollout/update loop does."""

    def __init__(self, *, fail_in: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.fail_in = fail_in

    def call_hook(self, hook: str, *arguments: object) -> None:
        for callback in self.trainer.callbacks:
            if isinstance(callback, RolloutCallback):
                getattr(callback, hook)(self.trainer, self, *arguments)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.fail_in:
            raise RuntimeError("stopped")
        self.call_hook("on_rollout_start")
        for done in range(3):
            self.call_hook("on_rollout_progress", done, 3)
        self.call_hook("on_rollout_end", [trajectory(group) for group in range(6)])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("rollout/success", 0.1 * self.current_epoch)
        self.log("rollout/valid_actions", 0.75)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val/success", 0.5 + 0.25 * self.current_epoch)
        self.log("val/episodes", 400.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(
    tmp_path: Path, *callbacks: pl.Callback, module: ScriptedPolicy, **trainer: object
) -> pl.Trainer:
    settings = {"max_epochs": 3, "num_sanity_val_steps": 0, "logger": False, **trainer}
    fitted = pl.Trainer(
        accelerator="cpu",
        enable_model_summary=False,
        enable_progress_bar=any(isinstance(callback, RolloutProgress) for callback in callbacks),
        default_root_dir=tmp_path,
        callbacks=[*callbacks, pl.callbacks.ModelCheckpoint(tmp_path / "kept", save_last=True)],
        **settings,
    )
    loader = DataLoader(torch.ones(4, 1), batch_size=2)
    fitted.fit(module, loader, loader)
    return fitted


def test_log_has_one_line_an_iteration(tmp_path: Path) -> None:
    out = io.StringIO()
    fit(tmp_path, RolloutProgress(console=Console(file=out)), module=ScriptedPolicy())
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"iteration {n}/3" for n in (1, 2, 3)]
    assert "success 0.100" in lines[1]
    assert "validation success 0.750" in lines[1]
    assert "tokens/s" in lines[0]
    assert "left" in lines[0]
    assert "valid actions 0.750" in lines[0]


def test_a_validation_is_in_the_line_after_it_alone(tmp_path: Path) -> None:
    out = io.StringIO()
    progress = RolloutProgress(console=Console(file=out))
    fit(tmp_path, progress, module=ScriptedPolicy(), max_epochs=5, check_val_every_n_epoch=2)
    lines = out.getvalue().splitlines()
    shown = [re.findall(r"validation success ([\d.]+)", line) for line in lines]
    assert shown == [[], ["0.750"], [], ["1.250"], []]


def test_phase_by_steps_has_a_few_lines(tmp_path: Path) -> None:
    out = io.StringIO()
    module = ScriptedPolicy()
    module.phase = "warm start"
    progress = RolloutProgress(console=Console(file=out), lines=2)
    fit(tmp_path, progress, module=module, max_epochs=-1, max_steps=8)
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["warm start 4/8", "warm start 8/8"]


@pytest.mark.parametrize(("fail_in", "done"), [(-1, "3/3"), (2, "1/3")])
def test_live_display_is_closed_even_after_an_error(
    tmp_path: Path, fail_in: int, done: str
) -> None:
    out = io.StringIO()
    progress = RolloutProgress(console=Console(file=out, force_terminal=True, width=100))
    with pytest.raises(RuntimeError, match="stopped") if fail_in >= 0 else nullcontext():
        fit(tmp_path, progress, module=ScriptedPolicy(fail_in=fail_in))
    shown = out.getvalue()
    assert "iteration" in shown
    assert done in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # cursor hidden, shown again


def test_trajectories_are_kept_with_images(tmp_path: Path) -> None:
    fit(tmp_path, LogTrajectories(every_n_iterations=2, count=3), module=ScriptedPolicy())
    folders = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert folders == ["iteration_0000", "iteration_0002"]
    folder = tmp_path / "trajectories" / "iteration_0002"
    names = {path.name for path in folder.iterdir()}
    written = {"trajectories.jsonl", "page.html", "played.json", "images"}
    assert names == written | {"0.png", "1.png", "2.png"}
    read = list(read_records(folder / "trajectories.jsonl"))[1]
    assert (read["group"], read["return"], read["status"]) == (2, 0.5, "terminated")
    assert read["iteration"] == 2
    assert read["turns"][0]["think"] == "é"
    assert read["turns"][0]["logprobs"] == [-0.5] * 3
    with Image.open(folder / "1.png") as image:
        assert image.size == (96 + 4 + 96 + 4 + 10, 200)


class Validated(ScriptedPolicy):
    """Policy that solves one of four episodes of a validation."""

    def validation_step(self, batch: torch.Tensor, index: int) -> dict[str, list[Trajectory]]:
        super().validation_step(batch, index)
        return {"trajectories": [replace(trajectory(n), success=n == 0) for n in range(4)]}


def test_a_page_of_a_validation_counts_all_of_its_episodes(tmp_path: Path) -> None:
    fit(tmp_path, LogTrajectories(count=3), module=Validated(), max_epochs=2)
    folder = tmp_path / "trajectories" / "validation_0002"
    records = list(read_records(folder / "trajectories.jsonl"))
    assert [record["success"] for record in records] == [False] * 3
    # two batches of the last validation
    counts = {"episodes": 8, "success": 2, "failed": 0}
    assert json.loads((folder / "played.json").read_text()) == counts
    name = f"trajectories/{folder.name}"
    shown = episodes_page(tmp_path, name, title="a run", episodes=64)
    for page in ((folder / "page.html").read_text(), shown):
        assert f'"totals":{json.dumps(counts, separators=(",", ":"))}' in page
        assert '"note":"3 of 8 episodes, whole groups"' in page
    # one of somebody else that is none, and one of an earlier version
    for text in ("[1]", '{"episodes": "<b>", "success": 2, "failed": 0}', ""):
        (folder / "played.json").write_text(text)
        assert '"totals":{"episodes":3,"success":0,"failed":0}' in episodes_page(
            tmp_path, name, title="a run", episodes=64
        )


def test_a_checkpoint_inside_an_update_has_the_time_until_then(tmp_path: Path) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            time.sleep(0.5)
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    fit(tmp_path, Save(), KeepValidations(), RunClock(), module=ScriptedPolicy(), max_epochs=1)
    for step in (1, 2):
        saved = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["callbacks"]
        seconds = saved["KeepValidations"]["seconds"], saved["RunClock"]["seconds"]["update"]
        assert all(0.5 * step <= each < 0.5 * step + 20 for each in seconds)


def test_validations_of_weights_that_a_resume_drops_are_dropped(tmp_path: Path) -> None:
    cost = {"episodes": 1, "response_tokens": 1, "seconds": 1.0, "processor_seconds": 1.0}
    for name in ("lake", "bandit"):
        for iteration in range(3):
            write_validation(
                {"schema": 1, "iteration": iteration, "validation_set": name, "cost": cost, "episodes": []},
                tmp_path,
            )  # fmt: skip
    # from a checkpoint before the first iteration
    fit(tmp_path, KeepValidations(), module=ScriptedPolicy(), max_epochs=1)
    for name in ("lake", "bandit"):
        assert list(validation_files(tmp_path, name)) == [0]


def test_episodes_of_weights_that_a_resume_drops_are_dropped(tmp_path: Path) -> None:
    folder, kept = tmp_path / "trajectories", LogTrajectories(every_n_iterations=1, keep_last=2)
    dropped = [f"iteration_{number:04d}" for number in range(10, 60)]
    others = ["iteration_of_mine", "iteration_0020_2", "iteration_0020_copy2"]
    for name in (*dropped, "validation_0040", *others):
        (folder / name).mkdir(parents=True)
    # from a checkpoint before the first iteration
    fit(tmp_path, kept, module=Validated(), max_epochs=4)
    own = [f"iteration_{number:04d}" for number in (0, 1, 2, 3)]
    own += [f"validation_{number:04d}" for number in (1, 2, 3, 4)]
    assert {one.name for one in folder.iterdir()} == {*own, *others}


def test_trajectories_are_mlflow_artifacts(tmp_path: Path, empty_store: Path) -> None:
    from mlflow.tracking import MlflowClient

    from ragen_pl.tracking.loggers import RunLogger

    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
    logger = RunLogger(run_dir=str(tmp_path), uri=uri)
    fit(tmp_path, LogTrajectories(count=1), module=ScriptedPolicy(), logger=logger, max_epochs=1)
    files = MlflowClient(uri).list_artifacts(logger.run_id, "trajectories/iteration_0000")
    names = [Path(file.path).name for file in files]
    assert names == ["0.png", "images", "page.html", "played.json", "trajectories.jsonl"]


def test_trajectories_of_some_iterations_stay_here_and_in_mlflow(
    tmp_path: Path, empty_store: Path
) -> None:
    from mlflow.tracking import MlflowClient

    from ragen_pl.tracking.loggers import RunLogger

    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
    logger = RunLogger(run_dir=str(tmp_path), uri=uri)
    kept = LogTrajectories(every_n_iterations=1, count=1, traces=0, keep_last=2)
    fit(tmp_path, kept, module=ScriptedPolicy(), logger=logger, max_epochs=10)
    # the first one, powers of two, and the newest two
    stay = [f"iteration_{number:04d}" for number in (0, 1, 2, 4, 8, 9)]
    assert sorted(path.name for path in (tmp_path / "trajectories").iterdir()) == stay
    artifacts = MlflowClient(uri).list_artifacts(logger.run_id, "trajectories")
    assert sorted(Path(one.path).name for one in artifacts) == stay


def test_all_trajectories_stay_where_that_is_wanted(tmp_path: Path) -> None:
    kept = LogTrajectories(every_n_iterations=1, count=1, keep_last=None)
    fit(tmp_path, kept, module=ScriptedPolicy(), max_epochs=8)
    assert len(list((tmp_path / "trajectories").iterdir())) == 8


def test_what_stays_does_not_depend_on_when_the_others_are_removed() -> None:
    stepwise: set[int] = set()
    for number in range(0, 3000, 20):
        stepwise = staying(stepwise | {number}, newest=10)
    assert stepwise == staying(range(0, 3000, 20), newest=10)
    assert len(stepwise) < 24


def test_some_episodes_are_mlflow_traces(tmp_path: Path, empty_store: Path) -> None:
    from mlflow.tracking import MlflowClient

    from ragen_pl.tracking.loggers import RunLogger

    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
    logger = RunLogger(run_dir=str(tmp_path), uri=uri)
    kept = LogTrajectories(count=3, traces=2)
    fit(tmp_path, kept, module=ScriptedPolicy(), logger=logger, max_epochs=1)
    client = MlflowClient(uri)
    traces = client.search_traces(locations=[str(logger.experiment_id)], run_id=logger.run_id)
    assert len(traces) == 2
    first, *rest = sorted(traces[0].data.spans, key=lambda span: span.start_time_ns)
    assert (first.span_type, first.outputs["success"]) == ("AGENT", True)
    assert [(span.name, span.span_type) for span in rest] == [
        ("turn 1", "LLM"), ("environment step", "TOOL"), ("turn 2", "LLM"), ("environment step", "TOOL"),
    ]  # fmt: skip
    turn, step = rest[:2]
    assert (turn.parent_id, step.parent_id) == (first.span_id, turn.span_id)
    assert turn.outputs["response"] == "<think>é</think><answer>Up</answer>"
    assert (step.inputs, step.outputs["reward"]) == ({"actions": ["Up"]}, 0.25)
    (image,) = turn.inputs["images"]
    assert image.startswith("mlflow-attachment://") and "image%2Fpng" in image
    place = traces[0].info.tags["mlflow.artifactLocation"].removeprefix("file://")
    stored = list(Path(place).rglob("attachments/*"))
    assert [file.read_bytes()[1:4] for file in stored] == [b"PNG"] * 3


def test_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="every_n_iterations=0"):
        LogTrajectories(every_n_iterations=0)


def test_strip_enlarges_small_images_by_whole_factors() -> None:
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    canvas = strip([image, image])
    assert canvas.shape == (96, 196, 3)
    assert (canvas[::24, :96:24] == image).all()
    assert (canvas[::24, 100::24] == image).all()
    assert (canvas[:, 96:100] == 255).all()


def test_summary_has_rows_before_after_and_of_other_policies(tmp_path: Path) -> None:
    out = io.StringIO()
    summary = RunSummary(
        references={"random": {"success": 0.125}}, console=Console(file=out, width=200)
    )
    record = RecordLogger(run_dir=str(tmp_path))
    fit(tmp_path, summary, module=ScriptedPolicy(), logger=record)
    shown = out.getvalue()
    assert "0.500 ± 0.049" in shown
    assert "1.000 ± " in shown
    assert "0.125" in shown
    assert f"checkpoint {tmp_path}/kept/last.ckpt" in shown
    # no command has started this program
    assert f"ragen_pl.train(…, ckpt_path='{tmp_path}/kept/last.ckpt')" in shown


def test_summary_of_many_players_fits_a_terminal_of_80_columns() -> None:
    metrics = {"success": 0.125, "episodes": 512.0, "return": -240.0, "turns": 60.0}
    metrics |= {"valid_actions": 1.0, "response_tokens": 512.0}
    out = io.StringIO()
    players = [f"player number {number}" for number in range(9)]
    Console(file=out, width=80).print(summary_table(dict.fromkeys(players, metrics)))
    rows = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    assert len(rows) == 9 and all("0.125 ± 0.0" in row for row in rows)


def test_the_newest_page_is_that_of_the_last_iteration(tmp_path: Path) -> None:
    for name in ("iteration_9980", "validation_9990", "iteration_10000", "validation_10000"):
        (tmp_path / "trajectories" / name).mkdir(parents=True)
        (tmp_path / "trajectories" / name / "page.html").touch()
    assert page_and_plots(tmp_path)["page"].endswith("validation_10000/page.html")


def test_commands_are_quoted_for_a_shell() -> None:
    assert open_command("http://host:5000") == "http://host:5000"
    assert (
        open_command("sqlite:////a b/m.db") == "mlflow ui --backend-store-uri 'sqlite:////a b/m.db'"
    )
    end = "/#/experiments/7/runs?workflowType=machine_learning"
    assert runs_page("http://host:5000", experiment="7") == f"http://host:5000{end}"
    assert runs_page("sqlite:////m.db", experiment="7") == f"http://127.0.0.1:5000{end}"
    assert resume_command(["+ckpt_path=x", "a=[1,2]"], checkpoint="/c.ckpt") == (
        "python -m ragen_pl.fit 'a=[1,2]' ckpt_path=/c.ckpt"
    )
    # Hydra's grammar takes few characters without quotes
    words = shlex.split(resume_command([], checkpoint="/Übung (1)/it's.ckpt"))
    parsed = OverridesParser.create().parse_override(words[-1])
    assert (parsed.key_or_group, parsed.value()) == ("ckpt_path", "/Übung (1)/it's.ckpt")
