"""Files of somebody else that would take far more time or memory than they have bytes, and models' folders."""

from __future__ import annotations

import functools
import json
import os
import pickle
import resource
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support.runs.composing import composed, evaluation_config
from support.runs.recorded_steps import empty_step

from ragen_pl.assembly.build import build_bundle, build_context
from ragen_pl.assembly.weights import load_bundle, read_checkpoint
from ragen_pl.base.foreign_files import model_folder_problem
from ragen_pl.base.tensor_files import load_plain
from ragen_pl.checkpoints.checkpoint_check import problem_of
from ragen_pl.checkpoints.sharded_checkpoint import folder_for, read_shards, save_shards
from ragen_pl.config import ConfigError
from ragen_pl.data.recorded_step import RecordedStep
from ragen_pl.models.build import load_pretrained
from ragen_pl.replaying.step import Recorded, build_module

MIB = 1 << 20


def compressed(file: Path) -> None:
    """Write a checkpoint whose pickle is a thousand times as long as its file."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "archive/data.pkl", pickle.dumps({"state_dict": {}, "x": "0" * (300 * MIB)}, 2)
        )
        archive.writestr("archive/version", "3\n")


def overlapping(file: Path) -> None:
    """Write a checkpoint whose directory names the same bytes many times."""
    torch.save({"state_dict": {"a": torch.zeros(MIB)}}, file)
    content = file.read_bytes()
    end = content.rindex(b"PK\x05\x06")
    first, length = content.index(b"PK\x01\x02"), end - content.index(b"PK\x01\x02")
    entries = content[first:end] * 50
    tail = bytearray(content[end:])
    count = int.from_bytes(tail[8:10], "little") * 50
    tail[8:10] = tail[10:12] = count.to_bytes(2, "little")
    tail[12:16] = (length * 50).to_bytes(4, "little")
    tail[16:20] = first.to_bytes(4, "little")
    file.write_bytes(content[:first] + entries + bytes(tail))


def expanded(file: Path) -> None:
    torch.save({"state_dict": {"a": torch.zeros(1).expand(2**40)}}, file)


def expanded_often(file: Path) -> None:
    base = torch.zeros(2 * MIB)
    views = {str(n): base[n:].unfold(0, MIB, 1)[: 100 + n] for n in range(30)}
    torch.save({"state_dict": views}, file)


def sparse(file: Path) -> None:
    huge = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1), (2**40,))
    torch.save({"state_dict": {"a": huge}}, file)


def meta(file: Path) -> None:
    torch.save({"state_dict": {"a": torch.empty(2**40, device="meta")}}, file)


def doubling(file: Path) -> None:
    """Write a checkpoint of lists in lists, which a walk through it would see 2^40 times."""
    inner: list[Any] = [1]
    for _ in range(40):
        inner = [inner, inner]
    torch.save({"state_dict": {}, "x": inner}, file)


def nested(file: Path) -> None:
    inner: list[Any] = []
    for _ in range(300):
        inner = [inner]
    torch.save({"state_dict": {}, "x": inner}, file)


def circular(file: Path) -> None:
    inner: list[Any] = []
    inner.append(inner)
    torch.save({"state_dict": {}, "x": inner}, file)


def with_pickle(file: Path, content: bytes) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")


def copies() -> bytes:
    """Return a pickle that copies a text of 1 MB three thousand times."""
    text = b"X" + MIB.to_bytes(4, "little") + b"a" * MIB
    begin = b"\x80\x02]q\x00" + text + b"q\x010X\x05\x00\x00\x00asciiq\x020c_codecs\nencode\nq\x030"
    return begin + b"h\x00" + b"(" + b"h\x03h\x01h\x02\x86R" * 3000 + b"e."


def copying(file: Path) -> None:
    """Write a checkpoint with these copies."""
    with_pickle(file, copies())


def roomy(file: Path) -> None:
    """Write a checkpoint that asks for an array of 100 GB."""
    with_pickle(
        file, b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + (10**11).to_bytes(5, "little") + b"\x85R."
    )


BOMBS: tuple[Callable[[Path], None], ...] = (
    compressed, overlapping, expanded, expanded_often, sparse, meta, doubling, nested, circular, copying, roomy,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:(Sparse|Validating sparse)")
@pytest.mark.parametrize("write", BOMBS, ids=[each.__name__ for each in BOMBS])
def test_a_checkpoint_takes_as_much_as_its_file_has(write, tmp_path):
    file = tmp_path / "last.ckpt"
    write(file)
    used, largest = _processor_s(), _peak()
    for read in (
        load_plain,
        lambda path: read_checkpoint(path, source="ckpt", hint="give another"),
        RecordedStep.read,
    ):
        with pytest.raises((ValueError, ConfigError)) as caught:
            read(file)
        assert "\n" not in str(caught.value) and str(file) in str(caught.value)
    assert _processor_s() - used < 20 and _peak() - largest < 400 * MIB
    if write in (compressed, overlapping):
        assert problem_of(file) is not None


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_ordinary_checkpoints_are_read(tmp_path):
    file = tmp_path / "last.ckpt"
    layer = torch.nn.Linear(300, 300)
    shared = {"betas": (0.9, 0.999), "rows": [torch.arange(5)] * 20}
    saved = {
        "state_dict": layer.state_dict(),
        "tied": layer.weight,
        "mask": torch.ones(1, 8).bool().expand(64, 8),
        "groups": [shared, shared],
        "blob": bytes(range(256)) * 100,
        "set": {1, 2},
    }
    torch.save(saved, file)
    read = load_plain(file)
    assert torch.equal(read["state_dict"]["weight"], layer.weight) and read["blob"] == saved["blob"]
    assert read["groups"][0]["betas"] == (0.9, 0.999) and read["set"] == {1, 2}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_lists_no_more_than_it_has(tmp_path):
    file = tmp_path / "last.ckpt"
    folder = folder_for(file, unique="0" * 8)
    checkpoint = {"state_dict": {"a": torch.ones(1000)}}
    save_shards(checkpoint, folder)
    assert torch.equal(read_shards(checkpoint, file)["state_dict"]["a"], torch.ones(1000))
    listed = pickle.loads((folder / ".metadata").read_bytes())
    listed.state_dict_metadata["weights/a"].size = torch.Size([2**40])
    (folder / ".metadata").write_bytes(pickle.dumps(listed))
    with pytest.raises(ValueError, match=r"lists tensors of 4398046511104 bytes and has"):
        read_shards(checkpoint, file)


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A sharded checkpoint with one tensor."""
    file = tmp_path / "last.ckpt"
    checkpoint: dict[str, Any] = {"state_dict": {"a": torch.ones(1000)}}
    save_shards(checkpoint, folder_for(file, unique="0" * 8))
    torch.save(checkpoint, file)
    return file


