"""Two processes with samples of very different lengths run as many forward passes as each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf
from support.episodes import played_agents
from support.runs.module_process import run_two_ranks

from ragen_pl.assembly.start_check import checked_engine_factory
from ragen_pl.base.distributed import max_over_ranks, sum_over_ranks
from ragen_pl.config import ConfigError
from ragen_pl.data.collate import collate
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss
from ragen_pl.modules.masking import Importance, Masks
from ragen_pl.modules.policy import PolicyModule


def count_forwards(rank: int, folder: str) -> None:
    """Prepare and update on one rank; write the numbers of forward passes and of samples."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    agent = played_agents.build_agent(
        own_critic=True,
        loss=UpdateLoss(kl=ReferenceKL(coefficient=0.1)),
        masks=Masks(importance=Importance(loss=0.5)),
        update=UpdateSettings(tokens_per_forward=120),
    )
    played = played_agents.play(agent, groups=(1, 5)[rank], window=(1, "all")[rank])
    if rank:  # the other rank has no episode that bootstraps
        played = [played_agents.cut(trajectory) for trajectory in played]
    calls = {"policy": 0, "critic": 0, "reference": 0}
    models = {
        "policy": agent.policy.model,
        "critic": agent.critic.model,
        "reference": agent.reference.model,
    }
    for name, model in models.items():

        def note(*_, name=name):
            calls[name] += 1

        model.model.register_forward_pre_hook(note)

    def taken():
        numbers = dict(calls)
        calls.update(dict.fromkeys(calls, 0))
        return numbers

    batch = agent.prepare(collate(played, agent.policy.bundle))
    counts = {"rows": len(batch.samples), "prepare": taken()}
    for tokens in (None, 150):
        loader = MinibatchLoader(
            batch,
            epochs=1,
            minibatches=2,
            length_buckets=4,
            tokens_per_microbatch=tokens,
            world_size=2,
            sum_over_ranks=sum_over_ranks,
            max_over_ranks=max_over_ranks,
        )
        counts[f"update {tokens}"] = []
        for minibatch in loader:
            agent.training_step(minibatch, 0).backward()
            counts[f"update {tokens}"].append(taken())
    Path(folder, f"{rank}.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


def count_scoring(rank: int, folder: str) -> None:
    """Prepare a batch whose values the engine has read, then with one on a rank that has none."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    agent = played_agents.build_agent(update=UpdateSettings(tokens_per_forward=120))
    played = played_agents.play(agent, groups=(1, 5)[rank])
    passes: list[int] = []
    for without in (None, 0, 1):
        calls: list[object] = []
        hook = agent.policy.model.model.register_forward_pre_hook(
            lambda *arguments, calls=calls: calls.append(arguments)
        )
        batch = collate(played, agent.policy.bundle)
        assert batch.has_values
        batch.has_values = rank != without
        agent.prepare(batch)
        hook.remove()
        passes.append(len(calls))
    Path(folder, f"{rank}.json").write_text(json.dumps(passes))
    dist.destroy_process_group()


def engine_of_first_rank(policy: PolicyModule, **settings: object) -> TransformersEngine:
    """Raise on the second rank."""
    if dist.get_rank():
        raise ValueError("memory is full")
    return TransformersEngine(policy)


def build_engine(rank: int, folder: str) -> None:
    """Build an engine that fails on one rank; write the error."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    target = f"{__name__}.{engine_of_first_rank.__name__}"
    engine = OmegaConf.create({"_target_": target, "_partial_": True})
    agent = played_agents.build_agent()
    with pytest.raises(ConfigError) as caught:
        checked_engine_factory(engine, proxy=None, context={})(agent.policy)
    Path(folder, f"{rank}.txt").write_text(str(caught.value))
    dist.destroy_process_group()


@pytest.mark.slow
def test_an_engine_that_one_rank_cannot_build_ends_all(tmp_path):
    run_two_ranks(build_engine, str(tmp_path))
    errors = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert errors[0] == errors[1] and "memory is full" in errors[0]


@pytest.mark.slow
def test_values_that_one_rank_lacks_are_computed_on_all(tmp_path):
    run_two_ranks(count_scoring, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second and first[0] == 0 and min(first[1:]) > 1


@pytest.mark.slow
def test_ranks_run_as_many_forward_passes(tmp_path):
    run_two_ranks(count_forwards, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first.pop("rows") * 3 < second.pop("rows") * 2
    assert first == second
    assert first["prepare"]["policy"] > 4 and first["prepare"]["critic"] > 4
    assert max(numbers["policy"] for numbers in first["update None"]) > 1
    assert len(first["update 150"]) > 4
    assert all(numbers["policy"] == numbers["critic"] == 1 for numbers in first["update 150"])
