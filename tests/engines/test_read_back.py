"""Weights that are read back from vLLM's copy after a transfer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.vllm.read_back import ReadBack

LAYER = "model.layers.0."
SHAPES = {
    "input_layernorm": (4,), "self_attn.q_proj": (4, 4), "self_attn.k_proj": (2, 4), "self_attn.o_proj": (4, 4),
    "mlp.gate_proj": (6, 4), "mlp.up_proj": (6, 4), "mlp.down_proj": (4, 6),
}  # fmt: skip


class Copy(nn.Module):
    """A model with the arrangement of vLLM's: queries and keys in one weight, and some kept in another order."""

    def __init__(self, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.names: dict[str, str] = {}
        self.load(drawn(0))

    def load(self, weights: dict[str, Tensor], *, lost: str = "") -> None:
        given = {
            name.replace("model.", "language_model.model."): weight.to(self.dtype)
            for name, weight in weights.items()
            if name not in lost
        }
        start = f"language_model.{LAYER}"
        queries = [given.pop(f"{start}self_attn.{part}_proj.weight") for part in "qk"]
        given[f"{start}self_attn.qkv_proj.weight"] = torch.cat(queries)
        # as a kernel of a CPU wants it
        packed = f"{start}mlp.down_proj.weight"
        if packed in given:
            given[packed] = given[packed].flip(0)
        for name, weight in given.items():
            key = self.names.setdefault(name, name.replace(".", "_"))
            self.register_parameter(key, nn.Parameter(weight, requires_grad=False))

    def named_parameters(self, *arguments, **settings):  # type: ignore[no-untyped-def]
        return ((name, getattr(self, key)) for name, key in self.names.items())


def drawn(seed: int) -> dict[str, Tensor]:
    """Return weights of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{LAYER}{name}.weight": torch.randn(shape, generator=generator)
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_does_not_arrive_is_named(dtype: torch.dtype) -> None:
    copy, proof = Copy(dtype=dtype), ReadBack(dtype, whole=True)

    def transfer(seed: int, *, lost: str = "") -> None:
        copy.load(dict(proof.noting(iter(drawn(seed).items()))), lost=lost)
        proof.check(lambda work: [work(copy)])

    transfer(1)
    # one is packed, others are not read
    expected = {"input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"}
    assert proof.names == {f"layers.0.{name}.weight" for name in expected}
    transfer(2)
    with pytest.raises(RolloutError, match=r"layers\.0\.self_attn\.o_proj\.weight of its model"):
        transfer(3, lost=f"{LAYER}self_attn.o_proj.weight")
    transfer(4)


def test_parts_of_ranks_are_not_taken_for_whole_weights() -> None:
    copy, proof = Copy(dtype=torch.float32), ReadBack(torch.float32, whole=False)
    copy.load(dict(proof.noting(iter(drawn(1).items()))))
    proof.check(lambda work: [work(copy)])
    assert "layers.0.self_attn.q_proj.weight" not in proof.names and proof.names


def test_layers_of_the_same_name_are_left_out() -> None:
    """An image encoder has some."""
    copy, proof = Copy(dtype=torch.float32), ReadBack(torch.float32, whole=True)
    twice = drawn(1) | {"vision.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}
    sent = dict(proof.noting(iter(twice.items())))
    copy.load({name: weight for name, weight in sent.items() if name.startswith(LAYER)})
    proof.check(lambda work: [work(copy)])
    assert "layers.0.self_attn.q_proj.weight" not in proof.names and proof.names