def relist(file: Path, change: Callable[[Any], None]) -> None:
    """Change the list of tensors of a sharded checkpoint."""
    listed = folder_for(file, unique="0" * 8) / ".metadata"
    content = pickle.loads(listed.read_bytes())
    change(content)
    listed.write_bytes(pickle.dumps(content))


def far(listed: Any) -> None:
    for place in listed.storage_data.values():
        place.length = 10**15


def repeated(listed: Any) -> None:
    listed.state_dict_metadata["weights/a"].chunks *= 10**5


def shared(listed: Any) -> None:
    """List two thousand parts of a tensor that are all the same bytes."""
    (index, place), entry = (
        next(iter(listed.storage_data.items())),
        listed.state_dict_metadata["weights/a"],
    )
    parts = [replace(entry.chunks[0], offsets=torch.Size([1000 * n])) for n in range(2000)]
    entry.chunks = parts
    listed.storage_data = {
        replace(index, offset=part.offsets, index=n): place for n, part in enumerate(parts)
    }


def refused_within_limits(file: Path) -> str:
    """Return the message of a sharded checkpoint that takes no more than it has to be refused."""
    used, largest = _processor_s(), _peak()
    problem_of(file)
    with pytest.raises((ValueError, ConfigError, pickle.UnpicklingError)) as caught:
        read_shards(torch.load(file), file)
    assert _processor_s() - used < 20 and _peak() - largest < 400 * MIB
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:(Sparse|Validating sparse|torch.distributed is disabled)")
@pytest.mark.parametrize("write", BOMBS, ids=[each.__name__ for each in BOMBS])
def test_a_tensor_of_a_sharded_checkpoint_takes_as_much_as_it_has(write, sharded):
    shard = folder_for(sharded, unique="0" * 8) / "__0_0.distcp"
    write(shard)
    length = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + bytes(MIB))

    def fit(listed: Any) -> None:
        for place in listed.storage_data.values():
            place.offset, place.length = 0, length

    relist(sharded, fit)
    assert "damaged" in refused_within_limits(sharded)
    if write in (compressed, overlapping, copying, roomy):
        problem = problem_of(sharded)
        assert problem is not None and str(shard) in problem


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("change", [far, repeated, shared])
def test_a_list_of_tensors_names_each_part_once(change, sharded):
    assert problem_of(sharded) is None
    relist(sharded, change)
    refused_within_limits(sharded)
    assert change is repeated or problem_of(sharded) is not None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "content", [b"\x80\x02]r\xff\xff\xff\x7f.", copies()], ids=["place", "copies"]
)
def test_a_list_of_tensors_takes_as_much_as_it_has(content, sharded):
    (folder_for(sharded, unique="0" * 8) / ".metadata").write_bytes(content)
    refused_within_limits(sharded)
    assert problem_of(sharded) is not None


