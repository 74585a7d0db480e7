"""Weights and adapters that real vLLM servers download: run by `make test-vllm`."""

from __future__ import annotations

import json
import os
import urllib.request

import pytest
import torch
from support.machines.full_disks import small_disk
from support.models.vllm_models import build, change_weights, gap, play
from support.servers.vllm_servers import ROOT, UserServer

from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.vllm_server import serving
from ragen_pl.engines.vllm_server.engine import VLLMServerEngine
from ragen_pl.engines.vllm_server.plugin import BACKEND, FOLDER_VARIABLE, write_package
from ragen_pl.models.adapters import add_lora
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.policy import PolicyModule

# link in the server's folder to the disk that it downloads to
DOWNLOADS = "downloads"
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that takes weights and adapters by any way."""
    folder = tmp_path_factory.mktemp("transfer")
    build("text").save(folder / "model")
    (folder / "disk").mkdir()
    (folder / DOWNLOADS).symlink_to(folder / "disk")
    write_package(folder / "plugin")
    started = UserServer(
        folder / "model",
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
        *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
        *("--enable-lora", "--max-lora-rank", "8"),
        variables={
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "plugin")]),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            FOLDER_VARIABLE: str(folder / DOWNLOADS),
        },
    )
    try:
        started.wait()
        yield started
    finally:
        started.kill()


@pytest.fixture
def connect(server):
    """Return a function that builds an engine on the server."""
    engines = []

    def make(bundle: ModelBundle, **settings) -> VLLMServerEngine:
        arguments = {"urls": [server.url], "max_tokens": 2048, "timeout_s": 600.0} | settings
        engines.append(VLLMServerEngine(PolicyModule(bundle), **arguments))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def checksums(server: UserServer) -> dict[str, str]:
    body = json.dumps({"action": "checksum"}).encode()
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{server.url}/weight_checker", body, headers)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)["checksums"]


def with_adapters() -> ModelBundle:
    bundle = build("text")
    add_lora(bundle.model, {"r": 4, "lora_alpha": 8})
    return bundle


def change_adapters(bundle: ModelBundle, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in bundle.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3, generator=generator)


@pytest.mark.parametrize("address", [None, "127.0.0.1:0"], ids=["folder", "http"])
def test_adapters_alone_are_sampled_with(connect, server, address):
    # the first tests: the server has the weights of its folder
    bundle = with_adapters()
    engine = connect(bundle, transfer="adapters", serve_address=address)
    before = checksums(server)
    for version in range(2):
        change_adapters(bundle, seed=version)
        engine.load_weights(version)
        assert gap(bundle, play(engine)) < 1e-4
    change_adapters(bundle, seed=9)
    assert gap(bundle, play(engine)) > 0.01
    assert checksums(server) == before


def test_downloaded_weights_are_those_of_a_shared_folder(connect, server):
    found = []
    for transfer in ("pull", "folder"):
        bundle = build("text")
        engine = connect(bundle, transfer=transfer)
        for version in range(2):
            change_weights(bundle, seed=version)
            engine.load_weights(version)
            assert gap(bundle, play(engine)) < 1e-4
        found.append(checksums(server))
    assert found[0] == found[1]


def test_weights_that_are_not_those_of_the_manifest_are_left(connect, server, monkeypatch):
    bundle = build("text")
    engine = connect(bundle, transfer="pull", timeout_s=60.0)
    engine.load_weights(0)
    before = checksums(server)
    change_weights(bundle, seed=5)
    with monkeypatch.context() as patch, pytest.raises(RolloutError, match="its SHA-256 is not"):
        patch.setattr(serving, "digest", lambda path: "0" * 64)
        engine.load_weights(1)
    assert checksums(server) == before
    engine.load_weights(1)
    assert gap(bundle, play(engine)) < 1e-4 and checksums(server) != before


def test_weights_that_find_no_room_are_left(connect, server, tmp_path):
    bundle = build("text")
    engine = connect(bundle, transfer="pull", timeout_s=60.0)
    engine.load_weights(0)
    before = checksums(server)
    change_weights(bundle, seed=6)
    link = server.folder.with_name(DOWNLOADS)
    disk = link.readlink()
    with small_disk(tmp_path / "disk", kib=16) as full:
        link.unlink()
        link.symlink_to(full)
        with pytest.raises(RolloutError, match="No space left on device"):
            engine.load_weights(1)
        assert checksums(server) == before
        assert not [path for path in full.rglob("*") if path.is_file() and path.stat().st_size]
        link.unlink()
        link.symlink_to(disk)
    engine.load_weights(1)
    assert gap(bundle, play(engine)) < 1e-4 and checksums(server) != before
