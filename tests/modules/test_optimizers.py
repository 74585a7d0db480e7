"""Float32 master weights of an optimizer, and its parameter groups."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from ragen_pl.modules.muon import MuonAdamW
from ragen_pl.modules.optimizers import MasterWeights, build_optimizer, fuse, module_groups

RATE = 1e-6
ADAMW = partial(torch.optim.AdamW, lr=RATE, weight_decay=0.0)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    made = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 1))
    for parameter in made.parameters():
        # values that bfloat16 has too
        drawn = torch.randn(parameter.shape, generator=generator).bfloat16()
        parameter.data = drawn.to(dtype)
    return made


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, count: int, *, first: int = 0):
    """Take steps with the gradients that a float32 network would have."""
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            gradient = 1.0 + torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.grad_dtype)
        optimizer.step()
        optimizer.zero_grad()


def groups(module: nn.Module) -> list[dict[str, object]]:
    return [{"params": module.parameters(), "name": "policy"}]


def moved(optimizer: torch.optim.Optimizer, module: nn.Module, before: nn.Module) -> float:
    """Return the mean distance that the optimizer's weights have moved."""
    distances = [
        (optimizer.state[weight].get("master", weight) - start).abs().flatten()
        for weight, start in zip(module.parameters(), before.parameters(), strict=True)
    ]
    return float(torch.cat(distances).mean().detach())


def test_bfloat16_weights_move_as_far_as_float32_weights() -> None:
    far = {}
    for name, dtype, masters in (
        ("float32", torch.float32, True),
        ("masters", torch.bfloat16, True),
        ("plain", torch.bfloat16, False),
    ):
        module = network(dtype)
        before = copy.deepcopy(module)
        optimizer = build_optimizer(ADAMW, groups(module), master_weights=masters)
        assert isinstance(optimizer, MasterWeights) is (name == "masters")
        steps(module, optimizer, 100)
        far[name] = moved(optimizer, module, before)
        for weight in module.parameters():
            master = optimizer.state[weight].get("master", weight)
            assert torch.equal(weight, master.to(dtype))
    assert far["masters"] == pytest.approx(far["float32"], rel=0.05)
    # what the float32 copies are for
    assert far["plain"] < 0.2 * far["float32"]


def test_state_continues_bit_for_bit() -> None:
    whole = network(torch.bfloat16)
    optimizer = MasterWeights(groups(whole), ADAMW)
    steps(whole, optimizer, 5)
    weights, state = copy.deepcopy(whole.state_dict()), copy.deepcopy(optimizer.state_dict())
    steps(whole, optimizer, 5, first=5)

    resumed = network(torch.bfloat16)
    second = MasterWeights(groups(resumed), ADAMW)
    # weights after the optimizer, as FSDP restores them
    second.load_state_dict(state)
    resumed.load_state_dict(weights)
    steps(resumed, second, 5, first=5)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizer.state[one]["master"], second.state[other]["master"])
        assert torch.equal(optimizer.state[one]["exp_avg"], second.state[other]["exp_avg"])


def test_weights_loaded_after_the_optimizer_was_built_count() -> None:
    module = network(torch.bfloat16)
    optimizer = MasterWeights(groups(module), ADAMW)
    empty = optimizer.state_dict()
    assert not empty["state"]
    with torch.no_grad():
        module[0].weight.fill_(3.0)
    optimizer.load_state_dict(empty)
    steps(module, optimizer, 1)
    assert torch.all(module[0].weight == 3.0)


def test_state_of_a_float32_run_continues_with_new_copies() -> None:
    before = network()
    plain = ADAMW(groups(before))
    steps(before, plain, 3)
    module = network(torch.bfloat16)
    optimizer = MasterWeights(groups(module), ADAMW)
    optimizer.load_state_dict(plain.state_dict())
    steps(module, optimizer, 1, first=3)
    state = optimizer.state[module[0].weight]
    assert state["step"] == 4 and state["master"].dtype is torch.float32


def test_groups_settings_and_schedules_reach_the_other_optimizer() -> None:
    first, second = network(torch.bfloat16), network()
    optimizer = MasterWeights(groups(first), ADAMW)
    optimizer.add_param_group({"params": second.parameters(), "name": "critic", "lr": 1e-2})
    assert [group["name"] for group in optimizer.param_groups] == ["policy", "critic"]
    assert [group["lr"] for group in optimizer.param_groups] == [RATE, 1e-2]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    weight = optimizer.param_groups[0]["params"][0]
    assert weight is first[0].weight
    optimizer.step()
    schedule.step()
    # a checkpoint between two steps
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.0
    before = copy.deepcopy(first.state_dict()), copy.deepcopy(second.state_dict())
    steps(first, optimizer, 1)
    steps(second, optimizer, 1)
    for module, state in zip((first, second), before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        optimizer.add_param_group({"params": [second[0].weight]})


def test_gradients_are_summed_in_float32() -> None:
    module = network(torch.bfloat16)
    MasterWeights(groups(module), ADAMW)
    weight = module[2].bias
    for _ in range(512):
        (weight * 1.0).sum().backward()
    # bfloat16 counts to 256
    assert weight.grad.dtype is torch.float32 and weight.grad.item() == 512


def test_float32_weights_are_left_to_the_optimizer_itself() -> None:
    module = network()
    assert type(build_optimizer(ADAMW, groups(module))) is torch.optim.AdamW


def test_float16_weights_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"float16: the gradients .* set model.build.dtype=bfloat16"
    ):
        build_optimizer(ADAMW, groups(network(torch.float16)))


