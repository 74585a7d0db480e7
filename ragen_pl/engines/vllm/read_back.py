"""Proof that vLLM samples with the weights that it was handed: some are read back from its copy."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragen_pl.engines.errors import RolloutError

# weights of the first layer, whose names end alike in a checkpoint and in vLLM's model
_READ = re.compile(
    r"layers\.0\.(input_layernorm|self_attn\.[qo]_proj|mlp\.(gate|down)_proj)\.weight$"
)
# weights that vLLM keeps as the first rows of a larger one
_FIRST_ROWS = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_LARGEST = 2**24
"""Elements of a weight that is read back; larger ones take long."""


@dataclass(frozen=True, slots=True)
class _Sum:
    """Shape of a weight and the checksum of its bytes."""

    shape: tuple[int, ...]
    checksum: int

    @classmethod
    def of(cls, weight: Tensor) -> _Sum:
        data = weight.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data
        return cls(tuple(weight.shape), zlib.crc32(data))


class ReadBack:
    """Compares checksums of some weights on their way to vLLM with those of its copy.

    vLLM may arrange a weight in another way. The first transfer tells which ones are as they were sent; that it is
    right is checked by log-probs at the start of a run. These weights have to be equal after every other transfer.

    Args:
        dtype: Type that vLLM computes in.
        whole: Whether vLLM has whole weights, not parts of ranks.
    """

    def __init__(self, dtype: torch.dtype, *, whole: bool) -> None:
        self._dtype, self._whole = dtype, whole
        self._sent: dict[str, _Sum] = {}
        self._names: set[str] | None = None

    @property
    def names(self) -> set[str]:
        """Ends of the names of the weights that are compared; empty before the first transfer."""
        return set(self._names or ())

    def noting(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights and note the checksums of some."""
        sent: dict[str, _Sum] = {}
        seen: Counter[str] = Counter()
        for name, weight in weights:
            match = _READ.search(name)
            if match is not None and weight.numel() <= _LARGEST:
                seen[match[0]] += 1
                sent[match[0]] = _Sum.of(weight.to(self._dtype))
            yield name, weight
        # an image encoder may have layers of the same names
        self._sent = {end: one for end, one in sent.items() if seen[end] == 1}

    def check(self, apply: Callable[[Callable[[Any], Any]], list[Any]]) -> None:
        """Compare the weights of the last transfer.

        Args:
            apply: Returns the results of a function of vLLM's model, of each of its workers.

        Raises:
            RolloutError: vLLM has another weight than it was handed.
        """
        shapes = {end: one.shape for end, one in self._sent.items()}
        for found in apply(lambda model: self._read(model, shapes)):
            equal = {end for end, one in found.items() if one == self._sent[end]}
            if self._names is None:
                self._names = equal
            for end in sorted(self._names - equal):
                raise RolloutError(
                    f"rollout/engine=vllm: after a transfer of weights, {end} of its model is not the one that was "
                    "handed over: it would sample with other weights than are trained; set rollout/engine=transformers"
                )

    def _read(
        self, model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, _Sum]:
        """Return the checksums of vLLM's weights by the ends of their names in a checkpoint."""
        found: dict[str, _Sum] = {}
        for end, shape in shapes.items():
            names = {end: False}
            for part, larger in _FIRST_ROWS.items():
                if part in end and self._whole:
                    names[end.replace(part, larger)] = True
            held = [
                weight[: shape[0]] if rows else weight
                for name, weight in model.named_parameters()
                for suffix, rows in names.items()
                if name.endswith(suffix)
            ]
            if len(held) == 1 and tuple(held[0].shape) == shape:
                found[end] = _Sum.of(held[0])
        return found
