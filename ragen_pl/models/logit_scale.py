"""What a model computes between the decoder's states and its logits, besides the product with the head.

Granite divides the logits, HyperCLOVAX multiplies them by a value of the same name, AyaVision's config has Cohere's
factor and its forward leaves it out, Gemma 2 bounds them. So none of it is read from a config: the model's own forward
computes the logits of chosen values in place of those of decoder and head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# values of the head from which the scale is read, and others that it must explain
_SMALL, _LARGE, _OTHERS = 1.0, 1e12, (-3.0, 0.5, 7.0, 100.0)
_TOLERANCE = 1e-5
# of the chosen values, for a model without data too
_REAL: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}


@dataclass(frozen=True, slots=True)
class LogitScale:
    """Logits of a value `x` of the head: `factor * x`, or `bound * tanh(factor * x / bound)`.

    Attributes:
        factor: Factor of the head's values.
        bound: Bound of the logits, as in Gemma 2; None for none.
    """

    factor: float = 1.0
    bound: float | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Return the logits of the head's values, both `[…, vocab]`."""
        logits = values if self.factor == 1.0 else values * self.factor
        return logits if self.bound is None else self.bound * torch.tanh(logits / self.bound)

    @classmethod
    def of(cls, model: PreTrainedModel, decoder: nn.Module) -> LogitScale:
        """Measure the scale of a model, in float64 and without its weights.

        Args:
            model: Model with a head.
            decoder: Module whose states the head reads.

        Raises:
            ValueError: Its logits are something else.
        """
        try:
            small, large = (_logit(model, decoder, value) for value in (_SMALL, _LARGE))
            found = _explanation(small, large)
            expected = [float(found(torch.tensor(value, **_REAL))) for value in _OTHERS]
            logits = [_logit(model, decoder, value) for value in _OTHERS]
        # whatever a forward that is written in another way leads to
        except Exception as error:
            raise ValueError(
                f"model.build: {_name(model)} computes its logits in a way that is not known here: from more than "
                "token ids, or not by one layer from the states of its decoder; choose another model"
            ) from error
        if not all(map(_close, logits, expected)):
            raise ValueError(
                f"model.build: the logits of {_name(model)} are not those of its head times a factor, with or without "
                f"a bound: {logits} for values of {list(_OTHERS)}; choose another model"
            )
        return found


def _explanation(small: float, large: float) -> LogitScale:
    """Return the scale that gives these logits of `_SMALL` and `_LARGE`."""
    if _close(large * _SMALL, small * _LARGE):
        return LogitScale(factor=_rounded(small / _SMALL))
    factor = large * math.atanh(small / large) / _SMALL
    return LogitScale(factor=_rounded(factor), bound=_rounded(large))


def _rounded(value: float) -> float:
    """Return a value without the last digits, so that a factor of 1 is 1."""
    return float(f"{value:.12g}")


def _close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=_TOLERANCE)


def _name(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


class _States:
    """Output of a decoder that has its states only."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        """Return nothing for what else a decoder may give."""

    def __getitem__(self, item: int | slice) -> Any:
        return (self.last_hidden_state,)[item]


@torch.inference_mode()
def _logit(model: PreTrainedModel, decoder: nn.Module, value: float) -> float:
    """Return the logit of a value of the head, which is multiplied as the states are that the head reads."""
    head = model.get_output_embeddings()
    vocabulary, width = head.weight.shape
    states = torch.linspace(0.5, 1.0, width, **_REAL)[None, None]

    def values(hidden: Tensor) -> Tensor:
        ratios = (hidden / states).flatten()
        ratio = float(ratios[0])
        if not torch.allclose(ratios, ratios[0].expand_as(ratios), rtol=_TOLERANCE):
            raise ValueError("the head reads other states than the decoder's")
        if head.bias is not None and not _close(ratio, 1.0):
            raise ValueError("the states are scaled before a head with a bias")
        return torch.full((1, 1, vocabulary), value * ratio, **_REAL)

    # some models call the decoder itself (BART); that of Llama 4 has the head
    parts = {decoder, model.get_decoder()}
    decoders = [part for part in parts if all(inner is not head for inner in part.modules())]
    with ExitStack() as stack:
        for part in decoders:
            stack.enter_context(_computing(part, lambda *_, **__: _States(states)))
        stack.enter_context(_computing(head, values))
        ids = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        logits = model.forward(input_ids=ids).logits
    # some families rule out single tokens
    return float(logits.double().median())


@contextmanager
def _computing(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute something else for a while."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