def test_frozen_weights_are_left_out() -> None:
    module = network(torch.float16)
    module.requires_grad_(False)
    module[2].float().requires_grad_(True)
    optimizer = build_optimizer(ADAMW, groups(module))
    assert optimizer.param_groups[0]["params"] == list(module[2].parameters())


@pytest.mark.parametrize(("decay", "vectors"), [(0.0, False), (0.1, False), (0.1, True)])
def test_norms_and_biases_are_not_decayed_unless_asked(decay: float, vectors: bool) -> None:
    module = network()
    before = copy.deepcopy(module)
    factory = partial(torch.optim.AdamW, lr=1e-2, weight_decay=decay)
    optimizer = build_optimizer(factory, groups(module), decay_vectors=vectors)
    names = [group["name"] for group in optimizer.param_groups]
    assert names == (["policy", "policy/vectors"] if decay and not vectors else ["policy"])
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for after, start in zip(module.parameters(), before.parameters(), strict=True):
        decays = decay > 0 and (vectors or start.ndim > 1)
        torch.testing.assert_close(after, start * (1 - 1e-2 * decay if decays else 1.0))


def kernels(optimizer: torch.optim.Optimizer) -> list[tuple[bool | None, bool | None]]:
    return [(group.get("fused"), group.get("foreach")) for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("factory", "fused", "expected"),
    [
        (ADAMW, True, (True, None)),
        (partial(torch.optim.SGD, lr=RATE), True, (True, None)),
        (partial(ADAMW, fused=False), False, (False, None)),
        (partial(ADAMW, foreach=True), False, (None, True)),
        (partial(ADAMW, foreach=False), False, (None, False)),
        (partial(ADAMW, differentiable=True), False, (None, None)),
        # without fused kernels
        (partial(torch.optim.NAdam, lr=RATE), False, (None, None)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_on_cuda_is_fused_where_it_can_be_and_settings_name_no_other_kernels(
    factory, fused, expected, dtype
) -> None:
    optimizer = build_optimizer(factory, groups(network(dtype)))
    # weights on a CPU are stepped as before
    assert fuse(optimizer, device="cpu") is False
    assert set(kernels(optimizer)) == {(None, None) if fused else expected}
    assert fuse(optimizer, device="cuda") is fused
    assert set(kernels(optimizer)) == {expected}
    if isinstance(optimizer, MasterWeights):
        assert kernels(optimizer.inner) == kernels(optimizer)


def test_adamw_beside_muon_is_fused_too() -> None:
    for factory, fused in ((MuonAdamW, True), (partial(MuonAdamW, fused=False), False)):
        optimizer = build_optimizer(factory, module_groups(network(), "policy"))
        assert fuse(optimizer, device="cuda") is fused
        found = {group["hidden"]: group.get("fused") for group in optimizer.param_groups}
        assert found == {True: None, False: fused}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loaded_state_is_stepped_by_the_kernels_of_this_run(dtype, fused) -> None:
    """A checkpoint of a GPU continues on a CPU, and the other way round."""
    whole, resumed = network(dtype), network(dtype)
    first = build_optimizer(ADAMW, groups(whole))
    second = build_optimizer(ADAMW, groups(resumed))
    fuse((second, first)[fused], device="cuda")
    steps(whole, first, 3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert [kernels(first), kernels(second)] == [
        [(fused or None, None)],
        [(not fused or None, None)],
    ]
    for module, optimizer in ((whole, first), (resumed, second)):
        steps(module, optimizer, 3, first=3)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        states = [first.state[one], second.state[other]]
        torch.testing.assert_close(*[state.get("master", state["exp_avg"]) for state in states])
        assert [float(state["step"]) for state in states] == [6.0, 6.0]


class Counting8bit(torch.optim.Optimizer):
    """An optimizer with quantized state, as the packages for 8-bit optimizers have."""

    def __init__(self, params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["name"] in ("policy", "critic")
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = 0
                    state["code"] = torch.zeros(weight.shape, dtype=torch.uint8)
                    state["scale"] = torch.zeros(())
                state["step"] += 1
                scale = weight.grad.abs().max().clamp(min=1e-12)
                state["code"] = (weight.grad / scale * 127 + 128).round().to(torch.uint8)
                state["scale"] = scale
                weight -= group["lr"] * (state["code"].float() - 128) / 127 * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_with_quantized_state_is_saved_and_continued(dtype: torch.dtype) -> None:
    whole, resumed = network(dtype), network(dtype)
    first = build_optimizer(Counting8bit, groups(whole))
    steps(whole, first, 3)
    second = build_optimizer(Counting8bit, groups(resumed))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for module, optimizer in ((whole, first), (resumed, second)):
        steps(module, optimizer, 3, first=3)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
        assert second.state[other]["step"] == 6


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_says_that_its_optimizer_is_fused(make, caplog, fused) -> None:
    agent = make.agent()
    agent.optimizer_factory = partial(ADAMW, fused=fused)
    with caplog.at_level("INFO", logger="ragen_pl"):
        agent.build_optimizer()
    line = (
        "optimizer: fused kernels of torch.optim.adamw.AdamW; +optimizer.fused=false takes others"
    )
    assert caplog.messages.count(line) == fused
