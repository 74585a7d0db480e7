"""Confinement of a process: it can compute, and use no system call besides.

A confined process has no system calls but those that allocate memory, read the clock, read and write open descriptors
and end it (seccomp), and no capabilities. It has three null descriptors, one for its request and one for its result, so
it can open no file or socket, start no process or thread and send no signal. CPU time and memory are limited.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import resource
import signal
import struct
import sys

RESULT, REQUEST = 3, 4
"""Descriptors of a confined process, to write its results to and to read its request from."""

_MIB = 1 << 20

# audit architecture of each machine, the number of madvise, and those of the permitted calls: read, write, close,
# fstat, lseek, mmap, mprotect, munmap, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn, mremap, exit, sigaltstack,
# futex, clock_gettime, exit_group, getrandom
_MACHINES = {
    "x86_64": (
        0xC000003E,
        28,
        (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 25, 60, 131, 202, 228, 231, 318),
    ),
    "aarch64": (
        0xC00000B7,
        233,
        (63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 216, 93, 132, 98, 113, 94, 278),
    ),
}
# permitted advice about memory: normal, random, sequential, will need, don't need, free, huge pages, no huge pages
_ADVICE = (0, 1, 2, 3, 4, 8, 14, 15)
# of capset: version 3 of its structures, this process, and no capabilities
_CAPABILITIES_OF, _NO_CAPABILITIES = struct.pack("Ii", 0x20080522, 0), bytes(24)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_MODE_FILTER = 2
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
# instructions of the filter: load a word of the call, jump if equal, return
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCHITECTURE, _THIRD_ARGUMENT = 0, 4, 32


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def seccomp_filter() -> _Filter:
    """Return the filter that refuses all system calls but those of `_MACHINES`, and other advice than `_ADVICE`.

    What is refused fails with EPERM.

    Raises:
        OSError: The machine is unknown.
    """
    known = _MACHINES.get(platform.machine())
    if sys.platform != "linux" or known is None:
        raise OSError("expected Linux on x86_64 or aarch64")
    architecture, madvise, permitted = known
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
    ]
    lines.append((_LOAD, 0, 0, _NUMBER))
    for number in permitted:
        lines += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    lines += [(_JUMP_EQUAL, 1, 0, madvise), (_RETURN, 0, 0, _REFUSE)]
    lines.append((_LOAD, 0, 0, _THIRD_ARGUMENT))
    for advice in _ADVICE:
        lines += [(_JUMP_EQUAL, 0, 1, advice), (_RETURN, 0, 0, _ALLOW)]
    lines.append((_RETURN, 0, 0, _REFUSE))
    return _Filter(len(lines), b"".join(struct.pack("HBBI", *line) for line in lines))


class Confinement:
    """Limits, descriptors and system call filter of a child, prepared in the server so that a child has little to do.

    Args:
        seconds: CPU time of a child.
        memory_mb: Memory that it may allocate in MiB.

    Raises:
        OSError: The machine is unknown.
    """

    def __init__(self, *, seconds: int, memory_mb: int) -> None:
        self.limits = {
            resource.RLIMIT_CPU: seconds,
            resource.RLIMIT_AS: memory_mb * _MIB,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NPROC: 0,
        }
        self.filter = seccomp_filter()
        library = ctypes.CDLL(None, use_errno=True)
        self.control, self.set_capabilities = library.prctl, library.capset
        self.null = os.open(os.devnull, os.O_RDWR)
        self.output = open(1, "w", closefd=False)  # noqa: SIM115 (the program's)

    def enter(self, request: int, result: int) -> None:
        """Confine this process. Descriptors become `REQUEST` and `RESULT`.

        Raises:
            OSError: The kernel has no seccomp.
        """
        first = RESULT
        for descriptor in sorted((self.null, request, result)):
            os.closerange(first, descriptor)
            first = descriptor + 1
        os.closerange(first, 4096)
        # They may be among those that are overwritten.
        null, result, request = (
            fcntl.fcntl(descriptor, fcntl.F_DUPFD, REQUEST + 1)
            for descriptor in (self.null, result, request)
        )
        for number in range(RESULT):
            os.dup2(null, number)
        os.dup2(result, RESULT)
        os.dup2(request, REQUEST)
        os.closerange(REQUEST + 1, 4096)
        sys.stdin = sys.stdout = sys.stderr = self.output
        for limit, value in self.limits.items():
            resource.setrlimit(limit, (value, value))
        if (
            self.set_capabilities(_CAPABILITIES_OF, _NO_CAPABILITIES)
            or self.control(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            or self.control(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            or self.control(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(self.filter), 0, 0)
        ):
            raise OSError(ctypes.get_errno(), "seccomp or capset")
