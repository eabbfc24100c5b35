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
from collections.abc import Mapping, Sequence

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


def given_at_start(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns what of a program's must be the server's: variables and the namespace of the network."""
    given = {
        name: value
        for name, value in environment.items()
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
    ended = None
    if address is not None and can_be_served(words):
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until they can be passed on
        with (
            contextlib.suppress(ConnectionRefusedError, FileNotFoundError),
            socket.socket(socket.AF_UNIX) as end,
        ):
            end.connect(address)
            ended = _served(end, words)
    if ended is None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        os.execv(sys.executable, [sys.executable, *words])
    if ended < 0:
        if -ended not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    os._exit(ended)


def _served(end: socket.socket, words: list[str]) -> int | None:
    """Returns the exit status, negative for a signal; ``None`` where the server refuses."""
    listed = os.listdir("/proc/self/fd")  # noqa: PTH208 - pathlib's modules take as long as this program
    files = {file: file for file in map(int, listed) if file != end.fileno() and _is_open(file)}
    ignored = [number for number in _FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
    leads = os.getpgrp() == os.getpid()
    pid = ask(end, words, files, dict(os.environ), os.getcwd(), leads, ignored)  # noqa: PTH109
    if pid == 0:
        return None
    # Also a signal that comes right before the wait ends it.
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in _FORWARDED:
        if number not in ignored:
            signal.signal(number, lambda number, _: _pass_on(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while end not in select.select([end, waker], [], [])[0]:
        os.read(waker, 64)
    return status(end)


def ask(
    end: socket.socket, words: list[str], files: dict[int, int], environment: dict[str, str], folder: str,
    leads: bool = False, ignored: Sequence[int] = (),
) -> int:  # fmt: skip
    """Has a server fork a process that runs a program.

    Args:
        end: a new connection to the server; its end before that of the process kills it.
        words: what follows ``python``.
        files: files of this process by the number that each has there.
        environment: its environment.
        folder: its working folder.
        leads: whether it leads a group of processes.
        ignored: the signals that it ignores.

    Returns:
        The number of the process; 0 where the server cannot do it.
    """
    request = {
        "words": words, "files": list(files), "environment": environment, "folder": folder,
        "umask": _umask(), "given": given_at_start(environment), "leads": leads, "ignored": [*ignored],
    }  # fmt: skip
    text = json.dumps(request).encode()
    socket.send_fds(end, [len(text).to_bytes(4, "little")], list(files.values()))
    end.sendall(text)
    return int(_line(end) or 0)


def status(end: socket.socket) -> int:
    """Waits for the end of the process; returns its exit status, negative for a signal."""
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
