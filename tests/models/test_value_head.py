"""The critic's head: zero at first, float32 always."""

import torch

from ragen_pl.models.value_head import ValueHead


def test_a_new_head_says_zero_and_can_learn():
    head = ValueHead(8)
    states = torch.randn(3, 5, 8)
    values = head(states)
    assert values.shape == (3, 5) and not values.any()
    (values - 1).pow(2).sum().backward()
    assert head.layers[2].weight.grad.abs().sum() > 0


def test_the_middle_layers_width_can_be_set():
    assert ValueHead(8, width=3).layers[0].out_features == 3


def test_values_are_float32_also_in_half_precision():
    head = ValueHead(8).bfloat16()
    assert head(torch.randn(2, 8).bfloat16()).dtype == torch.float32


def test_value_is_the_formula():
    head = ValueHead(2, width=1)
    with torch.no_grad():
        head.layers[0].weight.copy_(torch.tensor([[1.0, -1.0]]))
        head.layers[0].bias.zero_()
        head.layers[2].weight.fill_(2.0)
        head.layers[2].bias.fill_(0.5)
    # 2 tanh(1.5 - 1.0) + 0.5
    assert torch.allclose(head(torch.tensor([1.5, 1.0])), torch.tensor(1.4242343))
