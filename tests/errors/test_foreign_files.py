"""Files of somebody else run no code: checkpoints, settings of runs and of exported models, models' folders."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from ragen_pl.config import own_files
from ragen_pl.evaluation.mlflow_log import tracked_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("composed_once"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]
EVALUATE = ("mlflow=false", "validation.episodes=2", "trajectories=false", "device=cpu")


class Hostile:
    """Object whose pickle makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.makedirs, (str(self.mark), 0o777, True)


@pytest.fixture
def foreign(run, monkeypatch, tmp_path) -> Path:
    """The folder of a run of another account."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    return run


@pytest.fixture
def mark(tmp_path) -> Path:
    """A file that hostile code makes."""
    return tmp_path / "mark"


def commands(
    run: Path, command: Callable, fit: Callable, tiny: tuple[str, ...]
) -> dict[str, Callable]:
    """Return the commands that read a run's last checkpoint, by name."""
    ckpt = f"ckpt={run}"
    return {
        "evaluate": lambda *more: command("evaluate", ckpt, *EVALUATE, "to=out", *more),
        "play": lambda *more: command("play", ckpt, "save=null", "device=cpu", *more),
        "export": lambda *more: command("export", ckpt, "to=exported", *more),
        "go on": lambda *more: fit(
            *tiny, f"paths.run_dir={run}", "ckpt_path=last", "trainer.max_epochs=2", *more
        ),
        "begin with it": lambda *more: fit(
            *tiny, f"warm_start.weights={run}/checkpoints/last.ckpt", "paths.run_dir=new", *more
        ),
    }


def sharded(run: Path) -> Path:
    """Turn a run's last checkpoint into a sharded one and return the folder of its tensors."""
    from ragen_pl.checkpoints.sharded_checkpoint import folder_for, save_shards

    last = run / "checkpoints" / "last.ckpt"
    saved = torch.load(last)
    folder = folder_for(last, unique="0" * 8)
    save_shards(saved, folder)
    torch.save(saved, last)
    return folder


def test_no_file_of_a_checkpoint_runs_code(run, command, fit, tiny, mark):
    folder, last = sharded(run), run / "checkpoints" / "last.ckpt"
    last.with_name("best.ckpt").unlink()  # no other checkpoint can be taken instead
    listed, shard = folder / ".metadata", folder / "__0_0.distcp"
    hostile: dict[Path, Callable[[], object]] = {
        last: lambda: torch.save({**torch.load(last), "x": Hostile(mark)}, last),
        listed: lambda: listed.write_bytes(pickle.dumps(Hostile(mark))),
        shard: lambda: torch.save(Hostile(mark), shard),
    }
    for file, write in hostile.items():
        whole = file.read_bytes()
        write()
        calls = commands(run, command, fit, tiny)
        # these three read it in one place
        for name in calls if file == listed else calls.keys() - {"play", "export"}:
            message = calls[name]().refused()
            assert not mark.exists(), (file, name)
            assert file == shard or "makedirs" in message, (file, name, message)
        file.write_bytes(whole)
    # they are read as they were
    for name in ("evaluate", "go on"):
        result = commands(run, command, fit, tiny)[name]()
        assert result.code == 0, (name, result.stderr)


def test_an_object_of_a_callback_is_read_where_its_author_is_trusted(run, command, fit, tiny, mark):
    last = run / "checkpoints" / "last.ckpt"
    saved = torch.load(last)
    torch.save({**saved, "mine": Hostile(mark)}, last)
    call = commands(run, command, fit, tiny)["go on"]
    message = call().refused()
    assert "holds os.makedirs, which is neither a tensor nor plain data" in message
    assert message.endswith("give another checkpoint, or set trust=true if you trust its author")
    assert not mark.exists()
    assert call("trust=true").code == 0 and mark.exists()


def changed(run: Path, key: str, value: object, *, name: str = "config.yaml") -> None:
    """Change a setting in a run's file."""
    settings = OmegaConf.load(run / name)
    OmegaConf.update(settings, key, value, force_add=True)
    (run / name).write_text(OmegaConf.to_yaml(settings))


