"""What a folder of somebody else may say: every shipped class, and every command that takes a folder."""

from __future__ import annotations

import functools
import http.server
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from support.runs.composing import composed, resolved
from support.runs.recorded_steps import recorded

from ragen_pl.base.foreign_files import ForeignFileError
from ragen_pl.checkpoints.folder import Run
from ragen_pl.config import ConfigError, config_dir, own_files, trust
from ragen_pl.config.check import class_path
from ragen_pl.config.signatures import declared_trust, read_signature
from ragen_pl.evaluation.mlflow_log import log_evaluation
from ragen_pl.metrics.record import MetricsRecord
from ragen_pl.replaying.step import read_settings
from ragen_pl.run.train import open_run
from ragen_pl.tracking.loggers import RunLogger
from ragen_pl.tracking.mlflow_run import known_run, write_run_file
from ragen_pl.tracking.outbox import RefusedError

pytestmark = pytest.mark.usefixtures("composed_once")
# arguments that name what is started, imported, opened or asked, of whatever class
REACHING = {
    "command", "function", "tasks", "verifier", "variables", "models", "host", "urls", "url", "uri", "path", "file",
    "folder", "directory", "id", "module", "settings", "revision", "run_dir", "base_url", "answers", "endpoint",
}  # fmt: skip
# texts and numbers under such names
HARMLESS = {
    ("ragen_pl.visual_envs.adapters.metaworld.MetaWorld", "tasks"),  # words of a closed list
    ("ragen_pl.visual_envs.adapters.miniwob.MiniWoB", "tasks"),  # words of a closed list
}
COMMANDS = ("evaluate", "play", "serve", "export")


def shipped_classes() -> dict[str, str]:
    """Return the class path of each class that a shipped configuration names, by that name."""

    def named(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                if key in ("_target_", "target") and isinstance(value, str) and "." in value + "/.":
                    yield value
                yield from named(value)
        elif isinstance(node, list):
            for value in node:
                yield from named(value)

    files = [yaml.safe_load(file.read_text("utf-8")) for file in config_dir().rglob("*.yaml")]
    names = {name for node in files for name in named(node) if name != "???"}
    paths = {name: class_path(name) for name in names if not name.startswith("torch.")}
    assert len(paths) > 80 and None not in paths.values()
    return {name: str(path) for name, path in paths.items()}


SHIPPED = shipped_classes()


@pytest.mark.parametrize("path", sorted(set(SHIPPED.values())))
def test_every_shipped_class_declares_what_others_may_not_set(path):
    declared = declared_trust(path)
    assert declared is not None, (
        f"{path}: set needs_trust = (…), () for a class that reaches nothing"
    )
    arguments = read_signature(path).parameters
    firsts = {pattern.partition(".")[0] for pattern in declared} - {"*"}
    assert firsts <= arguments.keys()
    if "*" not in declared:
        reaching = {name for name in arguments if name in REACHING and (path, name) not in HARMLESS}
        assert reaching <= firsts


# components that no file of conf/ names and a run may have instead of those that one does
ALTERNATIVES = (
    "advantages.teacher_ratio.TeacherRatio",
    "advantages.turn_baseline.TurnLeaveOneOut", "group_filter.TopCount", "group_filter.TopMass", "masks.think_span",
    "masks.think_weighted", "masks.no_special", "mismatch.TruncatedWeights", "mismatch.MaskedWeights",
    "normalization.ByGroup", "normalization.ByBatch", "normalization.Running", "ratio_losses.SequencePolicyLoss",
    "ratio_losses.ClippedWeightLoss",
)  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        *(f"ragen_pl.algorithms.{name}" for name in ALTERNATIVES),
        "ragen_pl.modules.reference.MovingAverage",
        "ragen_pl.modules.reference.AdaptersOff",
    ],
)
def test_components_of_an_algorithm_need_no_trust(path):
    assert declared_trust(path) == ()


@pytest.mark.parametrize(
    ("name", "declared"),
    [("JudgedReward", ()), ("RubricJudge", ("criteria",)), ("EndpointJudge", ("*",))],
)
def test_a_judge_of_others_names_no_patterns_and_no_endpoint(name, declared):
    assert declared_trust(f"ragen_pl.rewards.judged.{name}") == declared


