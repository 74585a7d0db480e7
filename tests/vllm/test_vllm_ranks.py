"""Ranks that hold a model of vLLM together."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from support.episodes.trajectories import responses
from support.models.vllm_models import build, check_new_weights, gap, play, request, start

from ragen_pl.engines.protocol import generate

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
# groups of each rank: other prompts, and other numbers of them
GROUPS = ({"first": 0, "groups": 5}, {"first": 5, "groups": 1})


def in_two_processes(work, *arguments) -> list:
    mp.spawn(work, args=arguments, nprocs=2)
    folder = Path(arguments[0])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def sample(rank: int, folder: str, kind: str) -> None:
    """Sample on one of two ranks with one model; write what was found."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    bundle = build(kind)
    engine = start(bundle, settings={"tensor_parallel_size": 2})
    own = GROUPS[rank]
    trajectories = play(engine, **own)
    found = {"gap": gap(bundle, trajectories), "responses": responses(trajectories)}
    # one rank has several chunks of environments, the other one has one, and then none
    found["in chunks"] = responses(play(engine, **own, num_envs=2))
    found["alone"] = responses(play(engine, groups=5 * (1 - rank)))
    found["greedy"] = responses(play(engine, **own, greedy=True))
    check_new_weights(engine)
    found["after an error"] = after_an_error(engine, rank)
    found["error"] = found["after an error"].pop()
    found["after an abort"] = after_an_abort(engine, rank)
    with pytest.raises(RuntimeError, match="inside collective_rollout"):
        engine.submit([request(bundle, "Go.")], keep=False)
    engine.close()
    if kind == "tied":
        engine = start(bundle, settings={"tensor_parallel_size": 2})
        found["started again"] = responses(play(engine, **own | {"groups": 1}))
        engine.close()
    # the group is the trainer's
    dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def after_an_error(engine, rank: int) -> list:
    """Return the responses to one prompt after an error on the second rank, and that error."""
    error, bundle, steps = None, engine.bundle, 0
    many = [request(bundle, "Go.", session=n, seed=n, tokens=500) for n in range(8)]
    try:
        with engine.collective_rollout():
            engine.submit(many, keep=False)
            while not rank or steps < 3:
                engine.collect(wait=False)
                steps += 1
            raise LookupError("no key")
    except LookupError as caught:
        error = str(caught)
    assert steps == 3
    assert engine.is_idle
    with engine.collective_rollout():
        (one,) = generate(engine, [request(engine.bundle, "Go.", seed=rank)], keep=False)
    return [one.ids.tolist(), error]


def after_an_abort(engine, rank: int) -> list[int]:
    """Return the response to a prompt, while the first rank gives up another one."""
    with engine.collective_rollout():
        if rank == 0:
            engine.submit([request(engine.bundle, "Go. " * 3, tokens=500)], keep=False)
            engine.collect(wait=False)
            engine.release()
        (one,) = generate(engine, [request(engine.bundle, "Go.", seed=rank)], keep=False)
    assert engine.is_idle
    return one.ids.tolist()


@pytest.mark.parametrize("kind", ["tied", "images"])
def test_two_ranks_with_one_model_sample_as_one_does(tmp_path, start_engine, kind):
    both = in_two_processes(sample, str(tmp_path), kind)
    bundle = build(kind)
    engine = start_engine(bundle)
    for rank, found in enumerate(both):
        assert found["gap"] < 1e-4
        expected = responses(play(engine, **GROUPS[rank]))
        assert found["responses"] == found["in chunks"] == expected
        assert found["alone"] == (responses(play(engine, groups=5)) if rank == 0 else [])
        assert found["greedy"] == responses(play(engine, **GROUPS[rank], greedy=True))
        (one,) = generate(engine, [request(bundle, "Go.", seed=rank)], keep=False)
        assert found["after an error"] == [one.ids.tolist()]
        assert found["after an abort"] == one.ids.tolist()
        assert found["error"] == "no key"
        again = found.get("started again", found["responses"])
        assert again == found["responses"][: len(again)]
    assert both[0]["responses"] != both[1]["responses"]
    assert np.ptp([len(found["responses"]) for found in both]) > 4
