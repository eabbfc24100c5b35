"""Plays an interpreter again and again: a fork of this process, which has loaded torch, runs each program.

Started by :mod:`preloaded_python` as a script, with the number of its listening socket, the path of the
stand-in and the modules to load. It has one thread, so that forking is safe. Whoever asks
(:mod:`python_client`) sends the words behind ``python``, the environment, the folder and the open files,
and learns the process's number and, later, its exit status; its end before that ends the process. The
server ends, and its processes with it, when its standard input does.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_client import given_at_start

_LARGEST = 250
"""The number of files that one message may carry, and more than a process of the tests has open."""
_HIGH = 512
"""Received files are moved beyond this number, then to the numbers that they have with the one who asks."""


@dataclass
class _Running:
    """A process that somebody waits for.

    Attributes:
        pid: its number.
        pidfd: becomes readable when it ends.
        asked_by: the connection of the one who waits.
        leads: whether it leads a group of processes, which ends with it where it is killed.
    """

    pid: int
    pidfd: int
    asked_by: socket.socket
    leads: bool

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.leads:
                os.killpg(self.pid, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)  # it may not lead yet


class Server:
    """Forks a process for each request.

    Args:
        listener: where requests come.
        given: what this process was given at its start, see :func:`python_client.given_at_start`.
    """

    def __init__(self, listener: socket.socket, given: dict[str, str]) -> None:
        self._listener = listener
        self._given = given
        self._running: list[_Running] = []

    def next_program(self) -> dict[str, Any] | None:
        """Returns, in a fork, what it is to carry out; in the server, at its end, ``None``."""
        while True:
            poller = select.poll()
            poller.register(0, select.POLLIN)
            poller.register(self._listener, select.POLLIN)
            for one in self._running:
                poller.register(one.pidfd, select.POLLIN)
                poller.register(one.asked_by, select.POLLRDHUP)
            ready = {number for number, _ in poller.poll()}
            if 0 in ready:
                for one in self._running:
                    one.kill()
                return None
            for one in list(self._running):
                if one.pidfd in ready:
                    self._finish(one)
                elif one.asked_by.fileno() in ready:
                    one.kill()
                    self._finish(one)
            if self._listener.fileno() in ready and (request := self._accept()) is not None:
                return request

    def _finish(self, one: _Running) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1])
        os.close(one.pidfd)
        with one.asked_by, contextlib.suppress(BrokenPipeError):
            one.asked_by.sendall(b"%d\n" % status)
        self._running.remove(one)

    def _accept(self) -> dict[str, Any] | None:
        """Forks a process for a request, and returns the request in that process.

        A request of a process that was given something else at its start is refused.
        """
        asked_by, _ = self._listener.accept()
        files: list[int] = []
        try:
            head, files, _, _ = socket.recv_fds(asked_by, 4, _LARGEST)
            with asked_by.makefile("rb") as source:
                request = json.loads(source.read(int.from_bytes(head, "little")))
        except (OSError, ValueError):  # who asked was killed meanwhile
            request = None
        if request is None or request["given"] != self._given:
            asked_by.close()
        elif (pid := os.fork()) == 0:
            for connection in (self._listener, asked_by, *(one.asked_by for one in self._running)):
                connection.detach()  # closed with all other files, whose numbers others are to have
            _take_files(files, request["files"])
            if request["leads"]:
                os.setsid()
            return request
        else:
            with contextlib.suppress(BrokenPipeError):
                asked_by.sendall(b"%d\n" % pid)
            self._running.append(_Running(pid, os.pidfd_open(pid), asked_by, request["leads"]))
        for file in files:
            os.close(file)
        return None


def _take_files(files: list[int], numbers: list[int]) -> None:
    """Gives this process the files that were sent, under their numbers, and no others."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in files]
    os.closerange(0, _HIGH)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def run(request: dict[str, Any]) -> None:
    """Does what an interpreter with these words and this environment does."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    words = request["words"]
    safe = bool(os.environ.get("PYTHONSAFEPATH"))
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    while (kind := words.pop(0)) in ("-u", "-P", "-W"):
        safe = safe or kind == "-P"
        unbuffered = unbuffered or kind == "-u"
        if kind == "-W":
            warnings.simplefilter(words.pop(0))
    warnings.filterwarnings("ignore", "'.*' found in sys.modules after import of package", RuntimeWarning)
    if unbuffered:
        sys.stdout.reconfigure(write_through=True)
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if kind == "-m":
        name = words.pop(0)
        sys.argv = [name, *words]
        sys.path[:0] = [] if safe else [str(Path.cwd())]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    if kind == "-c":
        sys.argv = ["-c", *words[1:]]
        sys.path[:0] = [] if safe else [""]
        code = compile(words[0], "<string>", "exec", dont_inherit=True)
    else:
        sys.argv = [kind, *words]
        sys.path[:0] = [] if safe else [str(Path(kind).resolve().parent)]
        module.__file__ = str(Path(kind).absolute())
        code = compile(Path(kind).read_bytes(), module.__file__, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def main(descriptor: str, executable: str, *modules: str) -> None:
    own, given = sys.path[0], given_at_start()
    for name in modules:
        with contextlib.suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(name)
    sys.path.remove(own)
    sys.executable = executable
    multiprocessing.set_executable(executable)
    gc.collect()
    gc.freeze()
    listener = socket.socket(fileno=int(descriptor))
    request = Server(listener, given).next_program()
    if request is None:
        return
    try:
        run(request)
    except SystemExit as end:
        if "--multiprocessing-fork" in request["words"]:
            os._exit(end.code)  # as those end that multiprocessing forks; it has done all else
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