CODE = [
    ("env", {"target": "subprocess.getoutput", "kwargs": {"cmd": "touch mark"}}, "env.target=subprocess.getoutput"),
    ("env.target", "os:touch/mark", "env.target=os:touch/mark"),
    ("env", {"target": "mine.Env"}, "env.target=mine.Env"),
    ("env", {"target": "envs.adapters.gym.Gym", "kwargs": {"id": "mine:Env-v0"}}, "env.kwargs.id=mine:Env-v0"),
    ("env", {"target": "envs.adapters.gym.Gym", "kwargs": {"id": " mine: x"}}, "env.kwargs.id= mine: x"),
    ("model.build.lora", {"megatron_core": "mine", "megatron_config": {}}, "model.build.lora.megatron_core=mine"),
    ("env", {"target": "envs.adapters.openenv.OpenEnv", "kwargs": {"urls": ["http://far.away"]}}, "env.kwargs.urls"),
    ("env.kwargs.size", "${oc.env:HOME}", "env.kwargs.size=${oc.env:HOME}: refers to another value"),
    ("model.build._target_", "mine.build", "model.build._target_=mine.build"),
    ("model.build._target_", "hydra.utils.instantiate", "model.build._target_=hydra.utils.instantiate"),
    ("model.build._target_", "ragen_pl.checkpoints.sharded_checkpoint.shutil.rmtree", "model.build._target_=ragen_pl"),
    ("model.build.text", {"a": {"_target_": "mine.build", "_partial_": True}}, "model.build.text.a._target_=mine"),
    ("model.build.text", {"a": [{"_target_": ["mine"]}]}, "model.build.text.a.0._target_="),
    ("validation.baselines", {"b": {"_target_": "mine.Player"}}, "validation.baselines.b._target_=mine.Player"),
    ("rollout.engine._target_", "ragen_pl.engines.vllm.engine.VLLMEngine", "rollout.engine._target_=ragen_pl"),
    ("rollout.engine.settings", {"worker_cls": "mine.Worker"}, "rollout.engine.settings.worker_cls=mine.Worker"),
    ("context.system_prompt", "key ${oc.env:HOME}", "context.system_prompt=key ${oc.env:HOME}: refers"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "message"), CODE, ids=[case[2][:60] for case in CODE])
def test_settings_of_somebody_else_name_no_code(foreign, command, mark, key, value, message):
    (foreign.parent / "mine.py").write_text(f"open({str(mark)!r}, 'w')")
    changed(foreign, key, value)
    for name in ("evaluate", "play", "export") if key == "env.target" else ("evaluate",):
        refused = command(name, f"ckpt={foreign}").refused()
        assert refused.startswith(f"{foreign}/config.yaml: {message}") and "trust=true" in refused
        assert not mark.exists()


def test_settings_of_somebody_else_that_name_what_is_shipped_are_taken(foreign, command):
    changed(foreign, "context.turn_template", "Now:{observation}")
    assert command("evaluate", f"ckpt={foreign}", *EVALUATE, "to=out").code == 0


PLAYER = """
from envs.frozen_lake import FrozenLake
class Env(FrozenLake):
    pass
class Player:
    def act(self, env, rng):
        return 0
"""


def test_own_code_needs_no_word_where_this_account_named_it(run, command, monkeypatch, tmp_path):
    module = tmp_path / "my_player.py"
    module.write_text(PLAYER)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = run / "config.yaml"
    settings = OmegaConf.load(file)
    settings.env.target = "my_player.Env"
    settings.validation.baselines = {"mine": {"_target_": "my_player.Player"}}
    text = OmegaConf.to_yaml(settings)
    own_files.write_settings(file, text)
    evaluate = ("evaluate", f"ckpt={run}", *EVALUATE, "to=out")
    assert command(*evaluate).code == 0
    # changed by hand, or of another account: then the command line says it again
    file.write_text(file.read_text().replace("seed: 0", "seed: 1"))
    assert "my_player" in command(*evaluate).refused()
    own_files.write_settings(file, text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    assert "env.target=my_player.Env" in command(*evaluate).refused()
    named = ["env.target=my_player.Env", "validation.baselines.mine._target_=my_player.Player"]
    assert "my_player.Player" in command(*evaluate, named[0]).refused()
    assert command(*evaluate, *named).code == 0
    assert command(*evaluate, "env=frozenlake").code == 0
    assert command(*evaluate, "trust=true").code == 0


def test_an_account_without_a_key_signs_nothing(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    own_files.write_settings(file, "a: 1\n")
    assert own_files.is_own(file) and OmegaConf.load(file) == {"a": 1}
    file.write_text(file.read_text() + "b: 2\n")
    assert not own_files.is_own(file)
    assert own_files.key_file().stat().st_mode & 0o077 == 0
    (tmp_path / "blocked").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "blocked"))
    own_files.write_settings(file, "a: 1\n")
    assert file.read_text() == "a: 1\n" and not own_files.is_own(file)


