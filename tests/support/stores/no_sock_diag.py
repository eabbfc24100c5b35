"""Takes sock_diag(7) away from this process, as kernels and containers may not have it."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct

_SECCOMP_AND_SOCKET = {"x86_64": (317, 41), "aarch64": (277, 198)}
"""Numbers of the two system calls."""

AVAILABLE = platform.machine() in _SECCOMP_AND_SOCKET


def refuse_sock_diag() -> None:
    """Lets all threads fail to open sockets of netlink from now on."""
    seccomp, opens_socket = _SECCOMP_AND_SOCKET[platform.machine()]
    load, jump_if_equal, give_back = 0x20, 0x15, 0x06
    refused, allowed = 0x00050000 | 93, 0x7FFF0000  # EPROTONOSUPPORT
    program = [
        (load, 0, 0, 0),  # the system call
        (jump_if_equal, 0, 3, opens_socket),
        (load, 0, 0, 16),  # its first argument
        (jump_if_equal, 0, 1, socket.AF_NETLINK),
        (give_back, 0, 0, refused),
        (give_back, 0, 0, allowed),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in program))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    set_mode_filter, all_threads, no_new_privileges = 1, 1, 38
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.syscall(
        seccomp, set_mode_filter, all_threads, described
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
