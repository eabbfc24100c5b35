"""Takes system calls away from this process, as kernels and containers may not have them."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct

_SECCOMP_AND_SOCKET = {"x86_64": (317, 41), "aarch64": (277, 198)}
"""Numbers of the two system calls."""

_PIDFD_OPEN = 434
"""Its number everywhere."""

AVAILABLE = platform.machine() in _SECCOMP_AND_SOCKET


def refuse_sock_diag() -> None:
    """Lets all threads fail to open sockets of netlink from now on."""
    _refuse(_SECCOMP_AND_SOCKET[platform.machine()][1], errno.EPROTONOSUPPORT, socket.AF_NETLINK)


def refuse_pidfd_open() -> None:
    """Lets all threads fail to get descriptors of processes from now on."""
    _refuse(_PIDFD_OPEN, errno.ENOSYS)


def _refuse(number: int, error: int, first: int | None = None) -> None:
    """Lets all threads fail to make a system call, with any first argument or just one."""
    load, jump_if_equal, give_back = 0x20, 0x15, 0x06
    refused, allowed = 0x00050000 | error, 0x7FFF0000
    program = [
        (load, 0, 0, 0),  # the system call
        (jump_if_equal, 0, 1 if first is None else 3, number),
        *([] if first is None else [(load, 0, 0, 16), (jump_if_equal, 0, 1, first)]),
        (give_back, 0, 0, refused),
        (give_back, 0, 0, allowed),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in program))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    set_mode_filter, all_threads, no_new_privileges = 1, 1, 38
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.syscall(
        _SECCOMP_AND_SOCKET[platform.machine()][0], set_mode_filter, all_threads, described
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
