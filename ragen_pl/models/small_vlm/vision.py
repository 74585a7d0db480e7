"""The vision encoder: timm's vision transformer with a stem for images of cells.

With additive positions alone a small encoder takes thousands of steps to learn *where* something is. Here each cell's
patch is multiplied by a learned gain of its own, which ties content to place from the first step. A 3x3 convolution
over the cells without gains reads the neighbors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional


class CellStem(nn.Module):
    """Embedding of an image's cells in place of timm's patch embedding.

    Args:
        img_size: Ignored; images of any size up to `max_cells` cells along a side are read.
        patch_size: Pixels along a cell's side.
        in_chans: Color channels.
        embed_dim: Width of a cell's embedding.
        max_cells: Largest number of cells along a side, with gains and positions for each.
    """

    # timm sizes its own position table by this; positions are added here
    num_patches = 0

    def __init__(
        self,
        img_size: int | None = None,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 96,
        max_cells: int = 8,
        **_: Any,
    ) -> None:
        super().__init__()
        self.cell, self.max_cells = patch_size, max_cells
        self.patch = nn.Linear(in_chans * patch_size**2, embed_dim)
        self.norm = nn.LayerNorm(embed_dim)
        self.neighbors = nn.Conv2d(embed_dim, embed_dim, 3, padding=1)
        self.gain = nn.Parameter(torch.empty(max_cells, max_cells, embed_dim))
        self.rows = nn.Parameter(torch.empty(max_cells, 1, embed_dim))
        self.columns = nn.Parameter(torch.empty(1, max_cells, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw wide gains and positions: place matters from the first step on."""
        nn.init.normal_(self.gain)
        nn.init.normal_(self.rows, std=0.4)
        nn.init.normal_(self.columns, std=0.4)

    def forward(self, images: Tensor) -> Tensor:
        """Return `[images, cells, width]` of images `[images, channels, height, width]` from 0 to 255."""
        count, channels, height, width = images.shape
        size, rows, columns = self.cell, height // self.cell, width // self.cell
        if height % size or width % size or not 0 < max(rows, columns) <= self.max_cells:
            raise ValueError(
                f"found an image of {height} x {width} pixels, expected multiples of {size} up to "
                f"{size * self.max_cells}; set model.build.vision.max_cells or patch_size"
            )
        # cut up as bytes, with a quarter of the memory traffic of floats
        cells = images.reshape(count, channels, rows, size, columns, size)
        cells = cells.permute(0, 2, 4, 1, 3, 5).reshape(count, rows, columns, -1)
        cells = cells.to(self.patch.weight.dtype) / 127.5 - 1.0
        cells = self.norm(self.patch(cells))
        placed = cells * self.gain[:rows, :columns] + self.rows[:rows] + self.columns[:, :columns]
        around = functional.gelu(self.neighbors(cells.permute(0, 3, 1, 2)))
        return (placed + around.permute(0, 2, 3, 1)).flatten(1, 2)


def build_encoder(
    *, patch_size: int, width: int, depth: int, heads: int, mlp_ratio: float, max_cells: int
) -> nn.Module:
    """Return timm's vision transformer on a `CellStem`, with one feature for each cell."""
    return VisionTransformer(
        img_size=patch_size * max_cells,
        patch_size=patch_size,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        mlp_ratio=mlp_ratio,
        class_token=False,
        pos_embed="none",
        global_pool="",
        num_classes=0,
        # torch's defaults: timm's narrower weights learn to read later
        weight_init="skip",
        embed_layer=partial(CellStem, max_cells=max_cells),
    )