SMALL = (
    "++model.build.text.hidden_size=32", "++model.build.text.intermediate_size=64",
    "++model.build.text.num_hidden_layers=1",
)  # fmt: skip
SMALL_VISION = ("++model.build.vision.depth=1", "++model.build.vision.width=48")
SIZES = [
    ("lm", "text.hidden_size", 2**20),
    ("lm", "text.intermediate_size", 10**11),
    ("lm", "text.num_hidden_layers", 9000),
    ("lm", "text.num_hidden_layers", 10**9),
    ("lm", "text.vocab_size", 10**12),
    ("vlm", "vision.depth", 9000),
    ("vlm", "vision.depth", 10**9),
    ("vlm", "vision.width", 2**20 * 3),
    ("vlm", "vision.mlp_ratio", 1e9),
    ("vlm", "vision.max_cells", 10**6),
]


@pytest.fixture(scope="module")
def their_run(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that makes a run of nobody: a config without a signature, and the weights of its model."""

    @functools.cache
    def make(kind: str) -> Path:
        env = "frozenlake" if kind == "lm" else "frozenlake_visual"
        vision = SMALL_VISION if kind == "vlm" else ()
        cfg = composed(
            f"env={env}", f"model=small_{kind}", "validation.baselines=null", *SMALL, *vision
        )
        folder = tmp_path_factory.mktemp(kind)
        (folder / "checkpoints").mkdir()
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
        weights = build_bundle(cfg).model.state_dict()
        state = {f"policy.model.{name}": value for name, value in weights.items()}
        torch.save({"state_dict": state}, folder / "checkpoints" / "last.ckpt")
        return folder

    return make


def with_size(folder: Path, key: str, value: int, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    cfg = OmegaConf.load(copy / "config.yaml")
    OmegaConf.update(cfg, key, value, force_add=True)
    (copy / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    return copy


@pytest.mark.usefixtures("composed_once")
@pytest.mark.parametrize(("kind", "key", "value"), SIZES, ids=[f"{k} {v}" for _, k, v in SIZES])
def test_settings_make_no_larger_model_than_their_weights(kind, key, value, their_run, tmp_path):
    folder = with_size(their_run(kind), f"model.build.{key}", value, tmp_path / "run")
    used, largest = _processor_s(), _peak()
    with pytest.raises(ConfigError) as caught:
        load_bundle(evaluation_config(f"ckpt={folder}"))
    assert f"model.build.{key}" in str(caught.value) and str(value) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert _processor_s() - used < 20 and _peak() - largest < 400 * MIB


@pytest.mark.parametrize("kind", ["lm", "vlm"])
def test_settings_of_their_weights_are_taken(kind, their_run):
    folder = their_run(kind)
    bundle = load_bundle(evaluation_config(f"ckpt={folder}"))
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, weight in bundle.model.state_dict().items():
        assert torch.equal(weight, saved[f"policy.model.{name}"])


def test_a_repeated_step_makes_no_larger_critic_than_its_weights(their_run, tmp_path):
    size = {"_target_": "ragen_pl.models.build.build_small_lm", "text": {"vocab_size": 10**12}}
    folder = with_size(their_run("lm"), "algorithm.critic", "own", tmp_path / "run")
    cfg = OmegaConf.load(folder / "config.yaml")
    cfg.critic.build = size
    weights = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    recorded = Recorded(empty_step(), weights, {}, folder, folder / "config.yaml")
    with pytest.raises(
        ConfigError, match=r"critic\.build\.text\.vocab_size=1000000000000.* trust=true"
    ):
        build_module(cfg, recorded, dtype=None, device=torch.device("cpu"))


@pytest.fixture
def model(tmp_path) -> Path:
    """A model's folder whose files open nothing else."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "_name_or_path": "/etc/passwd"})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"vocab_file": "vocab.txt"}))
    (folder / "vocab.txt").write_text("a")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_bytes(b"")
    return folder


DESCRIPTIONS = [
    ("tokenizer_config.json", {"vocab_file": "/etc/passwd"}),
    ("tokenizer_config.json", {"vocab_file": "../secret"}),
    ("tokenizer_config.json", {"tokenizer_file": "/dev/zero"}),
    ("tokenizer_config.json", {"init_inputs": [{"merges_file": "../secret"}]}),
    ("model.safetensors.index.json", {"weight_map": {"a": "../secret"}}),
    ("adapter_config.json", {"base_model_name_or_path": "somebody/else"}),
    ("config.json", {"vision_config": {"use_pretrained_backbone": True, "backbone": "a/b"}}),
    ("config.json", {"num_labels": 10**9}),
]


@pytest.mark.parametrize(("name", "content"), DESCRIPTIONS, ids=range(len(DESCRIPTIONS)))
def test_a_models_folder_opens_nothing_outside_of_it(model, name, content, command):
    assert model_folder_problem(model) is None
    (model / name).write_text(json.dumps(content))
    (model / "ragen_pl.yaml").write_text("settings: {}\n")
    problem = model_folder_problem(model)
    assert problem is not None and name in problem
    for command_name in ("evaluate", "export"):
        refused = command(command_name, f"ckpt={model}", "env=frozenlake", "to=out").refused()
        assert problem in refused


def test_a_models_folder_has_no_deep_file_no_link_and_no_inflated_weights(model, tmp_path):
    (model / "generation_config.json").write_text('{"a":' * 5000)
    assert "generation_config.json" in str(model_folder_problem(model))
    (model / "generation_config.json").unlink()
    os.mkfifo(model / "merges.json")
    assert "merges.json is no plain file" in str(model_folder_problem(model))
    (model / "merges.json").unlink()
    os.symlink(tmp_path / "secret", model / "merges.txt")
    assert "merges.txt is a link" in str(model_folder_problem(model))
    (model / "merges.txt").unlink()
    compressed(model / "pytorch_model.bin")
    assert "pytorch_model.bin is compressed" in str(model_folder_problem(model))


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "bbbb"}
MATCHES = {"type": "Replace", "pattern": {"Regex": ""}, "content": "b"}
REWRITES = [
    ("decoder", REPLACE | {"content": "b" * 10**6}),
    ("decoder", {"type": "Sequence", "decoders": [REPLACE] * 5}),
    ("decoder", {"type": "Sequence", "decoders": [REPLACE | {"content": "b" * 10**6}] * 60}),
    ("normalizer", {"type": "Sequence", "normalizers": [MATCHES] * 9}),
    ("normalizer", {"type": "Prepend", "prepend": "b" * 300}),
    ("decoder", {"type": "Sequence", "decoders": [REPLACE | {"content": ""}] * 65}),
]


