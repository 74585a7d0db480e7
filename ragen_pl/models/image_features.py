"""Features of images, as the decoder reads them in place of image tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFeatures:
    """Features of images, one image after the other."""

    tokens: Tensor
    """`[image tokens, hidden]`, embeddings of the image tokens."""
    counts: tuple[int, ...]
    """Number of image tokens of each image."""
    deepstack: tuple[Tensor, ...] = ()
    """Features added to the states after the first decoder layers, each `[image tokens, hidden]` (Qwen3-VL)."""
    grids: Tensor | None = None
    """int64 `[images, 3]`, time, height and width in patches, or `[images, 2]`; None where positions have one axis."""
    origin: Tensor | None = None
    """int64 `[image tokens]`, number of each token in the features that `select` took them from; None for others."""

    def select(self, images: Sequence[int], patches: Sequence[np.ndarray | None]) -> Self:
        """Return the features of these images, in this order.

        Args:
            images: Numbers of the images; an image may appear several times.
            patches: Indices of the patches shown of each; None for all.
        """
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        index = [
            starts[number] + (np.arange(self.counts[number]) if shown is None else shown)
            for number, shown in zip(images, patches, strict=True)
        ]
        grids = self.grids
        rows = torch.from_numpy(np.concatenate(index)).to(self.tokens.device)
        return type(self)(
            tokens=self.tokens[rows],
            counts=tuple(len(shown) for shown in index),
            deepstack=tuple(layer[rows] for layer in self.deepstack),
            grids=None if grids is None else grids[torch.tensor(list(images), device=grids.device)],
            origin=rows,
        )

    def between(self, start: int, stop: int) -> Self | None:
        """Return the features of the image tokens from `start` to `stop`, which are those of whole images."""
        ends = np.cumsum(self.counts).tolist()
        images = [number for number, end in enumerate(ends) if start < end <= stop]
        return self.select(images, [None] * len(images)) if images else None

    def split(self) -> list[Self]:
        """Return the features of each image."""
        tokens = self.tokens.split(self.counts)
        layers = [layer.split(self.counts) for layer in self.deepstack]
        return [
            type(self)(
                tokens=tokens[number],
                counts=(count,),
                deepstack=tuple(layer[number] for layer in layers),
                grids=None if self.grids is None else self.grids[number : number + 1],
            )
            for number, count in enumerate(self.counts)
        ]

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the features of all images of the parts."""
        if len(parts) == 1:
            return parts[0]
        grids = [part.grids for part in parts if part.grids is not None]
        return cls(
            tokens=torch.cat([part.tokens for part in parts]),
            counts=tuple(count for part in parts for count in part.counts),
            deepstack=tuple(
                torch.cat(layers)
                for layers in zip(*(part.deepstack for part in parts), strict=True)
            ),
            grids=torch.cat(grids) if grids else None,
        )
