"""The live view: the command and its server over HTTP, on folders of runs, and its page in a browser."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from omegaconf import OmegaConf
from support.servers.browser import in_browser, record, visit

from ragen_pl.base.records import write_records
from ragen_pl.config.composition import compose_overrides
from ragen_pl.metrics.shown import environments_in
from ragen_pl.viewing.outcomes import count_kinds, kind_of
from ragen_pl.viewing.page import script_of
from ragen_pl.viewing.run_files import differences, overview
from ragen_pl.viewing.watch import listen

ROOT = Path(__file__).parents[2]
NASTY = "<img src=x onerror=\"document.title='owned'\">\u202e"


def row(iteration: int, **changes: object) -> dict[str, object]:
    return {
        "iteration": iteration, "elapsed_s": 60.0 * iteration, "rollout/success": 0.5, "rollout/episodes": 100,
        "rollout/return": 1.0, "rollout/return_std": 0.5, "rollout/curriculum_stage": iteration // 3,
        "rollout/reward/form": 0.1, "update/approx_kl": 0.01, "time/rollout_s": 2.0,
    } | changes  # fmt: skip


def write_rows(run: Path, rows: list[dict[str, object]], *, keep: int = 0) -> None:
    """Append rows to a run's record, in the place of those before but for the first ones."""
    points = [
        {"step": one["iteration"], "phase": "training", "time": 1.0, "metrics": one} if one else one
        for one in rows
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [{"keep": keep}, *points])