@pytest.mark.parametrize(("part", "step"), REWRITES, ids=range(len(REWRITES)))
def test_a_tokenizer_makes_no_far_longer_texts(part, step, lm, tmp_path):
    """Of each token; a step of a chain multiplies what those before it have made."""
    lm.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    described = json.loads(file.read_text())
    one = {"type": "Sequence", f"{part}s": [REPLACE, MATCHES, described[part]]}
    file.write_text(json.dumps(described | {part: one}))
    assert model_folder_problem(tmp_path) is None
    file.write_text(json.dumps(described | {part: step}))
    with pytest.raises(FileNotFoundError, match=rf"tokenizer\.json: the \d+ steps of its {part}"):
        load_pretrained(str(tmp_path))


@pytest.mark.parametrize("name", ["vocab_size", "num_hidden_layers", "hidden_size"])
def test_a_models_folder_is_no_larger_than_its_weights(name, lm, tmp_path):
    lm.save(tmp_path)
    file = tmp_path / "config.json"
    load_pretrained(str(tmp_path))
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {name: 10**8, "head_dim": 8}))
    largest = _peak()
    with pytest.raises(
        FileNotFoundError, match=f"{name}=100000000.* the files of its weights have"
    ):
        load_pretrained(str(tmp_path))
    assert _peak() - largest < 400 * MIB


