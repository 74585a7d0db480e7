"""vLLM's plug-in that downloads weights, against the run's own server of them."""

from __future__ import annotations

import asyncio
import errno
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from support.machines.full_disks import small_disk
from support.servers.fake_network import Proxy

from ragen_pl.engines.vllm_server import plugin
from ragen_pl.engines.vllm_server.plugin import Downloads, TransferError, write_package
from ragen_pl.engines.vllm_server.serving import (
    MANIFEST,
    WeightServer,
    host_and_port,
    own_address,
    serve,
    write_manifest,
)

SIZES = {"model-00000.safetensors": 300_000, "model-00001.safetensors": 70_000, "empty": 0}


class Publisher:
    """The run's server of weights, in a thread of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.server: WeightServer = self.call(serve("127.0.0.1:0", "http://127.0.0.1:9"))

    def call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def publish(self, version: int = 0, *, run: str = "run") -> str:
        folder = self.place / str(version)
        folder.mkdir(parents=True)
        for name, size in SIZES.items():
            (folder / name).write_bytes(os.urandom(size))
        write_manifest(folder, run=run, label=f"{run}/{version}/0")
        return self.server.publish(folder)

    def close(self) -> None:
        self.call(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def publisher(tmp_path) -> Iterator[Publisher]:
    made = Publisher(tmp_path / "trainer")
    yield made
    made.close()


@pytest.fixture
def proxy(publisher) -> Iterator[Proxy]:
    made = Proxy(publisher.publish().rpartition("/")[0].rpartition("/")[0].rpartition("/")[0])
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch) -> None:
    monkeypatch.setattr(plugin, "PAUSE_S", 0.0)


def by(proxy: Proxy, publisher: Publisher) -> str:
    """Return the address of the present manifest behind a proxy."""
    url = publisher.server.publish(publisher.place / "0")
    return f"{proxy.url}/{url.split('/', 3)[3]}"


def same(folder: Path, other: Path) -> bool:
    return all((folder / name).read_bytes() == (other / name).read_bytes() for name in SIZES)


def test_a_folder_is_downloaded_once(publisher, proxy, tmp_path) -> None:
    downloads = Downloads(tmp_path / "here")
    url = by(proxy, publisher)
    folder = downloads.folder(url)
    assert same(folder, publisher.place / "0")
    assert Downloads(tmp_path / "here").folder(url) == folder
    paths = [path.rpartition("/")[2] for path, _ in proxy.asked]
    assert sorted(paths) == sorted([MANIFEST, MANIFEST, *SIZES])


def test_a_broken_transfer_goes_on_where_it_was(publisher, proxy, tmp_path) -> None:
    proxy.breaks = [100_000, 150_000]
    downloads = Downloads(tmp_path / "here")
    folder = downloads.folder(by(proxy, publisher))
    assert same(folder, publisher.place / "0")
    asked = [
        headers.get("Range") for path, headers in proxy.asked if path.endswith("0.safetensors")
    ]
    assert asked == [None, "bytes=100000-", "bytes=250000-"]


def test_a_transfer_that_brings_nothing_ends(publisher, proxy, tmp_path) -> None:
    proxy.breaks = [0] * 100
    with pytest.raises(
        TransferError, match=r"model-00000.safetensors from http://127.0.0.1:\d+: it ended"
    ):
        Downloads(tmp_path / "here").folder(by(proxy, publisher))


def test_a_spoiled_file_is_downloaded_again(publisher, proxy, tmp_path) -> None:
    proxy.flips = 1
    downloads = Downloads(tmp_path / "here")
    assert same(downloads.folder(by(proxy, publisher)), publisher.place / "0")


def test_a_file_of_another_digest_is_refused(publisher, proxy, tmp_path) -> None:
    proxy.flips = 100
    url = by(proxy, publisher)
    with pytest.raises(TransferError, match="its SHA-256 is not that of the manifest") as caught:
        Downloads(tmp_path / "here").folder(url)
    # the token is no one else's
    assert url.split("/")[3] not in str(caught.value)
    assert not list((tmp_path / "here").rglob("*.safetensors*"))


def test_only_who_knows_the_token_gets_a_file(publisher) -> None:
    url = publisher.publish()
    scheme, _, place, token, folder, name = url.split("/")
    (publisher.place / "secret").write_text("")
    # the token is random, and may end with either letter
    other = token[:-1] + ("y" if token[-1] == "x" else "x")
    for path in (
        f"{other}/{folder}/{name}",
        f"{token}/{folder}/..%2Fsecret",
        f"{token}/..%2F/secret",
        f"{token}/1/{name}",
        name,
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{scheme}//{place}/{path}")


def test_names_of_other_folders_are_refused(tmp_path, publisher) -> None:
    url = publisher.publish()
    file = publisher.place / "0" / MANIFEST
    manifest = json.loads(file.read_text())
    manifest["files"][0]["name"] = "../../outside"
    file.write_text(json.dumps(manifest))
    with pytest.raises(TransferError, match="a manifest with the name"):
        Downloads(tmp_path / "here").folder(url)


def test_older_versions_are_removed(publisher, tmp_path) -> None:
    downloads = Downloads(tmp_path / "here")
    first = downloads.folder(publisher.publish(0))
    second = downloads.folder(publisher.publish(1))
    assert second.exists() and not first.exists()
    with pytest.raises(TransferError, match="no manifest from"):
        downloads.folder(publisher.server.publish(publisher.place / "gone"))


def use_and_be_killed(root: Path, url: str) -> None:
    downloads = Downloads(root)
    downloads.folder(url)
    os.kill(os.getpid(), 9)


def test_files_that_no_process_uses_are_removed(publisher, tmp_path) -> None:
    root = tmp_path / "here"
    first, second = Downloads(root), Downloads(root)
    url = publisher.publish(0)
    folder = first.folder(url)
    second.folder(url)
    first.close()
    assert folder.exists()
    second.close()
    assert list(root.iterdir()) == []
    killed = multiprocessing.get_context("spawn").Process(
        target=use_and_be_killed, args=(root, url)
    )
    killed.start()
    killed.join()
    assert folder.exists()
    Downloads(root).folder(publisher.publish(1, run="other"))
    assert not folder.exists()


def test_a_full_disk_is_reported_and_left_empty(publisher, tmp_path) -> None:
    with small_disk(tmp_path / "disk", kib=100) as disk:
        with pytest.raises(OSError, match="No space left") as caught:
            Downloads(disk / "here").folder(publisher.publish())
        assert caught.value.errno == errno.ENOSPC
        assert not [path for path in disk.rglob("*") if path.suffix in (".partial", ".safetensors")]


def test_the_package_has_the_entry_point_and_needs_nothing_of_ours(tmp_path) -> None:
    write_package(tmp_path)
    (information,) = tmp_path.glob("*.dist-info")
    (point,) = Distribution.at(information).entry_points
    assert (point.group, point.value) == ("vllm.general_plugins", "ragen_pull:register")
    code = "import sys, ragen_pull; assert not [name for name in sys.modules if 'ragen_pl' in name]"
    subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(tmp_path)}, cwd="/", check=True
    )


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"serve_address=203\.0\.113\.1:9400: weights can't be served"
    ):
        asyncio.run(serve("203.0.113.1:9400", "http://127.0.0.1:9"))
    assert own_address("http://127.0.0.1:9") == "127.0.0.1"
    assert host_and_port("[fd00::1]:9400") == ("fd00::1", 9400)