def test_a_class_without_a_declaration_is_refused(run, monkeypatch):
    monkeypatch.setattr(trust, "declared_trust", lambda path: None)
    with pytest.raises(ConfigError, match=r"(env\.target|model\.build\._target_)=.* may start"):
        resolved(f"ckpt={run}")


@functools.cache
def ordinary() -> dict[str, Any]:
    """Return the config of a run."""
    cfg = composed("env=frozenlake", "model=small_lm", "validation.baselines=null")
    return OmegaConf.to_container(cfg, resolve=True)


def make_run(folder: Path, **changes: Any) -> Path:
    """Write a run of nobody: its config without a signature, and a checkpoint without weights."""
    settings = OmegaConf.create(ordinary())
    for key, value in changes.items():
        OmegaConf.update(settings, key.replace("__", "."), value, merge=False, force_add=True)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(settings))
    torch.save({"state_dict": {}}, folder / "checkpoints" / "last.ckpt")
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    return make_run(tmp_path / "run")


def hostile(declared: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield arguments that a class needs trust for: a text, in a list or in a mapping."""
    values = itertools.cycle(["hostile", ["sh", "-c"], {"A": {"B": "hostile"}}])
    for pattern in declared:
        first, *inner = pattern.replace("*", "x").split(".")
        given: Any = next(values)
        for name in reversed(inner):
            given = {name: given}
        yield {first: given}


def places(name: str, path: str) -> Iterator[dict[str, Any]]:
    """Yield changes of a run's config with hostile settings of a class, in each place that may name it."""
    holders = itertools.cycle(["model__build", "validation__baselines", "rollout__engine"])
    for arguments in hostile(declared_trust(path) or ()):
        if path.startswith(("ragen_pl.envs.", "ragen_pl.visual_envs.", "ragen_pl.agent_programs.")):
            yield {"env__target": name, "env__kwargs": arguments}
            if path.startswith("ragen_pl.agent_programs."):
                # keys that those of the class refer to
                yield {"env__target": name, "env__kwargs": {}} | {
                    f"env__{key}": value for key, value in arguments.items()
                }
        else:
            place = next(holders)
            node = {"_target_": name, **arguments}
            yield {place: {"x": node} if place == "validation__baselines" else node}


NEEDS = {name: path for name, path in SHIPPED.items() if declared_trust(path)}


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_hostile_settings_of_every_shipped_class_are_refused(name, tmp_path):
    for number, changes in enumerate(places(name, NEEDS[name])):
        folder = make_run(tmp_path / str(number), **changes)
        with pytest.raises(ConfigError, match=r"config\.yaml: .*trust=true$") as caught:
            resolved(f"ckpt={folder}")
        assert "\n" not in str(caught.value)
        if next(iter(changes)).startswith("model__"):
            with pytest.raises(ConfigError, match=r"set trust=true$"):
                read_settings(folder / "config.yaml", trusted=False)


PROGRAM = "ragen_pl.agent_programs.environment.ProgramEnvironment"


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("kind", ["run", "exported"])
def test_no_command_starts_what_a_folder_says(name, kind, command, tmp_path):
    mark = tmp_path / "mark"
    changes = {
        "env__target": PROGRAM,
        "env__kwargs": {"command": ["sh", "-c", f"touch {mark}"], "max_calls": 5},
        "env__prompt_format": "native",
    }
    folder = make_run(tmp_path / "run", **changes)
    if kind == "exported":
        settings = {"settings": OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))}
        folder = tmp_path / "exported"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
        (folder / "ragen_pl.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(settings)))
    to = {"evaluate": ["to=out"], "export": ["to=out"]}.get(name, [])
    refused = command(name, f"ckpt={folder}", *to).refused()
    assert "env.kwargs.command.0=sh: by it" in refused and not mark.exists()


def test_the_same_settings_of_this_account_are_taken(tmp_path):
    folder = make_run(tmp_path / "run", env__target=PROGRAM, env__kwargs={"command": ["sh"]})
    assert resolved(f"ckpt={folder}", "trust=true")
    own_files.write_settings(folder / "config.yaml", (folder / "config.yaml").read_text())
    assert resolved(f"ckpt={folder}")
    assert read_settings(folder / "config.yaml", trusted=False).env.kwargs.command == ["sh"]


def test_the_command_line_replaces_what_a_folder_says(tmp_path):
    kwargs = {"command": ["sh", "-c", "x"], "variables": {"A": "theirs", "B": "theirs"}}
    folder = make_run(tmp_path / "run", env__target=PROGRAM, env__kwargs=kwargs)
    own = ("env.kwargs.command=[python,mine.py]", "env.kwargs.variables={A: mine}")
    with pytest.raises(ConfigError, match=r"env\.kwargs\.variables\.B=theirs"):
        resolved(f"ckpt={folder}", *own)
    assert resolved(f"ckpt={folder}", *own, "env.kwargs.variables.B=mine")
    # another class on the command line gets no arguments of the file either
    folder = make_run(tmp_path / "other", env__kwargs={"command": ["sh"]})
    with pytest.raises(ConfigError, match=r"env\.kwargs\.command\.0=sh"):
        resolved(f"ckpt={folder}", f"env.target={PROGRAM}")


def test_replay_imports_no_module_that_a_folder_names(tmp_path, command):
    mark = tmp_path / "mark"
    (tmp_path / "theirs.py").write_text(f"open({str(mark)!r}, 'w')")
    for number, changes in enumerate(
        (
            {"env__target": "theirs.Env"},
            {"env__target": "theirs:ragen/Env-v0"},
            {"update__x": {"_target_": "theirs.Env"}},
            {"rollout__adaptive_temperature": {"_target_": "theirs.Env"}},
            {"algorithm__critic_build": {"_target_": "theirs.Env"}},
        )
    ):
        folder = make_run(tmp_path / str(number), **changes)
        refused = command("replay", recorded(folder)).refused()
        assert "theirs" in refused and refused.endswith("set trust=true") and not mark.exists()


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a]\nenv: [*b, *b]\n",
        "env: " + "[" * 5000,
        "env: " + "1" * 5000,
        "env: " + "1:" * 3000 + "1",
        'env: !!int "0x' + "f" * 6000 + '"',
        'env: !!float "' + "1:" * 3000 + '1"',
        "env: [" + "x, " * 30_000 + "x]",
        "a: " + "x" * 300_000,
        "env: 3\nmodel: {build: {}}\n",
        "model: {build: {}}\n",
        "env: {}\nmodel: 5\n",
        "env: {}\nmodel: {build: {}}\nrollout: []\n",
        "- a\n",
        "\x00",
    ],
    ids=range(14),
)
def test_settings_that_are_large_deep_or_of_other_types_are_refused(text, run, command):
    (run / "config.yaml").write_text(text)
    assert "config.yaml" in command("evaluate", f"ckpt={run}", "to=out").refused()
    assert "config.yaml" in command("replay", recorded(run), "device=cpu").refused()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ([1], "config.yaml: env.kwargs=[1]: expected a group of settings"),
        ("x", "config.yaml: env.kwargs=x: expected a group of settings"),
        ({"a.b": 1}, "unknown key env.kwargs.a.b: "),
    ],
    ids=["list", "text", "dot"],
)
def test_arguments_of_an_environment_of_other_types_are_refused(kwargs, message, run, command):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["env"]["kwargs"] = kwargs
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert message in command("evaluate", f"ckpt={run}", "to=out").refused()


