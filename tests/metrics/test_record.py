"""A run's record of metrics: one point for each step, whatever ends the process, and the files of earlier versions."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest

from ragen_pl.metrics.record import (
    VALIDATION,
    WARM_START,
    MetricsRecord,
    RecordReader,
    inherit,
)
from ragen_pl.metrics.shown import CHARTS, PROGRESS, is_drawn
from ragen_pl.tracking.loggers import RunCSVLogger


def add_iterations(record: MetricsRecord, *steps: int, value: float = 0.5) -> list[bool]:
    """Log iterations; return whether a tracker gets each."""
    points = [
        record.add({"rollout/success": value, "elapsed_s": 1.0 * step}, step) for step in steps
    ]
    return [all(point.tracked for point in each) for each in points if each]


def success(folder: Path) -> dict[int, float]:
    return {point.step: point.metrics["rollout/success"] for point in RecordReader(folder).points()}


def test_a_line_that_a_killed_process_has_cut_is_dropped(tmp_path):
    add_iterations(MetricsRecord(tmp_path), 1, 2)
    reader = RecordReader(tmp_path)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(whole[: len(whole) // 3])
    assert len(reader.points()) == 2
    record = MetricsRecord(tmp_path)
    assert record.count == 2 and (tmp_path / "metrics.jsonl").read_bytes() == whole
    assert add_iterations(record, 3) == [True]
    assert [point.step for point in reader.points()] == [1, 2, 3]


def test_a_line_that_grows_while_it_is_read_is_read_later(tmp_path, monkeypatch):
    add_iterations(MetricsRecord(tmp_path), 1, 2, 3)
    reader, file = RecordReader(tmp_path), tmp_path / "metrics.jsonl"
    first, second, third = file.read_bytes().splitlines(keepends=True)

    class Growing(io.BytesIO):
        """Stream of a file whose second line is written in two parts."""

        def __iter__(self):
            return iter([first, second[:20], second[20:], third])

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_, **__: Growing())
        assert [point.step for point in reader.points()] == [1]
    assert [point.step for point in reader.points()] == [1, 2, 3]


def test_points_after_the_checkpoint_are_dropped_and_tracked_once(tmp_path):
    first = MetricsRecord(tmp_path)
    add_iterations(first, 1, 2)
    checkpoint = first.count
    add_iterations(first, 3, 4)
    reader = RecordReader(tmp_path)
    assert list(success(tmp_path)) == [1, 2, 3, 4] == [point.step for point in reader.points()]
    # killed again before it is as far, and resumed again
    for last in (3, 5):
        record = MetricsRecord(tmp_path)
        record.keep(checkpoint)
        assert list(success(tmp_path)) == [1, 2]
        tracked = add_iterations(record, *range(2, last + 1), value=0.25)
        assert tracked == [False, False, True][: last - 2]
        # the second iteration was before the checkpoint
        assert success(tmp_path)[2] == 0.5 and success(tmp_path)[3] == 0.25
        assert success(tmp_path).keys() == set(range(1, last + 1))
    assert [row["iteration"] for row in reader.rows()] == [1, 2, 3, 4, 5]


def test_points_that_the_same_process_repeats_are_tracked_once(tmp_path):
    """As by a second `fit` from a checkpoint, with the logger of the first."""
    record = MetricsRecord(tmp_path)
    assert add_iterations(record, 1, 2, 3, 4) == [True] * 4
    record.keep(2)
    assert add_iterations(record, *range(1, 6), value=0.25) == [False, False, True]
    assert success(tmp_path) == {1: 0.5, 2: 0.5, 3: 0.25, 4: 0.25, 5: 0.25}


def test_a_run_without_a_checkpoint_begins_anew_after_its_warm_start(tmp_path):
    record = MetricsRecord(tmp_path)
    record.phase = WARM_START
    record.add({"warm_start/loss": 1.0}, 19)
    record.add({"warm_start/loss": 0.5}, 39)
    record.phase = VALIDATION
    record.add({"val/success": 0.5}, 0)
    resumed = MetricsRecord(tmp_path)
    assert resumed.count_until(None, phase=VALIDATION) == 2
    assert resumed.count_until(0, phase=VALIDATION) == 3
    assert resumed.count_until(19, phase=WARM_START) == 1
    assert RecordReader(tmp_path).rows() == []


def test_numbers_that_json_does_not_have_are_kept(tmp_path):
    MetricsRecord(tmp_path).add({"a": math.nan, "b": -math.inf, "c": 0.5}, 1)
    line = (tmp_path / "metrics.jsonl").read_text()
    json.loads(line, parse_constant=pytest.fail)
    (point,) = RecordReader(tmp_path).points()
    assert math.isnan(point.metrics["a"])
    assert (point.metrics["b"], point.metrics["c"]) == (-math.inf, 0.5)


def test_files_of_an_earlier_version_become_a_record_once(tmp_path):
    (tmp_path / "plots").mkdir()
    rows = [{"iteration": n, "elapsed_s": 2.0 * n, "rollout/success": 0.5} for n in (1, 2)]
    rows[0]["rollout/return"] = None
    (tmp_path / "plots" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mlflow").mkdir()
    points = [["warm_start/loss", "nan", 9, 19], ["rollout/turns", 3.0, 9, 1]]
    damaged = [7, {"points": 7}, {"points": [[1]]}, {"points": [[1, [], 9, {}]]}]
    calls = [{"call": "start"}, *damaged, {"call": "metrics", "points": points}]
    calls_file = tmp_path / "mlflow" / "calls.jsonl"
    calls_file.write_text("".join(json.dumps(call) + "\n" for call in calls))
    line = '{"step": 2, "metrics": {"update/loss": 0.25}}\n'
    (tmp_path / "metrics.jsonl").write_text(f"7\n{{\n{line}")
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "metrics.csv").write_text(
        "step,val/success,update/kl\n2,,nan\n0,0.75,\n3,x\n"
    )
    before = RecordReader(tmp_path).rows()
    logger = RunCSVLogger(run_dir=str(tmp_path))
    found = [(point.phase, point.step) for point in RecordReader(tmp_path).points()]
    assert found == [(WARM_START, 19), ("training", 0), ("training", 1), ("training", 2)]
    assert not any(point.tracked for point in RecordReader(tmp_path).points())
    with (tmp_path / "csv" / "metrics.csv").open(newline="") as stream:
        table = {row["step"]: row for row in csv.DictReader(stream)}
    assert (table["0"]["val/success"], table["2"]["update/loss"]) == ("0.75", "0.25")
    assert (table["1"]["rollout/turns"], table["19"]["warm_start/loss"]) == ("3.0", "nan")
    after = RecordReader(tmp_path).rows()
    assert [row["elapsed_s"] for row in after] == [row["elapsed_s"] for row in before] == [2.0, 4.0]
    assert not (tmp_path / "plots" / "rows.jsonl").exists()
    # what was logged before is in no file twice
    logger.log_metrics({"rollout/turns": 3.0, "new": 1.0}, 1)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    MetricsRecord(tmp_path)
    assert (tmp_path / "metrics.jsonl").stat().st_size == size
    assert RecordReader(tmp_path).points()[-1].metrics == {"new": 1.0}


def test_a_run_from_another_ones_checkpoint_begins_with_its_points(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    record = MetricsRecord(first)
    add_iterations(record, 1, 2)
    count = record.count
    add_iterations(record, 3)
    second.mkdir()
    for _ in range(2):
        inherit(second, first)
        record = MetricsRecord(second)
        record.keep(count)
    assert list(success(second)) == [1, 2]
    assert not any(point.tracked for point in RecordReader(second).points())
    assert list(success(first)) == [1, 2, 3]


def test_a_run_may_have_no_metrics_yet(tmp_path):
    reader = RecordReader(tmp_path)
    assert reader.points() == [] == reader.rows()
    (tmp_path / "second").mkdir()
    inherit(tmp_path / "second", tmp_path)
    assert MetricsRecord(tmp_path / "second").count == 0
    add_iterations(MetricsRecord(tmp_path), 1)
    assert [point.step for point in reader.points()] == [1]


def test_a_table_is_that_of_the_record_after_a_resume(tmp_path):
    add_iterations(MetricsRecord(tmp_path), 1, 2, 3)
    logger = RunCSVLogger(run_dir=str(tmp_path), settings={"a": 1})
    logger.keep(1)
    logger.log_metrics({"rollout/success": 0.25}, 2)
    logger.save()
    with (tmp_path / "csv" / "metrics.csv").open(newline="") as stream:
        rows = [(row["step"], row["rollout/success"]) for row in csv.DictReader(stream)]
    assert rows == [("1", "0.5"), ("2", "0.25")]
    assert (tmp_path / "csv" / "hparams.yaml").read_text() == "a: 1\n"


def test_what_is_shown_is_read_from_the_record():
    charts = [name for _, lines, _ in CHARTS for name, _ in lines]
    assert charts and all(map(is_drawn, charts))
    assert is_drawn("rollout/reward/form") and not is_drawn("diagnostics/entropy")
    assert len({name for _, name, _ in PROGRESS}) == len(PROGRESS)
