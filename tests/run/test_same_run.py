"""Ranks that are not of one run end with one line that names their machines; so does a run without progress."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from ragen_pl.checkpoints.checkpoint_check import number_in
from ragen_pl.checkpoints.folder import Run
from ragen_pl.checkpoints.starts import beginning_of, counted_start
from ragen_pl.config.errors import ConfigError
from ragen_pl.engines.errors import RolloutError
from ragen_pl.ranks import same_run
from ragen_pl.ranks.rank_agreement import agree_with_others
from ragen_pl.ranks.rank_watch import RankFailedError
from ragen_pl.ranks.same_run import RankFacts, config_digests, differences

HOSTS = {0: "n1", 1: "n1", 2: "n2", 3: "n2", 4: "n5"}


def facts(**changes):
    made = {
        "folder": "/shared/run",
        "sees_folder": True,
        "begins": "its beginning",
        "config": {"seed": "a", "rollout.groups": "b"},
        "versions": {"ragen_pl": "0.1.0", "torch": "2.14.1"},
    }
    return asdict(RankFacts(**made | changes))


def line(changed: dict[int, dict[str, object]]) -> str | None:
    return differences({rank: facts(**changed.get(rank, {})) for rank in HOSTS}, HOSTS)


def test_ranks_that_agree_have_no_line():
    assert line({}) is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {rank: {"sees_folder": False} for rank in (2, 3, 4)},
            "paths.run_dir=/shared/run: not the same folder on n2, n5 as on n1; put it on a file",
        ),
        ({3: {"sees_folder": False}}, "not the same folder on n2 (rank 3) as on n1"),
        (
            {4: {"versions": {"ragen_pl": "0.1.0", "torch": "2.13.0"}}},
            "torch is 2.14.1 on n1 and 2.13.0 on n5; install",
        ),
        (
            {2: {"config": {"seed": "a", "rollout.groups": "c"}}},
            "rollout.groups: not the same on n2 (rank 2) as on n1; start all ranks by the same command",
        ),
        (
            {4: {"begins": "step 8 (last.ckpt, 12 bytes)"}},
            "the run continues from its beginning on n1, and from step 8 (last.ckpt, 12 bytes) on n5",
        ),
    ],
)
def test_a_difference_is_one_line_with_the_machines(changed, expected):
    found = line(changed)
    assert found is not None and expected in found and "\n" not in found


def test_the_beginning_of_a_run_is_read_from_its_files(tmp_path):
    run = Run(tmp_path)
    assert beginning_of(run) == "its beginning"
    torch.save({"epoch": 3, "global_step": 24, "state_dict": {}}, tmp_path / "warm_start.ckpt")
    assert beginning_of(Run(tmp_path, resumed=True)) == "step 24 of the warm start"
    (tmp_path / "warm_start.pt").touch()
    assert beginning_of(Run(tmp_path, resumed=True)) == "the end of the warm start"
    file = tmp_path / "last.ckpt"
    torch.save({"epoch": 3, "global_step": 70000, "state_dict": {"a": torch.ones(2)}}, file)
    found = beginning_of(Run(tmp_path, checkpoint=file, resumed=True))
    assert found == f"step 70000 (last.ckpt, {file.stat().st_size} bytes)"
    assert number_in(tmp_path / "warm_start.pt", "epoch") is None


@pytest.fixture
def agreed(watches):
    """Return a function that lets ranks compare their runs, and returns what each raises."""

    def compare(folders: list[Path], *, seeds: tuple[int, ...] = (0, 0), wait_s: float = 0.3):
        made = watches(len(folders))

        def one(number: int) -> BaseException | None:
            config, run = {"seed": str(seeds[number])}, Run(folders[number])
            limits = {"limit_s": 5.0, "folder_s": wait_s}
            try:
                agree_with_others(made[number], config, run, members=len(folders), **limits)
            except BaseException as error:
                return error
            return None

        with ThreadPoolExecutor(len(folders)) as pool:
            return made, list(pool.map(one, range(len(folders))))

    return compare


def test_ranks_of_one_run_go_on(agreed, tmp_path):
    _, raised = agreed([tmp_path, tmp_path, tmp_path], seeds=(1, 1, 1))
    assert raised == [None, None, None]
    # the first rank's file is gone
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_shared_ends_all_ranks(agreed, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    made, raised = agreed([tmp_path, tmp_path / "other"])
    assert [type(error) for error in raised] == [RankFailedError, RankFailedError]
    assert [watch.code for watch in made] == [2, 2]
    for watch in made:
        watch.show()
    # each machine prints one line
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and len(set(lines)) == 1
    assert lines[0].startswith(f"ragen_pl: paths.run_dir={tmp_path}: not the same folder on ")
    assert "(rank 1) as on" in lines[0]


def test_a_folder_may_show_a_file_late(agreed, tmp_path, monkeypatch):
    shown = iter([False, False, True, True])
    exists = Path.exists
    monkeypatch.setattr(
        Path, "exists", lambda file: exists(file) and (file.suffix != ".token" or next(shown, True))
    )
    _, raised = agreed([tmp_path, tmp_path], wait_s=5.0)
    assert raised == [None, None] and next(shown, None) is None


def test_another_config_on_a_rank_ends_all(agreed, tmp_path):
    made, raised = agreed([tmp_path, tmp_path], seeds=(0, 1))
    assert all(isinstance(error, RankFailedError) for error in raised)
    assert "seed: not the same on" in made[0].failure.line == made[1].failure.line


def test_a_missing_rank_is_named_at_the_start(watches, tmp_path):
    (first,) = watches(1)
    with pytest.raises(RankFailedError):
        agree_with_others(first, {}, Run(tmp_path), members=2, limit_s=0.2, folder_s=5.0)
    assert first.failure is not None
    expected = "start of the ranks: no answer from rank 1 (never started) for 0.2 s"
    assert first.failure.line == expected and first.code == 1


def test_a_missing_first_rank_is_one_line(watches, tmp_path):
    (second,) = watches(1, first=1)
    with pytest.raises(ConfigError, match=r"no answer from the first rank for 0.2 s; start all"):
        agree_with_others(second, {}, Run(tmp_path), members=2, limit_s=0.1, folder_s=0.1)


def start(folder: Path, *, begins: str = "step 8", config: str = "a", most: int | None = 3):
    return counted_start(folder, begins=begins, config=config, max_failures=most)


def fail(folder: Path, error: BaseException, **settings) -> None:
    with pytest.raises(type(error)), start(folder, **settings):
        raise error


def test_a_run_that_fails_three_times_from_one_step_is_not_started_again(tmp_path):
    for _ in range(3):
        fail(tmp_path, KeyError("a bug"))
    with (
        pytest.raises(ConfigError, match=r"3 starts from step 8 have failed .*max_starts=3; see"),
        start(tmp_path),
    ):
        raise AssertionError("it was started")
    lines = [json.loads(one) for one in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(one["begins"] == "step 8" for one in lines)
    # progress, another config, or no limit
    for settings in ({"begins": "step 9"}, {"config": "b"}, {"most": None}):
        with start(tmp_path, **settings):
            pass


@pytest.mark.parametrize(
    "error", [SystemExit(143), KeyboardInterrupt(), ConfigError("seed=x"), SystemExit(2)]
)
def test_a_stopped_or_refused_start_is_no_failure(tmp_path, error):
    for _ in range(5):
        fail(tmp_path, error)


def test_an_error_of_a_rollout_is_a_failure(tmp_path):
    error = ConfigError("no server answers")
    error.__cause__ = RolloutError("no server answers")
    for _ in range(3):
        fail(tmp_path, error)
    with pytest.raises(ConfigError, match="3 starts"), start(tmp_path):
        pass


def test_a_killed_start_is_a_failure(tmp_path):
    # a process that is killed writes nothing at its end, and its last line may be torn
    killed = json.dumps({"begins": "step 8", "config": "a"})
    (tmp_path / "starts.jsonl").write_text(f"{killed}\n{killed}\n{killed}\n" + '{"begi')
    with pytest.raises(ConfigError, match="3 starts"), start(tmp_path):
        pass


def test_digests_name_the_keys_of_values(monkeypatch):
    one = config_digests(OmegaConf.create({"a": {"b": 1, "c": [1, 2]}}))
    other = config_digests(OmegaConf.create({"a": {"b": 1, "c": [1, 3]}}))
    assert one.keys() == {"a.b", "a.c.0", "a.c.1"}
    assert same_run._differing(one, other) == {"a.c.1"}
