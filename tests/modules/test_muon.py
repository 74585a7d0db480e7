"""Muon for hidden matrices beside AdamW."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.runs.module_process import run_two_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.modules import muon
from ragen_pl.modules.muon import MuonAdamW, hidden_matrices, orthogonalized
from ragen_pl.modules.optimizers import build_optimizer, module_groups, schedule_by_iteration

MUON = partial(MuonAdamW, lr=1e-2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        for weight in module.parameters():
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        optimizer.zero_grad()


def test_hidden_matrices_are_those_between_embedding_and_head() -> None:
    module = network()
    assert hidden_matrices(module) == {module[1].weight}


def test_hidden_matrices_may_have_the_shape_of_an_embedding() -> None:
    # of a head too, and as many rows as a table of positions
    text = {"intermediate_size": 512, "tie_word_embeddings": False}
    model = build_small_lm(seed=0, text=text).model
    module = nn.ModuleList([model, nn.Embedding(128, 4)])
    hidden = hidden_matrices(module)
    others = {n for n, w in model.named_parameters() if w.ndim == 2 and w not in hidden}
    assert model.model.layers[0].mlp.up_proj.weight.shape == model.lm_head.weight.shape
    assert others == {"model.embed_tokens.weight", "lm_head.weight"}


def test_hidden_matrices_of_the_small_model_leave_out_the_tied_embedding() -> None:
    model = build_small_vlm(seed=0).model
    names = {name for name, weight in model.named_parameters() if weight in hidden_matrices(model)}
    assert "model.language_model.layers.0.mlp.up_proj.weight" in names
    assert "model.vision.blocks.0.attn.qkv.weight" in names
    assert not any("embed_tokens" in name or "norm" in name or "bias" in name for name in names)


def test_a_hidden_matrix_takes_a_semi_orthogonal_step_and_others_that_of_adamw() -> None:
    module = network()
    before, adamw = copy.deepcopy(module), copy.deepcopy(module)
    steps(module, build_optimizer(MUON, module_groups(module, "policy")), range(1))
    steps(adamw, torch.optim.AdamW(adamw.parameters(), lr=1e-2, weight_decay=0.0), range(1))

    step = (module[1].weight - before[1].weight).detach() / (1e-2 * 0.2 * 16**0.5)
    # five Newton-Schulz steps bring each singular value near 1
    assert torch.linalg.svdvals(step).sub(1).abs().max() < 0.4
    for number in (0, 2, 3):
        for ours, other in zip(
            module[number].parameters(), adamw[number].parameters(), strict=True
        ):
            torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("shape", [(4, 32), (32, 4), (16, 16)])
def test_newton_schulz_keeps_the_singular_vectors(shape) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    found = orthogonalized(matrix)
    assert found.dtype is torch.float32
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    # singular vectors are those of the matrix, and each singular value is near 1
    values = left.T @ found @ right.T
    assert (values.diag() - 1).abs().max() < 0.4
    assert (values - values.diag().diag()).abs().max() < 1e-5


def test_steps_are_those_of_torch_but_for_its_bfloat16() -> None:
    ours, theirs = nn.Linear(24, 16, bias=False), nn.Linear(24, 16, bias=False)
    theirs.load_state_dict(ours.state_dict())
    before = ours.weight.detach().clone()
    steps(ours, MuonAdamW([{"params": [ours.weight], "hidden": True}], weight_decay=0.1), range(4))
    settings = {"lr": 1e-3, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    steps(theirs, torch.optim.Muon(theirs.parameters(), **settings), range(4))
    moved = (theirs.weight - before).norm()
    assert (ours.weight - theirs.weight).norm() < 0.02 * moved > 0.0


class Products(TorchDispatchMode):
    """Counts the products of matrices, and the largest number of values in their results."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
            self.count, self.largest = self.count + 1, max(self.largest, result.numel())
        return result


