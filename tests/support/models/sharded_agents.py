"""Results of one of two ranks with sharded weights, and with whole weights and averaged gradients."""

from __future__ import annotations

import copy
import functools
import json
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.episodes import played_agents
from support.models.tiny_models import TEXT
from support.servers.fake_vllm import Server
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ragen_pl.assembly.teacher_server import TeacherServer
from ragen_pl.base.distributed import max_over_ranks, own_part, sum_over_ranks, whole
from ragen_pl.data.collate import collate
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import EnginePolicy
from ragen_pl.models.adapters import choose_trained_weights, merge_adapters
from ragen_pl.models.build import build_small_lm
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.checkpoint_weights import checkpoint_weights
from ragen_pl.modules import sharding
from ragen_pl.modules.agent import AgentModule
from ragen_pl.modules.losses import ReferenceKL, TextPrediction, UpdateLoss
from ragen_pl.modules.masking import Importance, Masks
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.reference import FrozenCopy, MovingAverage
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.agreement import check_agreement


@dataclass(kw_only=True)
class Case:
    """An agent, and how its iteration is split."""

    agent: dict[str, Any] = field(default_factory=dict)
    kl: dict[str, Any] = field(default_factory=dict)
    # only the second rank has text that follows a response
    echo: TextPrediction | None = None
    dtype: torch.dtype = torch.float32
    lora: dict[str, Any] | None = None
    gradient_checkpointing: bool = False
    tokens: int | None = None
    # only the first rank sees images
    images_of_one: bool = False
    # a second one starts from the optimizer's state and from weights that were pushed
    iterations: int = 1
    # the engine has weights of its own
    copies: bool = False
    # the reference is on a server
    served: bool = False


CASES = {
    "full divergence, own critic": Case(agent={"own_critic": True}, tokens=150, iterations=2),
    "shared critic, checkpointed layers, minibatches by length": Case(
        gradient_checkpointing=True, kl={"estimator": "k3"}
    ),
    "images on one rank": Case(agent={"images": True}, images_of_one=True),
    "bfloat16, moving average": Case(
        dtype=torch.bfloat16, kl={"reference": MovingAverage(decay=0.5)}
    ),
    "adapters, adapters off as reference": Case(lora={"r": 2}, dtype=torch.bfloat16),
    "prediction of text": Case(echo=TextPrediction(observation=1.0), tokens=150),
    "most likely ids of a served teacher": Case(
        served=True, kl={"estimator": "full_reverse", "top_k": 4, "top_k_of": "reference"}
    ),
    "importance masks": Case(agent={"masks": Masks(importance=Importance(loss=0.5))}),
    "adapters, frozen copy": Case(
        lora={"r": 2}, kl={"reference": FrozenCopy()}, copies=True, iterations=2
    ),
}


# cases of hybrid sharding
HYBRID = ("shared critic, checkpointed layers, minibatches by length", "bfloat16, moving average")


class Fault(Exception):
    """An error that other ranks can't be sent."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class CopyingEngine(TransformersEngine):
    """Samples with a copy of the policy, and takes over its weights.

    Args:
        policy: the policy.
        bundle: the copy.
    """

    in_place = False

    def __init__(self, policy: EnginePolicy, bundle: ModelBundle, **settings):
        super().__init__(PolicyModule(bundle), **settings)
        self.policy = policy
        # number of the weight at which it fails
        self.fails_at: int | None = None

    def load_weights(self, version: int) -> None:
        if self.fails_at == 0:
            raise Fault("no", "room")
        own = dict(checkpoint_weights(self.bundle.model))
        for number, (name, weight) in enumerate(self.policy.weights(), start=1):
            if number == self.fails_at:
                raise Fault("no", "room")
            own.pop(name).copy_(weight)
        assert not own
        super().load_weights(version)


@functools.cache
def teacher() -> Server:
    """Return this rank's server of another model than the policy."""
    return Server(build_small_lm(seed=7, text=TEXT))


def copied(bundle: ModelBundle) -> ModelBundle:
    """Return a bundle with weights of its own, adapters merged."""
    model = copy.deepcopy(bundle.model).eval()
    merge_adapters(model)
    return bundle.with_model(model)


