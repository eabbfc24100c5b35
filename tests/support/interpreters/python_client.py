"""Has a preloaded process do what this interpreter was asked for; see :mod:`preloaded_python`.

The program of a stand-in for ``python``: ``python -I -S python_client.py WORDS...``. Output, input and other
open files are those of this process, signals go on to the one that works, and the exit status is the same.
Where the server cannot do it (options or variables that an interpreter reads at its start), this process
becomes the interpreter that was asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys

ADDRESS = "COLLECTIVES_TEST_PYTHON"
"""The environment variable that holds the path of the server's socket."""

READ_AT_START = (
    *("PYTHON", "LD_PRELOAD", "GLIBC_", "MALLOC_", "OMP_", "MKL_", "OPENBLAS_"),
    *("TORCH_LOGS", "TORCH_CPP_LOG", "TORCH_DEVICE_BACKEND", "TORCH_DISTRIBUTED_DEBUG", "TORCHDYNAMO"),
)
"""How the names of variables begin that are read when an interpreter, its libraries or torch are loaded."""
READ_LATER = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")
"""Those of them that the server heeds."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def given_at_start() -> dict[str, str]:
    """Returns what of this process's must be the server's: variables and the namespace of the network."""
    given = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(READ_AT_START) and name not in READ_LATER
    }
    return {**given, "network": os.readlink("/proc/self/ns/net")}  # noqa: PTH115


def can_be_served(words: list[str]) -> bool:
    """Returns whether a server can do this: no option but ``-u``, ``-P`` and simple filters of warnings."""
    rest = list(words)
    while rest and rest[0] in ("-u", "-P", "-W"):
        if rest.pop(0) == "-W" and (not rest or rest.pop(0) not in ("error", "ignore")):
            return False
    return bool(rest) and (rest[0] in ("-c", "-m") or not rest[0].startswith("-"))


def main() -> None:
    words = sys.argv[1:]
    address = os.environ.get(ADDRESS)
    status = None
    if address is not None and can_be_served(words):
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until they can be passed on
        with (
            contextlib.suppress(ConnectionRefusedError, FileNotFoundError),
            socket.socket(socket.AF_UNIX) as end,
        ):
            end.connect(address)
            status = _served(end, words)
    if status is None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        os.execv(sys.executable, [sys.executable, *words])
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _served(end: socket.socket, words: list[str]) -> int | None:
    """Returns the exit status, negative for a signal; ``None`` where the server refuses."""
    listed = os.listdir("/proc/self/fd")  # noqa: PTH208 - pathlib's modules take as long as this program
    files = sorted(file for file in map(int, listed) if file != end.fileno() and _is_open(file))
    request = {
        "words": words,
        "files": files,
        "folder": os.getcwd(),  # noqa: PTH109
        "umask": _umask(),
        "leads": os.getpgrp() == os.getpid(),
        "environment": dict(os.environ),
        "given": given_at_start(),
        "ignored": [number for number in _FORWARDED if signal.getsignal(number) is signal.SIG_IGN],
    }
    text = json.dumps(request).encode()
    socket.send_fds(end, [len(text).to_bytes(4, "little")], files)
    end.sendall(text)
    pid = int(_line(end) or 0)
    if pid == 0:
        return None
    # Also a signal that comes right before the wait ends it.
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in _FORWARDED:
        if number not in request["ignored"]:
            signal.signal(number, lambda number, _: _pass_on(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while end not in select.select([end, waker], [], [])[0]:
        os.read(waker, 64)
    return int(_line(end) or -signal.SIGKILL)


def _line(end: socket.socket) -> bytes:
    """Returns the next line, and takes nothing of what follows."""
    line = b""
    while byte := end.recv(1):
        line += byte
        if byte == b"\n":
            break
    return line


def _is_open(file: int) -> bool:
    """Returns whether a listed file is not that of the listing."""
    with contextlib.suppress(OSError):
        os.fstat(file)
        return True
    return False


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def _pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    main()