def make_run(run: Path, *, lr: float, earlier: bool = False) -> Path:
    """Write what a run of four iterations leaves, or has left in an earlier version."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        f"seed: 0\nenv: {{name: maze}}\nalgorithm: {{name: grpo}}\noptimizer: {{lr: {lr}}}\n"
        "trainer: {max_epochs: 4}\nmodel: {build: {_target_: a.b.build_small_lm, path: null}}\n"
    )
    (run / "run.lock").write_text("")
    last = {"val/success": 0.75, "val/episodes": 64}
    rows = [*map(row, range(1, 4)), row(4, **last)]
    if earlier:
        (run / "plots").mkdir()
        (run / "plots" / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    else:
        write_rows(run, rows)
    metrics = {"val/success": 0.75, "random_policy/success": 0.25, "optimal_policy/return": 1.5}
    metrics |= {"diagnostics/success": 0.5}
    (run / "metrics.json").write_text(json.dumps(metrics))
    event = {"iteration": 2, "message": f"entropy fell {NASTY}", "done": ["warned"]}
    (run / "collapse.jsonl").write_text(json.dumps(event) + "\n")
    records = [record(0), record(1, success=False, response=NASTY)]
    write_records(records, run / "trajectories" / "iteration_0003")
    return run


@dataclass
class Client:
    """Reader of a server's answers."""

    port: int

    def get(
        self, path: str, *, method: str = "GET", **headers: str
    ) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(
            method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text, dict(answer.getheaders())

    def json(self, path: str, **query: str) -> Any:
        status, text, _ = self.get(f"{path}?{urlencode(query)}")
        assert status == 200, text
        return json.loads(text)


@contextmanager
def command(*arguments: str, folder: Path) -> Iterator[Client]:
    """Run `python -m ragen_pl.watch`, which must not import torch or transformers."""
    for name in ("torch", "transformers", "lightning"):
        (folder / f"{name}.py").write_text("raise RuntimeError('imported')")
    process = subprocess.Popen(
        [sys.executable, "-m", "ragen_pl.watch", "port=0", *arguments],
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        cwd=folder, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        assert line.startswith("http://127.0.0.1:"), line
        yield Client(int(line.split()[0].rpartition(":")[2]))
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "maze" / "one", lr=0.1)
    make_run(folder / "maze" / "two", lr=0.2, earlier=True)
    os.utime(folder / "maze" / "one" / "config.yaml", (1, 1))
    return folder


@pytest.fixture(scope="module")
def server(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with command(f"paths.root={runs}", folder=tmp_path_factory.mktemp("watch")) as client:
        yield client


def test_table_has_a_line_for_each_run(server: Client) -> None:
    two, one = server.json("/runs")
    assert [two["name"], one["name"]] == ["maze/two", "maze/one"]
    assert (one["env"], one["algorithm"], one["model"]) == ("maze", "grpo", "small_lm")
    assert (one["iteration"], one["iterations"]) == (4, "4")
    assert one["validation"]["value"] == 0.75
    assert (two["iteration"], two["validation"]) == (4, one["validation"])
    # Wilson's interval for 48 of 64 and for 50 of 100
    assert one["validation"]["low"] == pytest.approx(0.632, abs=1e-3)
    assert one["training"]["high"] == pytest.approx(0.596, abs=1e-3)
    named = [("run", "maze/one"), ("run", "maze/two")]
    status, text, _ = server.get(f"/differences?{urlencode(named)}")
    assert status == 200 and json.loads(text) == {"optimizer.lr": ["0.1", "0.2"]}


def test_what_mlflow_keeps_of_a_run_is_no_run(server: Client, runs: Path) -> None:
    copy = make_run(runs / "mlartifacts" / f"{7:032x}" / "artifacts", lr=0.1)
    own = make_run(runs / "maze" / "artifacts", lr=0.1)
    names = {line["name"] for line in server.json("/runs")}
    assert names == {"maze/one", "maze/two", "maze/artifacts"}
    shutil.rmtree(copy)
    shutil.rmtree(own)


def test_state_follows_the_lock_of_the_run(server: Client, runs: Path) -> None:
    run = make_run(runs / "maze" / "three", lr=0.1)

    def state() -> str:
        return {line["name"]: line["state"] for line in server.json("/runs")}["maze/three"]

    assert state() == "finished"
    holds = "import sys, pathlib; from ragen_pl.checkpoints.lock import hold; f = hold(pathlib.Path(sys.argv[1]))"
    holds += "; print('held', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", holds, str(run)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    with process:
        assert process.stdout.readline() == b"held\n"
        assert state() == "running"
        process.stdin.close()
    # the lock was taken after the last metrics were written
    assert state() == "stopped"
    (run / "metrics.json").write_text("{}")
    assert state() == "finished"
    shutil.rmtree(run)


def test_rows_come_from_the_last_known_one_on(server: Client, runs: Path) -> None:
    run = make_run(runs / "maze" / "grows", lr=0.1)
    news = server.json("/run", run="maze/grows")
    assert news["start"] == 0 and [one["iteration"] for one in news["rows"]] == [1, 2, 3, 4]
    assert news["rows"][0]["rollout/return_low"] == pytest.approx(1 - 1.96 * 0.5 / 10, abs=1e-3)
    # the last row has been completed, and another one has been added
    recorded = {"rollout/success_low": 0.3, "rollout/success_high": 0.7, "rollout/return_low": 0.2}
    write_rows(run, [row(4, **{"val/success": 1.0} | recorded), row(5)], keep=4)
    news = server.json("/run", run="maze/grows", known="4", drops=str(news["drops"]))
    assert news["start"] == 3 and [one["iteration"] for one in news["rows"]] == [4, 5]
    assert news["rows"][0]["val/success"] == 1.0
    assert recorded.items() <= news["rows"][0].items()
    # continued from an earlier checkpoint, and further than it was
    write_rows(run, [row(n, **{"val/success": 0.5}) for n in range(3, 9)], keep=2)
    for start in (0, 0, 7):
        news = server.json("/run", run="maze/grows", known="8", drops=str(news["drops"]))
        assert news["start"] == start and len(news["rows"]) == 8 - start
    write_rows(run, [row(1), row(2)])
    news = server.json("/run", run="maze/grows", known="8", drops=str(news["drops"]))
    assert news["start"] == 0 and len(news["rows"]) == 2
    rows = [
        row(1, **{"rollout/return": float("nan"), "rollout/success": 7, "seen": NASTY}),
        [],
        row(2),
    ]
    write_rows(run, rows)  # type: ignore[arg-type]
    first, _ = server.json("/run", run="maze/grows", known="x")["rows"]
    assert (
        "rollout/return" not in first and "seen" not in first and "rollout/success_low" not in first
    )
    shutil.rmtree(run)


def test_rows_come_from_the_last_known_one_on_among_many_runs(tmp_path: Path) -> None:
    for number in range(70):
        write_rows(
            make_run(tmp_path / "runs" / "many" / f"{number:02d}", lr=0.1),
            [*map(row, (4, 5))],
            keep=3,
        )
    with command(f"paths.root={tmp_path / 'runs'}", folder=tmp_path) as client:
        drops = 0
        for _ in range(3):
            newest, *others = client.json("/runs")
            news = client.json("/run", run=newest["name"], known="5", drops=str(drops))
            drops = news["drops"]
    assert news["start"] == 4 and len(others) == 69


def evaluated(part: str, expression: str, *, columns: str = "[]") -> Any:
    """Return the value of an expression of JavaScript beside a part of the page's script, a regular expression."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    found = re.search(part, script_of("watch.js"), re.DOTALL | re.MULTILINE)
    assert found is not None
    program = f"const columns = {columns}; {found[0]}; console.log(JSON.stringify({expression}))"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_curves_may_have_any_number_of_points() -> None:
    points = "Array.from({ length: 200000 }, (_, x) => ({ x, y: x % 7, low: -1 }))"
    ranges = evaluated(r"^const least = .*?\n}\n", f"spans([{{ points: {points} }}], [0, 6], [])")
    assert ranges == {"left": 0, "right": 199999, "low": -0.02, "high": 6.02}


def test_only_environments_of_a_mixture_have_a_curve_each() -> None:
    names = ["success", "lake/success", "lake/return", "reward/success", "metrics/success"]
    columns = json.dumps([f"val/{name}" for name in names])
    part = r"^  const environments = .*?;$"
    assert evaluated(part, "environments", columns=columns) == ["lake"] == environments_in(names)


def test_marks_and_episodes_of_a_run(server: Client) -> None:
    news = server.json("/run", run="maze/one")
    stage, alarm = news["marks"]
    assert (stage["iteration"], stage["kind"]) == (3, "stage")
    assert (alarm["iteration"], alarm["kind"]) == (2, "alarm") and alarm["text"].endswith("warned")
    assert news["recorded"] == ["trajectories/iteration_0003"]
    address = f"/episodes?{urlencode({'run': 'maze/one', 'records': news['recorded'][0]})}"
    status, page, headers = server.get(address)
    assert status == 200 and '"order":"no success first"' in page and NASTY not in page
    assert headers["Content-Security-Policy"].startswith("sandbox allow-scripts")


@pytest.mark.parametrize(
    "path",
    [
        "/run?run=..", "/run?run=/etc", "/run?run=maze", "/run", "/../../etc/passwd", "/%2e%2e/config.yaml",
        "/watch.py", "/episodes?run=maze/one&records=..", "/episodes?run=maze/one&records=plots",
        f"/episodes?run=maze/one&records={quote('trajectories/../../two/trajectories/iteration_0003')}",
    ],
)  # fmt: skip
def test_only_known_names_are_served(server: Client, path: str) -> None:
    status, text, _ = server.get(path)
    assert status == 404 and "seed" not in text


def test_links_out_of_a_run_are_not_followed(server: Client, runs: Path, tmp_path: Path) -> None:
    run = make_run(runs / "maze" / "links", lr=0.1)
    write_records([record(0)], tmp_path)
    (run / "trajectories" / "iteration_0009").symlink_to(tmp_path)
    shutil.move(run / "metrics.jsonl", tmp_path / "metrics.jsonl")
    (run / "metrics.jsonl").symlink_to(tmp_path / "metrics.jsonl")
    shutil.move(run / "metrics.json", tmp_path / "metrics.json")
    (run / "metrics.json").symlink_to(tmp_path / "metrics.json")
    (run / "collapse.jsonl").unlink()
    os.mkfifo(run / "collapse.jsonl")  # reading it would wait for a writer
    news = server.json("/run", run="maze/links")
    assert news == {
        "start": 0, "drops": 0, "rows": [], "marks": [], "references": {},
        "recorded": ["trajectories/iteration_0003"],
    }  # fmt: skip
    records = run / "trajectories" / "iteration_0003" / "trajectories.jsonl"
    records.write_text('{"schema": 2}\n')
    query = urlencode({"run": "maze/links", "records": "trajectories/iteration_0003"})
    status, text, _ = server.get(f"/episodes?{query}")
    assert status == 422 and "\n" not in text
    shutil.rmtree(run)


def test_other_hosts_and_origins_are_refused(server: Client) -> None:
    here = f"127.0.0.1:{server.port}"
    for path in ("/", "/runs"):
        assert server.get(path, Host="evil.example")[0] == 403
        assert server.get(path, Host=f"evil.example:{server.port}")[0] == 403
        assert server.get(path, Host="localhost:9000")[0] == 200  # a forwarded port
        assert server.get(path, Origin="http://evil.example")[0] == 403
        assert server.get(path, Origin=f"http://{here}")[0] == 200
        assert server.get(path, Sec_Fetch_Site="same-origin")[0] == 200
        assert server.get(path, method="POST")[0] == 405
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Dest": "document"}
    assert server.get("/", **link)[0] == 200 and server.get("/runs", **link)[0] == 403
    assert server.get("/watch.js", Sec_Fetch_Site="cross-site", Sec_Fetch_Dest="script")[0] == 403
    _, page, headers = server.get("/")
    assert "default-src 'none'" in headers["Content-Security-Policy"] and "{{" not in page


def test_next_free_port_is_taken() -> None:
    with listen(0) as first:
        port = first.getsockname()[1]
        with listen(port) as second:
            assert second.getsockname()[0] == "127.0.0.1" and second.getsockname()[1] > port


def test_other_policies_and_outcomes_of_a_run(server: Client) -> None:
    news = server.json("/run", run="maze/one")
    assert news["references"] == {
        "random policy": {"success": 0.25}, "optimal policy": {"return": 1.5},
    }  # fmt: skip
    counts = server.json("/outcomes", run="maze/one", records=news["recorded"][0])
    assert counts == {"success": 1, "ended without success": 1}
    query = urlencode({"run": "maze/one", "records": "trajectories"})
    assert server.get(f"/outcomes?{query}")[0] == 404


def test_a_run_without_success_is_shown_by_its_return(runs: Path) -> None:
    run = make_run(runs / "silent" / "a", lr=0.3)
    silent = {"rollout/success": 0.0, "rollout/success_reported": 0.0}
    write_rows(run, [row(n, **silent) for n in range(1, 5)])
    shown = overview(run)["training"]
    assert (shown["kind"], shown["value"]) == ("return", 1.0) and shown["low"] < 1 < shown["high"]
    write_rows(run, [row(n, **silent | {"rollout/success": 0.25}) for n in range(1, 5)])
    assert overview(run)["training"]["value"] == 0.25
    shutil.rmtree(run.parent)


def test_runs_that_differ_in_their_seed_alone_belong_together(tmp_path: Path) -> None:
    keys = []
    for number, overrides in enumerate((("seed=0",), ("seed=1",), ("seed=1", "optimizer.lr=0.4"))):
        run = tmp_path / str(number)
        run.mkdir()
        settings = compose_overrides("fit", ["env=bandit", f"paths.run_dir={run}", *overrides])
        (run / "config.yaml").write_text(OmegaConf.to_yaml(settings, resolve=True))
        keys.append(overview(run)["seeds"])
    assert keys[0] == keys[1] != keys[2]


def test_a_run_that_was_resumed_has_the_settings_of_its_last_start(runs: Path) -> None:
    first, other = (make_run(runs / "resumed" / name, lr=0.3) for name in ("a", "b"))
    text = (first / "config.yaml").read_text().replace("max_epochs: 4", "max_epochs: 8")
    (first / "config_2.yaml").write_text("seed: 5")
    (first / "config_10.yaml").write_text(text)
    assert overview(first)["iterations"] == "8" and overview(first)["seed"] == "0"
    assert differences([first, other]) == {"trainer.max_epochs": ["8", "4"]}
    shutil.rmtree(runs / "resumed")


def test_advice_names_keys_that_exist() -> None:
    script = (ROOT / "ragen_pl" / "viewing" / "watch.js").read_text()
    advice = script[script.index("const ADVICE") : script.index("const AXES")]
    named = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", advice))
    keys = (ROOT / "docs" / "keys.md").read_text()
    assert len(named) >= 5 and {key for key in named if f"`{key}`" not in keys} == set()


EPISODE = {"success": False, "status": "terminated"}
TURN = {"valid": True, "effective": True, "observation": "ice", "images": []}


@pytest.mark.parametrize(
    ("changes", "turns", "kind"),
    [
        ({"success": True}, [{"valid": False}], "success"),
        ({"status": "failed"}, [], "environment failed"),
        ({"status": "truncated"}, [{}], "truncated"),
        ({}, [{"hit_length_limit": True, "valid": False}], "length limit"),
        ({}, [{}, {"valid": False}], "invalid action"),
        ({}, [{}, {"observation": "b"}, {}, {}], "repeated state"),
        ({}, [{"observation": str(n), "effective": n == 0} for n in range(3)], "no effect"),
        (
            {},
            [{"valid": False, "observation": str(n)} for n in range(3)] + [{"effective": False}],
            "no effect",
        ),
        ({}, [{}], "ended without success"),
        ({"turns": "x"}, [], "ended without success"),
    ],
)
def test_kinds_of_failures(changes, turns, kind) -> None:
    record = EPISODE | {"turns": [TURN | turn for turn in turns]} | changes
    assert kind_of(record) == kind
    assert count_kinds([record, record]) == {kind: 2}


@in_browser
@pytest.mark.slow
def test_browser_means_over_seeds_sorts_and_filters(runs: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        run = make_run(runs / "seeds" / name, lr=0.3)
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("seed: 0", f"seed: {seed}"))
        write_rows(
            run,
            [
                row(n, **{"rollout/return": float(seed), "update/gradient_norm_policy": 2.0})
                for n in (1, 2)
            ],
        )
    with command(f"paths.root={runs}", folder=tmp_path) as client:
        view = {
            "seeds": "mean",
            "filter": "seed 1",
            "sort": "-validation",
            "metric": "rollout/return",
        }
        address = f"http://127.0.0.1:{client.port}/#runs=seeds/a&runs=seeds/b&{urlencode(view)}"
        page = visit(address, "--virtual-time-budget=4000", profile=tmp_path / "profile")
    shutil.rmtree(runs / "seeds")
    table = page[page.index('id="runs"') : page.index('id="settings"')]
    assert "seeds/b" in table and "seeds/a" not in table and "validation ▼" in table
    assert "choose these 1" in page
    figure = page[page.index("<figcaption><b>rollout/return</b>") :].split("</figure>")[0]
    assert figure.count("<polyline") == 1 and figure.count("<polygon") == 1
    assert "<figcaption><b>Gradient norm before clipping</b>" in page


@in_browser
@pytest.mark.slow
def test_browser_draws_curves_and_episodes(server: Client, tmp_path: Path) -> None:
    def drawn(*selected: str, x: str = "iteration") -> str:
        view = urlencode([*(("runs", name) for name in selected), ("x", x)])
        address = f"http://127.0.0.1:{server.port}/#{view}"
        return visit(address, "--virtual-time-budget=4000", profile=tmp_path / "profile")

    page = drawn("maze/one")
    figures = ("Success", "Return", "KL, nats per token", "Seconds by phase", "Reward: form")
    # one in the figure of success, one in that of the return
    assert page.count('class="reference"') == 2 and "random policy" in page
    assert page.index("Alarm in iteration 2: entropy fell") < page.index("<form")
    assert "How the 2 recorded episodes end" in page and "success: 1" in page
    assert page.count("<figure>") == len(figures)
    assert all(f"<figcaption><b>{title}</b>" in page for title in figures)
    # the bands of success and return in training; a mark of either kind in each figure
    assert page.count("<polygon") == 2
    assert page.count('class="stage"') == len(figures) == page.count('class="alarm"')
    assert "0.750 [0.63, 0.84]" in page and "4 of 4" in page
    assert 'src="/episodes?run=maze%2Fone&amp;records=trajectories%2Fiteration_0003"' in page
    both = drawn("maze/one", "maze/two", x="time")
    assert both.count("<polygon") == 4 and "optimizer.lr" in both and "<td>0.2</td>" in both
    assert '<details id="settings" hidden' in page and '<details id="settings">' in both
    assert "<title>owned" not in page and '<img src="x"' not in page
