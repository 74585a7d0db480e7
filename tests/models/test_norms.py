"""RMS norms in one kernel: what is one, and that nothing but rounding changes."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from support.models.compared_logprobs import play, trajectory_of
from support.models.family_models import MODELS, tiny
from torch import Tensor, nn
from torch.nn import functional

from ragen_pl.data.collate import collate
from ragen_pl.models.norms import FusedNorm, fuse_norms, own_norms
from ragen_pl.modules.policy import PolicyModule

# RMS norms of each family: two of each layer, one before the head, and those of queries, keys and image encoders
FUSED = {
    "qwen2_5": 5, "qwen3": 9, "qwen3_5": 7, "llama3_2": 5, "phi3": 5, "smollm2": 5, "gemma3": 13, "gemma4": 28,
    "lfm2": 7, "qwen2_5_vl": 10, "qwen3_vl": 9, "qwen3_5_vl": 7, "gemma4_vl": 40, "gemma4_vl_experts": 40,
    "gemma3_vl": 20, "smolvlm": 5, "llava_next": 5, "llava_onevision": 5, "internvl": 5, "lfm2_vl": 7,
}  # fmt: skip


class RMSNorm(nn.Module):
    """A norm as transformers has it, with what families change in it."""

    def __init__(
        self,
        *,
        eps: float = 1e-5,
        scale: Callable[[Tensor], Tensor] = lambda weight: weight,
        dtype: torch.dtype | None = None,
        center: bool = False,
        used_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.variance_epsilon, self.scale, self.dtype, self.center = eps, scale, dtype, center
        self.used_eps = {"eps": eps if used_eps is None else used_eps}

    def forward(self, hidden_states: Tensor) -> Tensor:
        states = hidden_states.float()
        if self.center:
            states = states - states.mean(-1, keepdim=True)
        square = states.pow(2).mean(-1, keepdim=True)
        states = states * torch.rsqrt(square + self.used_eps["eps"])
        normed = self.scale(self.weight.float()) * states
        return normed.to(self.dtype or hidden_states.dtype)


class Gated(RMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        normed = super().forward(hidden_states)
        return normed if gate is None else normed * gate


class RaisingNorm(RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        raise TypeError("expected indices")


def fused(model: nn.Module) -> list[FusedNorm]:
    parts = [vars(part).get("forward") for part in model.modules()]
    return [each for each in parts if isinstance(each, FusedNorm)]


@pytest.mark.parametrize("name", MODELS)
def test_scores_and_gradients_are_those_of_the_models_own_norms(name: str) -> None:
    bundle, single = tiny(name), MODELS[name].single_image
    assert len(fused(bundle.model)) == FUSED[name]
    names = {name: tuple(weight.shape) for name, weight in bundle.model.named_parameters()}
    episodes = play(bundle, window=1 if single else "all", keep=True, single_image=single)
    batch = collate([trajectory_of(episode, n) for n, episode in enumerate(episodes)], bundle)
    policy = PolicyModule(bundle)
    calls = Counter[str]()

    def counted(hidden: Tensor, *rest: object) -> Tensor:
        calls["kernel"] += 1
        return functional.rms_norm(hidden, *rest)  # type: ignore[arg-type]

    def update() -> tuple[Tensor, dict[str, Tensor]]:
        policy.zero_grad()
        scores = policy(batch.samples, batch.images)
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        gradients = {
            name: weight.grad
            for name, weight in policy.named_parameters()
            if weight.grad is not None
        }
        return scores.logprobs.detach(), gradients

    # on a CPU they are the same forward
    as_built = update()
    with own_norms(bundle.model):
        assert not fused(bundle.model)
        own = update()
    assert torch.equal(as_built[0], own[0])
    assert fuse_norms(bundle.model, kernel=counted) == FUSED[name]
    scores, gradients = update()
    assert calls["kernel"] >= FUSED[name]
    torch.testing.assert_close(scores, own[0], rtol=1e-5, atol=1e-5)
    assert gradients.keys() == own[1].keys()
    for weight, gradient in gradients.items():
        assert (gradient - own[1][weight]).norm() <= 1e-4 * own[1][weight].norm() + 1e-6
    assert names == {n: tuple(weight.shape) for n, weight in bundle.model.named_parameters()}


@pytest.mark.parametrize(
    ("norm", "count"),
    [
        (RMSNorm(), 1),
        (RMSNorm(eps=1e-6), 1),
        # Gemma's
        (RMSNorm(scale=lambda weight: 1 + weight), 1),
        (RMSNorm(scale=lambda weight: 2 * weight), 0),
        (RMSNorm(scale=torch.sigmoid), 0),
        # an eps that is not the attribute, by much and by little
        (RMSNorm(used_eps=1e-6), 0),
        (RMSNorm(used_eps=1.1e-5), 0),
        (RMSNorm(dtype=torch.float32), 0),
        (RMSNorm(center=True), 0),
        (Gated(), 0),
        (RaisingNorm(), 0),
        (nn.LayerNorm(16), 0),
        (nn.LayerNorm(16, bias=False), 0),
        (nn.PReLU(16), 0),
    ],
)
def test_a_norm_is_known_by_what_it_computes(norm: nn.Module, count: int) -> None:
    assert fuse_norms(norm) == count
    # and without data
    assert fuse_norms(copy.deepcopy(norm).to("meta")) == count


def test_a_norm_whose_forward_was_replaced_is_left() -> None:
    norm = RMSNorm()
    norm.forward = replaced = lambda hidden: hidden  # type: ignore[method-assign]
    assert fuse_norms(norm) == 0
    assert norm.forward is replaced


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm))])
def test_a_copy_computes_with_its_own_weights(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = tiny("gemma3").model.get_decoder().norm
    fuse_norms(model, kernel=functional.rms_norm)
    hidden = torch.ones(2, model.weight.shape[0])
    before = model(hidden)
    other = copied(model)
    with torch.no_grad():
        other.weight.add_(1.0)
    assert torch.equal(model(hidden), before)
    torch.testing.assert_close(other(hidden), before + 1.0)


def test_a_weight_near_zero_is_not_rounded_with_the_one_that_is_added() -> None:
    norm = RMSNorm(scale=lambda weight: 1 + weight)
    with torch.no_grad():
        norm.weight.fill_(1e-3)
    norm.to(torch.bfloat16)
    hidden = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    own = norm(hidden)
    fuse_norms(norm, kernel=functional.rms_norm)
    torch.testing.assert_close(norm(hidden), own, rtol=2**-7, atol=0.0)
    assert (norm(hidden) == own).float().mean() > 0.95


def test_states_of_another_type_than_the_weights_take_the_norms_own_forward() -> None:
    norm = RMSNorm()
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    own = norm(hidden)

    def kernel(*_: object) -> Tensor:
        raise AssertionError("called")

    fuse_norms(norm, kernel=kernel)
    assert torch.equal(norm(hidden), own)


def test_a_compiled_norm_has_no_break() -> None:
    norm = RMSNorm()
    fuse_norms(norm, kernel=functional.rms_norm)
    hidden = torch.ones(2, 16)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden), norm(hidden))