def test_evaluations_are_not_logged_where_somebody_elses_run_says(foreign, command):
    place = foreign.parent / "far" / "mlflow.db"
    (foreign / "mlflow_run.json").write_text(
        json.dumps({"run_id": "1" * 32, "tracking_uri": f"sqlite:///{place}"})
    )
    shown = command("evaluate", f"ckpt={foreign}", *EVALUATE[1:], "to=out")
    assert shown.code == 0 and not place.parent.exists()
    assert "not logged" in shown.stdout
    settings = {
        "mlflow": True,
        "trust": True,
        "source": {"run": str(foreign)},
        "paths": {"root": "runs"},
    }
    cfg = OmegaConf.create(settings)
    assert tracked_run(cfg)["tracking_uri"] == f"sqlite:///{place}"
    cfg.trust = False
    assert tracked_run(cfg) is None
    cfg.paths.root = str(place.parent)
    assert tracked_run(cfg) is not None


@pytest.fixture
def exported(foreign, command) -> Path:
    """A folder that another account has exported."""
    assert command("export", f"ckpt={foreign}", "to=exported").code == 0
    return foreign.parent / "exported"


def test_an_exported_folder_of_somebody_else_runs_no_code(exported, command, fit, mark):
    evaluate = ("evaluate", f"ckpt={exported}", *EVALUATE, "to=out")
    begin = (
        "env=frozenlake",
        "model=pretrained",
        f"model.build.path={exported}",
        "warm_start=none",
        "memory.check=false",
    )
    assert command(*evaluate).code == 0
    settings = (exported / "ragen_pl.yaml").read_text()
    changed(exported, "settings.env.target", "subprocess.getoutput", name="ragen_pl.yaml")
    assert "env.target=subprocess.getoutput names code" in command(*evaluate).refused()
    (exported / "ragen_pl.yaml").write_text(settings)
    (exported / "code.py").write_text(f"open({str(mark)!r}, 'w')")
    (exported / "custom_generate").mkdir()
    shutil.copy(exported / "code.py", exported / "custom_generate" / "generate.py")
    maps = {
        "config.json": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
        "tokenizer_config.json": {"AutoTokenizer": ["code.T", "code.T"]},
    }
    known = {
        name: json.loads((exported / name).read_text()) | {"auto_map": auto_map}
        for name, auto_map in maps.items()
    }
    # of a class that only the folder's code would define, and of one that transformers knows
    for more in ({"model_type": "other", "tokenizer_class": "Other"}, {}):
        for name, content in known.items():
            (exported / name).write_text(json.dumps(content | more))
        for result in (command(*evaluate), fit(*begin)):
            assert result.code in (0, 2) and "[y/N]" not in result.stdout + result.stderr
            assert not mark.exists()
    assert result.code == 0
    (exported / "model.safetensors").unlink()
    torch.save(Hostile(mark), exported / "pytorch_model.bin")
    assert command(*evaluate).code not in (0, None)
    assert not mark.exists()


@pytest.mark.parametrize(
    "line",
    [
        '{"schema": 2, "turns": []}',
        '{"schema": 2, "group": 0, "seed": 0, "turns": [{"images": [{}]}]}',
        "[" * 100_000,
        "7",
    ],
    ids=["no group", "no prompt", "deep", "number"],
)
def test_a_damaged_record_is_refused(command, tmp_path, line):
    (tmp_path / "trajectories.jsonl").write_text(line + "\n")
    assert command("page", f"records={tmp_path}").refused().startswith(f"records={tmp_path}: ")
