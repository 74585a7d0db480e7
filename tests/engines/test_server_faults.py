"""Servers elsewhere that are killed, frozen, started again or cut off, and the ways by which weights reach them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from support.machines.full_disks import small_disk
from support.servers.fake_network import Proxy
from support.servers.fake_vllm import Server, wait
from support.servers.server_engines import collected, expected, requests, sampled

from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.vllm_server.engine import VLLMServerEngine
from ragen_pl.engines.vllm_server.plugin import Downloads
from ragen_pl.models.adapters import add_lora
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.checkpoint_weights import checkpoint_weights


def equal(server: Server, other: Server) -> bool:
    return server.weights.keys() == other.weights.keys() and all(
        weight.equal(other.weights[name]) for name, weight in server.weights.items()
    )


# ---- a server is killed


def at(path: str, label: str | None = None) -> Callable[[str, dict | None], bool]:
    """Return whether a call is one of a path, and gives a label of weights."""
    return lambda called, body: (
        called == path and (label is None or (body or {}).get("new_version", "").endswith(label))
    )


def at_sample(number: int) -> Callable[[str, dict | None], bool]:
    """Return whether a call is the request for a response with this number: all before it are under way."""
    asked = itertools.count(1)
    return lambda called, body: (
        called == "/inference/v1/generate" and bool(body) and next(asked) == number
    )


@pytest.mark.parametrize(
    "call",
    [
        at("/pause"),
        at("/update_weight_version", "replacing"),
        at("/collective_rpc"),
        at("/reset_prefix_cache"),
        at("/update_weight_version", "/1"),
        at("/resume"),
    ],
    ids=["pause", "unlabel", "load", "reset", "label", "resume"],
)
def test_a_server_killed_while_it_loads_is_no_loss(start, connect, call) -> None:
    killed, alive = start(), start()
    engine = connect(killed, alive, timeout_s=600.0, probe_s=0.2)
    killed.dies_at = call
    engine.load_weights(1)
    assert killed.is_dead and alive.pushes == 2
    assert sampled(engine) == expected()
    assert len(alive.asked) == 8
    again = start(port=killed.server_port)
    wait(lambda: again.version == alive.version and not again.paused)
    assert equal(again, alive)
    while not again.asked:
        # new sessions use it again
        engine.release()
        assert sampled(engine) == expected()
    # no server got the weights twice
    assert (again.pushes, alive.pushes) == (1, 2)


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/health"])
def test_a_server_killed_while_it_samples_is_no_loss(start, connect, path) -> None:
    killed, alive = start(), start()
    engine = connect(killed, alive, timeout_s=600.0, probe_s=0.2)
    killed.samples.clear()
    if path != "/health":
        killed.dies_at = at_sample(4)
    engine.submit(requests(), keep=True)
    if path == "/health":
        wait(lambda: killed.under_way == 4)
        killed.dies_at = at(path)
    assert collected(engine, 8) == expected()
    assert killed.is_dead and engine.resent >= 4 and alive.pushes == 1
    again = start(port=killed.server_port)
    wait(lambda: again.version == alive.version)
    assert equal(again, alive) and again.pushes == 1


# ---- servers that are gone for a while


def test_no_response_of_old_weights_is_used(start, connect) -> None:
    """Of a server that is started again before its failure is seen."""
    first, alive = start(), start()
    engine = connect(first, alive, timeout_s=600.0, probe_s=600.0)
    first.die()
    again = start(port=first.server_port)
    while not again.asked or again.pushes == 0:
        assert sampled(engine) == expected()
    # it was asked while it had its folder's weights, and given the others once
    assert again.pushes == 1 and engine.resent > 0 and equal(again, alive)


def test_a_run_goes_on_when_all_servers_are_back(start, connect) -> None:
    servers = [start(), start()]
    engine = connect(*servers, timeout_s=600.0)
    for server in servers:
        server.samples.clear()
        server.dies_at = at_sample(4)
    engine.submit(requests(), keep=True)
    wait(lambda: engine.resent >= 8)
    again = [start(port=server.server_port) for server in servers]
    assert collected(engine, 8) == expected()
    # a push is counted after the version that it brings
    wait(lambda: all(server.version != "default" and server.pushes for server in again))
    assert [server.pushes for server in again] == [1, 1]


# ---- weights by HTTP


@pytest.fixture
def pull(start, connect, tmp_path) -> Callable[..., VLLMServerEngine]:
    """Return a function that builds an engine whose servers download the weights, each as if on its own machine."""
    machines = itertools.count()

    def make(*servers: Server, **settings) -> VLLMServerEngine:
        for server in servers:
            server.downloads = Downloads(tmp_path / f"machine-{next(machines)}")
        return connect(*servers, **({"transfer": "pull"} | settings))

    return make


@pytest.fixture
def proxy(lm) -> Iterator[Callable[[str], Proxy]]:
    """Return a function that puts a proxy before an engine's server of weights."""
    made: list[Proxy] = []

    def make(url: str) -> Proxy:
        made.append(Proxy(url))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_servers_download_the_weights(start, pull, fresh_lm) -> None:
    servers = [start(), start()]
    engine = pull(*servers, version=None, bundle=fresh_lm)
    for version in range(2):
        for weight in fresh_lm.model.parameters():
            weight.data.add_(1.0)
        engine.load_weights(version)
        wanted = dict(checkpoint_weights(fresh_lm.model))
        for server in servers:
            assert server.pushes == version + 1 and server.weights.keys() == wanted.keys()
            assert all(server.weights[name].equal(wanted[name]) for name in wanted)
            # the version before is gone
            assert len(list(server.downloads.root.rglob("*.safetensors"))) == 1
    assert sampled(engine) == expected()