def build(case: Case, models: list[Any] | None = None) -> AgentModule:
    """Return the case's agent with weights that are not those of its reference.

    Args:
        case: the case.
        models: gets the model that the rollout engine plays with.
    """

    def engine(policy, **settings):
        if models is not None:
            models.append(policy.bundle.model)
        if case.copies:
            return CopyingEngine(policy, own, **settings)
        return TransformersEngine(policy, **settings)

    def change(bundle: ModelBundle) -> None:
        bundle.model.to(case.dtype)
        torch.manual_seed(7)
        choose_trained_weights(bundle.model, lora=case.lora)
        if case.gradient_checkpointing:
            bundle.checkpoint_layers()

    kl = case.kl | ({"reference": TeacherServer(urls=[teacher().url])} if case.served else {})
    agent = played_agents.build_agent(
        change=change,
        loss=UpdateLoss(kl=ReferenceKL(coefficient=0.1, **kl), echo=case.echo),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
        # weights that are sharded have their values by a pass
        update=UpdateSettings(tokens_per_forward=120, scoring="always"),
        engine=engine,
        **case.agent,
    )
    torch.manual_seed(9)
    with torch.no_grad():
        for weight in agent.policy.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn_like(weight))
    own = copied(agent.policy.bundle)
    return agent


def iterate(case: Case, agent: AgentModule, *, rank: int) -> dict[str, Any]:
    """Play, prepare and update twice; return responses, prepared tensors, gradients and weights."""
    optimizer = agent.configure_optimizers()["optimizer"]
    results: dict[str, Any] = {"responses": [], "prepared": {}, "gradients": {}}
    for iteration in range(case.iterations):
        played = played_agents.play(agent, groups=(1, 5)[rank], window=(1, "all")[rank])
        turns = [turn for trajectory in played for turn in trajectory.turns]
        results["responses"] += [turn.response_ids.tolist() for turn in turns]
        if rank and case.images_of_one:
            for turn in turns:
                text = turn.prompt_ids != agent.policy.bundle.image_token_id
                turn.prompt_ids, turn.prompt_images = turn.prompt_ids[text], []
        if rank:  # the other rank has no episode that bootstraps
            played = [played_agents.cut(trajectory) for trajectory in played]
        batch = agent.prepare(collate(played, agent.policy.bundle, text=case.echo is not None))
        samples = batch.samples
        assert bool((samples.text > 0).any()) == (case.echo is not None and rank == 1)
        results["prepared"] |= {
            f"{name} {iteration}": getattr(samples, name).clone()
            for name in ("values", "advantages", "returns", "loss_weight")
        } | {f"reference {iteration}": batch.reference.clone()}
        update(agent, batch, optimizer, case, iteration=iteration, results=results)
    results["weights"] = {
        name: whole(weight.detach()).clone()
        for name, weight in agent.named_parameters(remove_duplicate=False)
    }
    return results


def update(agent, batch, optimizer, case, *, iteration, results):
    """Take one clipped optimizer step over the batch."""
    loader = MinibatchLoader(
        batch,
        epochs=1,
        minibatches=1,
        length_buckets=4,
        tokens_per_microbatch=case.tokens,
        world_size=dist.get_world_size(),
        sum_over_ranks=sum_over_ranks,
        max_over_ranks=max_over_ranks,
    )
    agent.train()
    optimizer.zero_grad()
    for minibatch in loader:
        loss = agent.training_step(minibatch, 0) / loader.accumulate
        loss.backward()
    if not agent.device_mesh:
        average(agent)
    results["gradients"] |= {
        f"{name} {iteration}": whole(weight.grad).clone()
        for name, weight in agent.named_parameters()
        if weight.grad is not None
    }
    agent.configure_gradient_clipping(optimizer, 0.5)
    optimizer.step()
    results |= {f"norms {iteration}": dict(agent.gradient_norms), "microbatches": len(loader)}


def average(agent):
    """Average the gradients over the ranks as DDP does."""
    for weight in agent.parameters():
        if weight.requires_grad:
            own = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = None
            weight.grad_dtype = torch.float32
            weight.grad = sum_over_ranks(own.float()).div(dist.get_world_size())


