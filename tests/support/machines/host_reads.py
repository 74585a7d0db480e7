"""Counts how often the host has to know what a device computed."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Counts operations whose result the host has to know, on any device."""

    READS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.is_nonzero.default,
    )

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        indices = args[1] if "index" in str(operation) and len(args) > 1 else ()
        masks = [
            each
            for each in (indices if isinstance(indices, list) else [])
            if each is not None and each.dtype == torch.bool
        ]
        self.count += operation in self.READS or bool(masks)
        return operation(*args, **(kwargs or {}))