def test_an_update_that_another_run_has_not_finished_is_no_obstacle(start, pull) -> None:
    server = start()
    server.is_updating = True
    assert sampled(pull(server)) == expected()


def test_a_broken_transfer_is_resumed(start, pull, proxy) -> None:
    server = start()
    engine = pull(server)
    way = proxy(engine.weights_url)
    server.proxy, way.breaks = way.place, [10_000, 20_000]
    engine.load_weights(1)
    ranges = [headers.get("Range") for path, headers in way.asked if path.endswith("safetensors")]
    assert ranges == [None, "bytes=10000-", "bytes=30000-"]
    assert server.pushes == 2 and sampled(engine) == expected()


def test_a_spoiled_transfer_stops_one_server_only(start, pull, proxy) -> None:
    spoiled, fine = start(), start()
    engine = pull(spoiled, fine, timeout_s=600.0)
    before, way = spoiled.weights, proxy(engine.weights_url)
    spoiled.proxy, way.flips = way.place, 1000
    engine.load_weights(1)
    assert sampled(engine) == expected() and len(fine.asked) == 8
    # it keeps what it had, under its label
    assert spoiled.weights is before and spoiled.version.endswith("/0") and spoiled.pushes == 1
    way.flips = 0
    wait(lambda: spoiled.version == fine.version)
    assert equal(spoiled, fine)


def test_a_full_disk_stops_one_server_only(start, pull, tmp_path) -> None:
    full, fine = start(), start()
    engine = pull(full, fine, timeout_s=600.0)
    before, emptied = full.weights, full.downloads
    with small_disk(tmp_path / "disk", kib=16) as disk:
        full.downloads = Downloads(disk / "here")
        engine.load_weights(1)
        assert sampled(engine) == expected() and len(fine.asked) == 8
        # it keeps what it had, under its label
        assert full.weights is before and full.version.endswith("/0") and full.pushes == 1
    full.downloads = emptied
    wait(lambda: full.version == fine.version)
    assert equal(full, fine)


def test_weights_that_no_server_gets_end_the_run_with_the_reason(start, pull, proxy) -> None:
    server = start()
    engine = pull(server, timeout_s=5.0)
    way = proxy(engine.weights_url)
    server.proxy, way.flips = way.place, 1000
    with pytest.raises(
        RolloutError, match=r"no server has answered for 5 s .*its SHA-256 is not that of"
    ) as caught:
        engine.load_weights(1)
    assert "\n" not in str(caught.value)