@pytest.mark.parametrize(
    ("size", "products", "largest"),
    [
        # shapes: [6, 4] five times, [4, 6] and [4, 4] once
        (None, 3, 5 * 24),
        # two matrices fit
        (48, 3 + 2, 2 * 24),
        # not even one fits
        (5, 7, 24),
    ],
)
def test_matrices_of_one_shape_are_stepped_together(size, products, largest, monkeypatch) -> None:
    if size is not None:
        monkeypatch.setattr(muon, "STACK_SIZE", size)
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (4, 6), (6, 4), (4, 4), (6, 4), (6, 4), (6, 4), (6, 4)]
    together = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    alone = copy.deepcopy(together)
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = MuonAdamW([{"params": together, "hidden": True}], **settings)
    others = [MuonAdamW([{"params": [weight], "hidden": True}], **settings) for weight in alone]
    for step in range(3):
        for number, (weight, other) in enumerate(zip(together, alone, strict=True)):
            gradient = torch.randn(weight.shape, generator=generator)
            # one of them had no part in the first loss
            weight.grad = other.grad = None if (step, number) == (0, 7) else gradient
        with Products() as counted:
            optimizer.step()
        for each in others:
            each.step()
        if step == 0:
            assert (counted.count, counted.largest) == (3 * 5 * products, largest)
    for weight, other in zip(together, alone, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-6)
    means = [optimizer.state[weight]["momentum_buffer"] for weight in together]
    for weight, other, mean in zip(alone, others, means, strict=True):
        torch.testing.assert_close(mean, other.state[weight]["momentum_buffer"])


def test_a_loaded_state_goes_on_as_if_it_had_never_stopped() -> None:
    whole = network()
    steps(whole, build_optimizer(MUON, module_groups(whole, "policy")), range(4))

    stopped = network()
    first = build_optimizer(MUON, module_groups(stopped, "policy"))
    steps(stopped, first, range(2))
    resumed = build_optimizer(MUON, module_groups(stopped, "policy"))
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(stopped, resumed, range(2, 4))
    for ours, other in zip(stopped.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_a_schedule_reaches_both_parts() -> None:
    module = network()
    optimizer = build_optimizer(MUON, module_groups(module, "policy"))
    schedule = schedule_by_iteration(optimizer, iterations=1, warm_up=0, end=0.0)
    steps(module, optimizer, range(1))
    schedule.step()
    before = copy.deepcopy(module)
    steps(module, optimizer, range(1, 2))
    for ours, other in zip(module.parameters(), before.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_weights_in_bfloat16_are_stepped_as_float32_copies() -> None:
    module = network().bfloat16()
    optimizer = build_optimizer(MUON, module_groups(module, "policy"))
    for weight in module.parameters():
        weight.grad = torch.ones_like(weight, dtype=weight.grad_dtype)
    optimizer.step()
    assert all(
        optimizer.state[weight]["master"].dtype is torch.float32 for weight in module.parameters()
    )


def step_sharded(rank: int, folder: str) -> None:
    """Step a sharded and a whole network with the same gradients; write the weights of both."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    whole, sharded = network(), network()
    fully_shard(sharded)
    optimizers = [build_optimizer(MUON, module_groups(one, "policy")) for one in (whole, sharded)]
    for seed in range(4):
        torch.manual_seed(seed)
        for weight, part in zip(whole.parameters(), sharded.parameters(), strict=True):
            weight.grad = torch.randn_like(weight)
            part.grad = distribute_tensor(weight.grad, part.device_mesh, part.placements)
        for optimizer in optimizers:
            optimizer.step()
    weights = [[weight.detach() for weight in whole.parameters()]]
    weights.append([part.full_tensor().detach() for part in sharded.parameters()])
    torch.save(weights, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_matrices_take_the_steps_of_whole_ones(tmp_path) -> None:
    run_two_ranks(step_sharded, str(tmp_path))
    (whole, sharded), (_, other) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for before, weight, part, same in zip(
        network().parameters(), whole, sharded, other, strict=True
    ):
        assert torch.equal(part, same)
        moved = (weight - before).norm()
        assert (part - weight).norm() < 1e-5 * moved > 0.0


def test_a_group_of_vectors_is_no_hidden_group() -> None:
    with pytest.raises(ValueError, match="2D"):
        MuonAdamW([{"params": [nn.Parameter(torch.zeros(3))], "hidden": True}])