def difference(tensors: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, as a share of the largest value of each tensor but at least of 1e-3."""
    assert tensors.keys() == other.keys(), tensors.keys() ^ other.keys()
    return max(
        float((tensors[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-3))
        for name in tensors
    )


def run(rank: int, folder: str) -> None:
    """Write what this rank finds."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    results = {
        "learned": learn(rank, mesh),
        "pushed": push(rank, mesh),
        "skipped": skip(rank, mesh),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    teacher().die()
    dist.destroy_process_group()


def run_hybrid(rank: int, folder: str) -> None:
    """Write what this one of four ranks finds, of which two share a copy of the state."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    torch.set_num_threads(1)
    # the ranks of a copy have the same samples, and the copies others
    found = learn(
        rank // 2, init_device_mesh("cpu", (2, 2), mesh_dim_names=sharding.HYBRID), HYBRID
    )
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def learn(rank: int, mesh: DeviceMesh, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return what both ways find on this rank, in all cases unless some are named."""
    results = {}
    for name in names or CASES:
        case = CASES[name]
        expected = iterate(case, build(case), rank=rank)
        models: list[Any] = []
        agent = build(case, models)
        fingerprints = dict(agent.fingerprints)
        size = sum(weight.numel() for weight in agent.parameters())
        # weights that the reference shares with the policy become its own
        names = list(agent.named_parameters(remove_duplicate=False))
        shared = sum(weight.numel() for _, weight in names) - size
        agent._device_mesh = mesh
        agent.configure_model()
        sharded = iterate(case, agent, rank=rank)
        (model,) = models
        agent._fingerprints = None
        parts = [getattr(weight, "to_local", lambda w=weight: w)() for weight in agent.parameters()]
        results[name] = {
            "own share": sum(part.numel() for part in parts) / size,
            "shared with the reference": shared / size,
            "same responses": sharded["responses"] == expected["responses"],
            "prepared": difference(sharded["prepared"], expected["prepared"]),
            "gradients": difference(sharded["gradients"], expected["gradients"]),
            "weights": difference(sharded["weights"], expected["weights"]),
            "norms": [
                [sharded[f"norms {number}"], expected[f"norms {number}"]]
                for number in range(case.iterations)
            ],
            "microbatches": sharded["microbatches"],
            "same fingerprints": agent.fingerprints == fingerprints,
            "rollout weights are freed": next(model.parameters()).is_meta,
        }
    return results


def skip(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Return what becomes of a step where the second rank alone has a gradient or a loss that is not finite."""
    results = {}
    for name, sharded in (("shard of a gradient", True), ("loss", False)):
        agent = build(Case())
        if sharded:
            agent._device_mesh = mesh
            agent.configure_model()
        optimizer = agent.configure_optimizers()["optimizer"]
        for weight in agent.parameters():
            weight.grad = torch.ones_like(weight) if weight.requires_grad else None
        if rank and sharded:
            own = [own_part(w.grad) for w in agent.parameters() if w.grad is not None]
            next(part for part in own if part.numel()).flatten()[0] = float("nan")
        if not sharded:
            agent.on_before_backward(torch.tensor(float("inf") if rank else 1.0))
        agent.configure_gradient_clipping(optimizer, 0.5)
        results[name] = {
            "gradients": sum(weight.grad is not None for weight in agent.parameters()),
            "skipped": agent.skipped.in_a_row,
            "norm": repr(agent.gradient_norms["policy"]),
        }
        # the next step is taken
        for weight in agent.parameters():
            weight.grad = torch.ones_like(weight) if weight.requires_grad else None
        agent.configure_gradient_clipping(optimizer, 0.5)
        results[name]["skipped after"] = agent.skipped.in_a_row
    return results


class GatheredBytes:
    """Counts the bytes of gathered weights that are alive."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.peak = 0

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a weight."""
        gathered = whole(tensor)
        self.alive.add(gathered)
        self.peak = max(self.peak, sum(each.nbytes for each in self.alive))
        return gathered


PUSHED = {
    "text": Case(copies=True),
    "text and images": Case(agent={"images": True}, copies=True),
    "adapters": Case(lora={"r": 2, "use_dora": True}, copies=True),
}


def push(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Return what an engine with weights of its own gets from a sharded policy on this rank."""
    results = {}
    for name, case in PUSHED.items():
        agent = build(case)
        agent._device_mesh = mesh
        bundle = agent.policy.bundle
        expected = dict(checkpoint_weights(copied(bundle).model))
        layers = [sum(weight.nbytes for weight in part.parameters()) for part in bundle.layers]
        largest = max(weight.nbytes for weight in bundle.model.parameters())
        agent.configure_model()
        with mock.patch.object(sharding, "whole", (count := GatheredBytes()).whole):
            engine = agent.rollout_engine()
        with torch.no_grad():
            for weight in engine.bundle.model.parameters():
                weight.zero_()
        errors = []
        for fails_at in (0, 3):
            engine.fails_at = fails_at if rank else None
            try:
                agent.rollout_engine()
            except (Fault, RuntimeError) as error:
                errors.append(str(error))
        engine.fails_at = None
        agent.rollout_engine()
        got = dict(checkpoint_weights(engine.bundle.model))
        results[name] = {
            "equal": got.keys() == expected.keys()
            and all(got[name].equal(expected[name]) for name in got),
            "errors": errors,
            "peak": count.peak,
            "alive": len(count.alive),
            "layer": max(layers),
            "weight": largest,
            "all": sum(weight.nbytes for weight in expected.values()),
            "policy is left sharded": all(
                isinstance(weight, DTensor) for weight in agent.policy.parameters()
            ),
            "agreement": check_agreement(
                ContextManager(bundle, max_tokens=400),
                engine,
                image_size=(48, 64) if bundle.images else None,
                policy=engine.policy,
            ),
        }
    return results