def test_a_server_without_the_plugin_is_refused(start, connect) -> None:
    server = start()
    server.transfer = None
    message = r"has weight transfer None; start it with --weight-transfer-config '{\"backend\": \"ragen_pull\"}'"
    with pytest.raises(ValueError, match=message):
        connect(server, transfer="pull")


# ---- adapters alone


@pytest.fixture
def adapted(fresh_lm) -> ModelBundle:
    add_lora(fresh_lm.model, {"r": 4, "lora_alpha": 8})
    return fresh_lm


def test_only_adapters_travel_under_a_new_name(start, connect, adapted) -> None:
    server = start()
    engine = connect(server, version=None, bundle=adapted, transfer="adapters")
    names = []
    for version in range(3):
        with torch.no_grad():
            for name, weight in adapted.model.named_parameters():
                if "lora_B" in name:
                    weight.fill_(version + 1.0)
        engine.load_weights(version)
        assert sampled(engine) == expected()
        (loaded,) = server.adapters
        names.append(loaded)
        assert {body["model"] for body in server.asked[-8:]} == {loaded}
        assert {name.rpartition(".lora_")[2] for name in server.weights} == {"A.weight", "B.weight"}
        assert all(name.startswith("base_model.model.model.layers.") for name in server.weights)
        assert {float(w.mean()) for name, w in server.weights.items() if "lora_B" in name} == {
            version + 1.0
        }
    assert len(set(names)) == 3 and server.pushes == 3


def test_a_server_that_lost_its_adapters_gets_them_again(start, connect, adapted) -> None:
    server = start()
    engine = connect(server, bundle=adapted, transfer="adapters", timeout_s=600.0)
    server.die()
    again = start(port=server.server_port)
    assert sampled(engine) == expected() and again.pushes == 1
    # the same version once more
    again.version = "replacing"
    assert sampled(engine) == expected() and again.pushes == 2


def test_adapters_may_be_downloaded(start, pull, adapted) -> None:
    server = start()
    engine = pull(server, bundle=adapted, transfer="adapters", serve_address="127.0.0.1:0")
    assert sampled(engine) == expected()
    (first,) = server.adapters
    engine.load_weights(1)
    assert sampled(engine) == expected()
    ((second, folder),) = server.adapters.items()
    assert first != second and server.downloads.root in folder.parents
    assert {name.rpartition(".lora_")[2] for name in server.weights} == {"A.weight", "B.weight"}
    # older ones are of no use
    assert server.downloads.adapters(first) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"r": 2, "use_dora": True}, "model.layers.0.self_attn.q_proj has other adapters"),
        (None, "the policy has no adapters"),
    ],
)
def test_weights_that_are_no_adapters_are_refused(
    start, connect, fresh_lm, settings, reason
) -> None:
    if settings is not None:
        add_lora(fresh_lm.model, settings)
    with pytest.raises(ValueError, match=f"transfer=adapters: {reason}.*; set transfer=folder or"):
        connect(start(), bundle=fresh_lm, transfer="adapters")


def test_weights_trained_beside_adapters_are_refused(start, connect, adapted) -> None:
    adapted.model.get_output_embeddings().weight.requires_grad_(True)
    with pytest.raises(ValueError, match="transfer=adapters: other weights than those of adapters"):
        connect(start(), bundle=adapted, transfer="adapters")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (None, "has no adapters; start it with --enable-lora --max-lora-rank 4"),
        ({"max_lora_rank": 2}, "has --max-lora-rank 2; start it with --max-lora-rank 4"),
    ],
)
def test_a_server_that_takes_no_adapters_is_refused(start, connect, adapted, lora, message) -> None:
    server = start()
    server.lora = lora
    with pytest.raises(ValueError, match=message):
        connect(server, bundle=adapted, transfer="adapters")
