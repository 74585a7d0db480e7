"""The process around vLLM: its global state, kept from the trainer."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch


@contextmanager
def isolated(*, on_gpu: bool) -> Iterator[None]:
    """Run vLLM; the global generators and torch's threads are as before afterwards."""
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    python, arrays, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    # small functions, for which compilers are not worth their time on a CPU
    compilation = nullcontext() if on_gpu else torch._dynamo.config.patch(disable=True)
    try:
        with compilation:
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)
        # vLLM replaces the function on a CPU
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextmanager
def start_environment() -> Iterator[None]:
    """Set the variables that vLLM reads while it starts."""
    changes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        changes["VLLM_LOGGING_LEVEL"] = "ERROR"
    if torch.distributed.is_initialized():
        changes |= {
            "RANK": str(torch.distributed.get_rank()),
            "LOCAL_RANK": str(torch.cuda.current_device() if torch.cuda.is_available() else 0),
        }
    before = {name: os.environ.get(name) for name in changes}
    os.environ |= changes
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def process_groups_kept() -> Iterator[None]:
    """Keep vLLM from ending torch.distributed, which the trainer has initialized."""
    from vllm.distributed import parallel_state

    destroy = parallel_state.destroy_distributed_environment
    parallel_state.destroy_distributed_environment = lambda: None
    try:
        yield
    finally:
        parallel_state.destroy_distributed_environment = destroy


@contextmanager
def by_gloo() -> Iterator[None]:
    """Have the parts of a model on CPUs exchange by gloo.

    vLLM's own way names its shared memory as every other run with a launcher does, and waits for a rank that has ended
    without a limit (0.32).
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    name = "_all_group_ranks_share_shm_group_name"
    own = getattr(CpuCommunicator, name)
    setattr(CpuCommunicator, name, lambda self: False)
    try:
        yield
    finally:
        setattr(CpuCommunicator, name, own)
