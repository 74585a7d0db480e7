"""Bytes that a process receives by TCP, counted by the kernel, and ranks that count them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

_SOCKETS = Path("/proc/self/fd")
# of `tcpi_bytes_received` in Linux's `struct tcp_info`
_PLACE, _LENGTH = 128, 136


def received_bytes() -> int:
    """Return the number of bytes that the open TCP connections of this process have received.

    Raises:
        RuntimeError: The kernel does not count them.
    """
    total = 0
    for entry in os.listdir(_SOCKETS):
        try:
            if not os.readlink(_SOCKETS / entry).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(entry)))
        except FileNotFoundError:
            # the folder's own descriptor
            continue
        with connection:
            of_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if not of_internet or connection.type != socket.SOCK_STREAM:
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) < _LENGTH:
            raise RuntimeError("received bytes are counted by Linux 4.6 or later alone")
        total += struct.unpack_from("=Q", info, _PLACE)[0]
    return total


def received_in(work: Callable[[], T]) -> tuple[T, int]:
    """Return a function's result and the bytes that this rank received in it. All ranks must call it.

    The few bytes of a barrier are counted too.
    """
    # nobody sends before all have looked
    dist.barrier()
    before = received_bytes()
    dist.barrier()
    result = work()
    received = received_bytes() - before
    # a rank that ends closes its connections, and the others then close theirs
    dist.barrier()
    return result, received