class Listener(http.server.BaseHTTPRequestHandler):
    """A server of somebody else, which notes what it is sent."""

    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(f"{self.path} {self.headers}")
        self.send_response(200)
        self.end_headers()

    do_POST = do_PUT = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def listener(monkeypatch) -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and what it was sent."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    seen: list[str] = []
    handler = type("Handler", (Listener,), {"seen": seen})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


def tracked(run: Path, uri: str) -> Path:
    (run / "mlflow_run.json").write_text(json.dumps({"run_id": "1" * 32, "tracking_uri": uri}))
    (run / "mlflow").mkdir()
    call = {"call": "file", "path": "config.yaml", "place": None}
    (run / "mlflow" / "calls.jsonl").write_text(json.dumps(call) + "\n")
    return run


def test_sync_sends_nothing_where_a_folder_says(run, command, listener):
    uri, seen = listener
    tracked(run, uri)
    before = sorted(run.rglob("*"))
    refused = command("sync", f"run={run}").refused()
    assert refused.startswith(f"run={run}: mlflow_run.json names {uri}, and nothing shows")
    assert not seen and sorted(run.rglob("*")) == before
    for damaged in ("[]", "{", '{"run_id": 1, "tracking_uri": []}', "[" * 10_000):
        (run / "mlflow_run.json").write_text(damaged)
        assert "mlflow_run.json: expected" in command("sync", f"run={run}").refused()


