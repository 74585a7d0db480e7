"""Seeds derived from counters, and blocks of code with global generators seeded from them."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def derive_seed(*key: int | str) -> int:
    """Return a 48-bit seed determined by the counters of `key`, the same on every machine.

    Examples:
        >>> derive_seed(7, "env", 0, 3) == derive_seed(7, "env", 0, 3)
        True
        >>> derive_seed(7, "env", 0, 3) == derive_seed(7, "env", 0, 4)
        False
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")


def uniforms(seed: int, *, count: int) -> np.ndarray:
    """Return `count` float64 draws from [0, 1) determined by a seed of `derive_seed`."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


@contextlib.contextmanager
def seeded(*key: int | str) -> Iterator[int]:
    """Run a block with Python's, numpy's and torch's global generators seeded from `key`, then restore them.

    Of GPUs it is the present one: a generator of another would take memory there.
    """
    import torch

    torch_state = torch.get_rng_state()
    # before CUDA is used there is no generator, and a seed would wait for it
    on_gpu = torch.cuda.is_initialized()
    gpu_state = torch.cuda.get_rng_state() if on_gpu else None
    numpy_state, python_state = np.random.get_state(), random.getstate()
    seed = derive_seed(*key)
    torch.default_generator.manual_seed(seed)
    if on_gpu:
        torch.cuda.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield seed
    finally:
        torch.set_rng_state(torch_state)
        if gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def random_state() -> dict[str, Tensor]:
    """Return the state of torch's generators by device: the CPU's, and that of the present GPU once one is used."""
    import torch

    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Restore `random_state`, of the devices that are used."""
    import torch

    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


@contextlib.contextmanager
def weights_seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's generator for a while. `torch.manual_seed` would seed the GPUs' generators too."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