@pytest.mark.usefixtures("composed_once")
@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("tokenizer_config.json", "model_max_length", "long"),
        ("generation_config.json", "eos_token_id", "end"),
        ("generation_config.json", "eos_token_id", -5),
        ("generation_config.json", "eos_token_id", [[1]]),
    ],
)
def test_a_tokenizer_that_does_not_fit_the_model_is_named(name, key, value, lm, tmp_path):
    lm.save(tmp_path)
    described = json.loads((tmp_path / name).read_text())
    (tmp_path / name).write_text(json.dumps(described | {key: value}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: ") as caught:
        load_bundle(evaluation_config(f"ckpt={tmp_path}", "env=frozenlake"))
    assert "\n" not in str(caught.value)


def without_its_end(folder: Path, *, text: str, **described: object) -> None:
    """Write a tokenizer without its end token, and a template that ends a response with a text."""
    for name, values in (("tokenizer.json", {}), ("tokenizer_config.json", described)):
        file = folder / name
        content = json.loads(file.read_text()) | values
        added = content.get("added_tokens", [])
        content |= {"added_tokens": [one for one in added if one["id"] != 1]} if added else {}
        file.write_text(json.dumps(content))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|end|>", text))


@pytest.mark.usefixtures("composed_once")
def test_an_end_that_is_no_token_of_the_model_is_named(lm, tmp_path):
    lm.save(tmp_path)
    cfg = evaluation_config(f"ckpt={tmp_path}", "env=frozenlake")
    (first, *_) = lm.tokenizer("é", add_special_tokens=False)["input_ids"]
    # half of a letter, which is read as another token
    without_its_end(tmp_path, text="é", eos_token=None)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": first}))
    bundle = load_bundle(cfg)
    with pytest.raises(
        ConfigError, match=r"does not read '.*', which ends a response, as one token"
    ):
        build_context(bundle, cfg.context)
    generation.write_text("{}")
    without_its_end(tmp_path, text="", eos_token="the end")
    bundle = load_bundle(cfg)
    with pytest.raises(ConfigError, match=r"its id \d+ is none of its \d+ outputs"):
        build_context(bundle, cfg.context)


@pytest.mark.usefixtures("composed_once")
def test_a_token_of_many_characters_is_refused(lm, tmp_path):
    lm.save(tmp_path)
    tokenizer = load_pretrained(str(tmp_path)).tokenizer
    tokenizer.add_tokens(["a" * 5000])
    tokenizer.save_pretrained(tmp_path)
    cfg = evaluation_config(f"ckpt={tmp_path}", "env=frozenlake")
    with pytest.raises(ConfigError, match="has a token of 5000 characters, expected at most 4096"):
        build_context(load_bundle(cfg), cfg.context)


def test_a_snapshot_in_a_hubs_cache_is_read(model, tmp_path):
    hub = tmp_path / "models--a--b"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots").mkdir()
    snapshot = model.rename(hub / "snapshots" / "0123")
    (snapshot / "vocab.txt").rename(hub / "blobs" / "ab")
    os.symlink("../../blobs/ab", snapshot / "vocab.txt")
    assert model_folder_problem(snapshot) is None
    (snapshot / "vocab.txt").unlink()
    os.symlink(tmp_path / "secret", snapshot / "vocab.txt")
    assert "is a link" in str(model_folder_problem(snapshot))