def test_an_address_counts_where_this_account_wrote_it(run, command, listener):
    """Not where the run's own config.yaml lies beside somebody else's file, which may be a copy of it."""
    uri, seen = listener
    tracked(run, uri)
    own_files.write_settings(run / "config.yaml", (run / "config.yaml").read_text())
    assert own_files.is_own(run / "config.yaml")
    assert "and nothing shows" in command("sync", f"run={run}").refused() and not seen
    write_run_file(run, run_id="1" * 32, uri=uri)
    command("sync", f"run={run}")
    assert seen


def test_a_resumed_run_sends_nothing_where_a_folder_says(run, listener):
    uri, seen = listener
    tracked(run, uri)
    settings = {"trust": False, "paths": {"root": str(run.parent)}}
    with pytest.raises(
        ConfigError, match=r"mlflow_run\.json: tracking_uri=http.*set \+logger\.uri"
    ):
        RunLogger(run_dir=str(run), settings=settings)
    assert not seen


def test_links_are_never_sent(run, tmp_path):
    from ragen_pl.tracking.mlflow_outbox import MlflowSender

    secret = tmp_path / "secret"
    secret.write_text("secret")
    tracked(run, "sqlite:///none.db")
    (run / "plots").mkdir()
    os.symlink(secret, run / "plots" / "a.png")
    os.symlink(run / "checkpoints", run / "inside")
    os.mkfifo(run / "pipe")
    (run / "apart").mkdir()
    os.symlink(tmp_path, run / "apart" / "all")
    sender, client = MlflowSender(run), Mock()
    sender._client = client
    for path in (
        "plots",
        "plots/a.png",
        "inside",
        "inside/last.ckpt",
        "apart",
        "pipe",
        "../secret",
        str(secret),
    ):
        for call in ("file", "folder"):
            with pytest.raises(RefusedError):
                sender.send({"call": call, "path": path, "place": None})
    with pytest.raises(RefusedError):
        sender.send({"call": "traces", "path": "apart/all", "count": 1})
    points = tmp_path / "points.jsonl"
    points.write_text('{"step": 1, "time": 1.0, "metrics": {"secret": 1}}\n')
    os.symlink(points, run / "metrics.jsonl")
    with pytest.raises(RefusedError, match=r"metrics\.jsonl"):
        sender.send({"call": "points", "at": 0, "thinned": False})
    with pytest.raises(ForeignFileError, match=r"metrics\.jsonl is a link"):
        MetricsRecord(run)
    assert points.read_text().count("\n") == 1
    assert {call[0] for call in client.method_calls} <= {"get_run"}


def test_calls_of_somebody_else_stay_in_the_store_of_this_account(
    run, command, listener, empty_store, tmp_path, monkeypatch
):
    far, seen = listener
    store = Path(shutil.copy(empty_store, tmp_path / "mlflow.db"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}")
    (tmp_path / "mine").mkdir()
    tracked(run, f"sqlite:///{store}")
    start = {"call": "start", "experiment": "theirs", "name": "a", "tags": {}, "artifacts": far}
    outside = (str(tmp_path / "mine"), "../../../../mine", "%2e%2e/mine", "file:///mine", "")
    calls = [
        start,
        *({"call": "remove", "place": place} for place in outside),
        *({"call": "text", "text": "a", "file": place} for place in outside),
        *({"call": "file", "path": "config.yaml", "place": place} for place in outside),
        {"call": "metrics", "points": [["a", 1.0, 10**30, 1]]},
        {"call": "params", "values": [1]},
        {"call": "status", "status": "GONE", "time": 1},
        {"call": ["text"]},
        {"call": "tag"},
        7,
    ]
    lines = [*map(json.dumps, calls), "\xff", "[" * 10_000]
    last = {"call": "text", "text": "whole", "file": "texts/a.txt"}
    content = "\n".join([*lines, json.dumps(last)]) + "\n"
    (run / "mlflow" / "calls.jsonl").write_bytes(content.encode("latin1"))
    sent = command("sync", f"run={run}")
    assert sent.code == 0 and "has all of" in sent.stdout
    assert sent.stdout.count("is left out") == len(lines) - 1
    assert not seen and (tmp_path / "mine").is_dir()
    (written,) = (file for file in tmp_path.rglob("*.txt"))
    assert written.read_text() == "whole"
    assert written.is_relative_to(tmp_path / "mlartifacts")


@pytest.fixture
def store(empty_store, tmp_path, monkeypatch) -> str:
    """Address of a store of this account."""
    store = Path(shutil.copy(empty_store, tmp_path / "mlflow.db"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}")
    return f"sqlite:///{store}"


def stored(uri: str, folder: Path) -> dict[str, str]:
    """Return the tags of a folder's MLflow run."""
    from mlflow.tracking import MlflowClient

    tags: dict[str, str] = MlflowClient(uri).get_run(known_run(folder)["run_id"]).data.tags
    return tags


def test_no_folder_changes_the_mlflow_run_of_another_one(run, command, store, tmp_path, capsys):
    from ragen_pl.tracking.mlflow_outbox import start_run

    mine = tmp_path / "mine"
    start_run(mine, experiment="mine", uri=store)
    before = stored(store, mine)
    foreign = {"run_id": known_run(mine)["run_id"], "tracking_uri": store}
    call = json.dumps({"call": "tag", "key": "changed", "value": "yes"}) + "\n"
    (run / "mlflow").mkdir()
    # its own words, or a copy of what this account wrote
    for content in (json.dumps(foreign), (mine / "mlflow_run.json").read_text()):
        (run / "mlflow_run.json").write_text(content)
        (run / "mlflow" / "calls.jsonl").write_text(call)
        refused = command("sync", f"run={run}").refused()
        assert f"is that of the folder {mine}, not of {run}" in refused
        logger = RunLogger(run_dir=str(run), settings={"trust": False})
        logger.close()
        assert f"is that of the folder {mine}, not of {run}" in capsys.readouterr().out
        assert stored(store, mine) == before
        tables = log_evaluation({}, cfg={"traces": 0}, folder=run, run=known_run(run), of=run)
        assert tables.startswith("not logged: the MLflow run")
    (run / "mlflow" / "calls.jsonl").write_text(call)
    assert command("sync", f"run={run}", "trust=true").code == 0
    assert stored(store, mine)["changed"] == "yes"


def test_the_mlflow_run_of_a_folder_that_was_moved_goes_on(run, command, store, tmp_path):
    from ragen_pl.tracking.mlflow_outbox import start_run

    mine = tmp_path / "mine"
    start_run(mine, experiment="mine", uri=store)
    moved = mine.rename(tmp_path / "moved")
    (moved / "mlflow").mkdir()
    call = json.dumps({"call": "tag", "key": "changed", "value": "yes"}) + "\n"
    (moved / "mlflow" / "calls.jsonl").write_text(call)
    assert command("sync", f"run={moved}").code == 0
    assert stored(store, moved)["changed"] == "yes" and stored(store, moved)["run_dir"] == str(
        moved
    )


def test_a_copy_of_own_settings_vouches_for_nothing_beside_it(run, command, tmp_path):
    """What this account wrote is taken at its word in any folder, and links in no other than its own."""
    settings = run / "config.yaml"
    own_files.write_settings(settings, settings.read_text())
    copied = Path(shutil.copytree(run, tmp_path / "theirs"))
    for folder in (run, copied):
        assert own_files.is_own(folder / "config.yaml")
        assert own_files.is_own_folder(folder / "config.yaml") == (folder == run)
        _linked(folder / "checkpoints" / "best.ckpt", tmp_path / "secret")
    for name, more in (("evaluate", ["to=out"]), ("play", ["save=null"]), ("export", ["to=out"])):
        refused = command(name, f"ckpt={copied}", "device=cpu", *more).refused()
        assert "best.ckpt is a link that leads out of the folder" in refused
    read_settings(settings, trusted=False)
    with pytest.raises(ConfigError, match=r"best\.ckpt is a link"):
        read_settings(copied / "config.yaml", trusted=False)


def test_positions_of_somebody_else_are_points_of_the_runs_record(
    run, command, empty_store, tmp_path, monkeypatch
):
    from mlflow.tracking import MlflowClient

    store = Path(shutil.copy(empty_store, tmp_path / "mlflow.db"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}")
    tracked(run, f"sqlite:///{store}")
    start = {"call": "start", "experiment": "theirs", "name": "a", "tags": {}}
    lines = [
        {"step": 1, "time": "inf", "metrics": {"bad": 1}},
        {"step": 1, "time": 1e200, "metrics": {"bad": 1}},
        {"step": 1e200, "time": 1.0, "metrics": {"bad": 1}},
        {"step": 1, "metrics": {"bad": 1}},
        {"step": 1, "time": 1.0, "metrics": [["bad", 1]]},
        {"keep": 1},
        7,
        {"step": 1, "time": 1.0, "metrics": {"good": 0.5, "val/good": 0.25}},
    ]
    texts = [json.dumps(line) + "\n" for line in lines]
    (run / "metrics.jsonl").write_text("".join(texts) + "{" * 10_000 + "\n")
    starts = [sum(map(len, texts[:number])) for number in range(len(texts) + 1)]
    places = (*starts[:-2], starts[-1], 1, starts[-2] + 1, -1, 2**63 - 1, 2**63, 1.0, True, "0")
    good = {"call": "points", "at": starts[-2], "thinned": True}
    calls = [
        *({"call": "points", "at": at, "thinned": False} for at in places),
        {"call": "points", "at": starts[-2]},
        good | {"thinned": "yes"},
        good | {"path": "config.yaml"},
        good | {"file": "/dev/zero"},
    ]
    content = "".join(json.dumps(call) + "\n" for call in [start, *calls, good])
    (run / "mlflow" / "calls.jsonl").write_text(content)
    sent = command("sync", f"run={run}")
    assert sent.code == 0 and "has all of" in sent.stdout
    assert sent.stdout.count("is left out") == len(calls)
    client = MlflowClient(f"sqlite:///{store}")
    stored = client.get_run(json.loads((run / "mlflow_run.json").read_text())["run_id"])
    assert stored.data.metrics == {"val/good": 0.25}


LINKED: dict[str, Callable[[Path, Path], None]] = {
    "lock": lambda run, secret: _linked(run / "run.lock", secret),
    "pipe": lambda run, secret: os.mkfifo(run / "starts.jsonl"),
    "checkpoint": lambda run, secret: _linked(run / "checkpoints" / "best.ckpt", secret),
    "folder": lambda run, secret: _linked(run / "csv", secret.parent),
    "deep": lambda run, secret: _linked(run / "trajectories" / "a" / "b", secret),
}


def _linked(place: Path, secret: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(secret, place)


@pytest.mark.parametrize("kind", LINKED)
def test_a_folder_with_links_out_of_it_or_pipes_is_refused(run, tmp_path, command, kind):
    found = "is no plain file" if kind == "pipe" else "is a link that leads out"
    (tmp_path / "secret").write_text("secret")
    LINKED[kind](run, tmp_path / "secret")
    for name in COMMANDS:
        more = ["to=out"] if name in ("evaluate", "export") else []
        assert found in command(name, f"ckpt={run}", *more).refused(), name
    assert found in command("replay", recorded(run)).refused()
    assert found in command("sync", f"run={run}").refused()
    cfg = composed("env=frozenlake", f"paths.run_dir={run}")
    resumed = Run(run, run / "checkpoints" / "last.ckpt", resumed=True)
    for one in (resumed, Run(run)):
        with pytest.raises(ConfigError, match=found), open_run(cfg, one):
            pass
    assert (tmp_path / "secret").read_text() == "secret"


def test_page_reads_no_file_behind_a_link(tmp_path, command):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "records").mkdir()
    os.symlink(tmp_path / "secret", tmp_path / "records" / "trajectories.jsonl")
    refused = command("page", f"records={tmp_path}/records").refused()
    assert "is a link that leads out" in refused and "secret'" not in refused
