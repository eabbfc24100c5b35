"""A stand-in for the interpreter, whose processes start in a moment: they have torch loaded.

Most of what a rank's start costs is the import of torch, two to five seconds of processor time. With the
fixture ``preloaded_python`` a test, and all that it starts, finds under ``sys.executable`` a program that
has the server of :mod:`python_server` fork a process instead. Arguments, environment, open files, signals
and exit status are those of an interpreter; its number is not that of the process that works.

Not for tests of what an interpreter loads or prints at its start, of the death of a process's parent, or of a
process that is stopped by the number that ``subprocess`` tells. Ranks of :mod:`harness` are forked off the
same server.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TypeVar

import pytest
import python_client
import python_server
from folders import Folder
from sources import PYTHONPATH

_OF_RANKS = [
    "torch",
    "torch._dynamo",  # which optimizers load in their first step
    "pytest",
    "collectives.ranks.processes",
    "collectives.backends.host",
    "collectives.backends.gloo",
    "collectives.backends.round_robin",
    "collectives.ddp.hooks",
    "collectives.ddp.optim",
    # The providers of NCCL, which load that when they are asked to.
    "cupy",
    "pynccl.binding",
    "pynccl.utils.libutils",
    # Torch's systems, most of which the compiler has loaded.
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]
OF_PROGRAMS = ["sklearn.datasets", "collectives.bench.allreduce"]

_NAME = "python"
_PATIENCE_S = 30.0
"""How long the server may take to load its modules, where it is to end at once, and to end its processes."""
_started: list[_Server] = []
_address = os.environ.get(python_client.ADDRESS)
"""The path of the server's socket, once there is one; processes that share the tests begin with it."""


@functools.cache
def environment() -> dict[str, str]:
    """Returns that of the server and of ranks: what it is at the first call, before a test changes it."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


class _Server:
    """The process that forks, and the folder with its socket and the stand-in."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._folder = Folder("python")
        folder = self._folder.path
        stand_in = folder / _NAME
        words = [sys.executable, "-I", "-S", python_client.__file__]
        stand_in.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        stand_in.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "socket"))
            listener.listen(64)
            command = [sys.executable, python_server.__file__, str(listener.fileno()), str(stand_in)]
            self._process = subprocess.Popen(
                [*command, *modules],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
                env=environment(),
            )

    def close(self) -> None:
        try:
            self._process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._folder.close()


def start(*modules: str) -> None:
    """Starts the server, with further modules; processes that share the tests find it by the environment."""
    global _address
    server = _Server([*_OF_RANKS, *modules])
    _started.append(server)
    _address = os.environ[python_client.ADDRESS] = str(server._folder.path / "socket")


def stop() -> None:
    """Ends the server and all its processes, where this process has started it."""
    global _address
    forkserver._forkserver._stop()  # that of multiprocessing, which the product uses, holds one of them
    while _started:
        _started.pop().close()
        _address = None
        del os.environ[python_client.ADDRESS]


def connect() -> socket.socket:
    """Returns a new connection to the server, for :func:`python_client.ask`."""
    if _address is None:
        start()
    end = socket.socket(socket.AF_UNIX)
    end.connect(str(_address))
    return end


def executable() -> str:
    """Returns the stand-in where a server runs, else this interpreter."""
    address = os.environ.get(python_client.ADDRESS)
    return sys.executable if address is None else str(Path(address).with_name(_NAME))


_Self = TypeVar("_Self", bound="Helper")


class Helper:
    """A script of the tests beside them, for the length of a ``with`` block.

    It says ``ready`` on its output, and ends with its input.
    """

    def __init__(self, file: str, *words: str) -> None:
        variables = {**environment(), "PYTHONPATH": PYTHONPATH}
        if (address := os.environ.get(python_client.ADDRESS)) is not None:
            variables[python_client.ADDRESS] = address  # of a server that has started since
        self._process = subprocess.Popen(
            [executable(), file, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def __enter__(self: _Self) -> _Self:  # noqa: PYI019 - typing.Self is newer than Python 3.10
        assert self._output.readline() == "ready\n"
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:
            self._input.close()

    def end(self, text: str = "") -> str:
        """Gives it its last input; returns what it says then."""
        self._input.write(text)
        self._input.close()
        return self._output.read()


@pytest.fixture(scope="module")
def preloaded_python() -> Iterator[str]:
    """Has ``sys.executable`` be the stand-in; gives its path."""
    if python_client.ADDRESS not in os.environ:
        start(*OF_PROGRAMS)
    resource_tracker.ensure_running()  # by the interpreter itself, because it outlives the server
    stand_in = executable()
    before = sys.executable
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # as the server has it
        patch.setattr(sys, "executable", stand_in)
        multiprocessing.set_executable(stand_in)
        yield stand_in
        multiprocessing.set_executable(before)


@pytest.fixture
def fresh_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has what a test starts load everything itself, with the stand-in, too."""
    monkeypatch.delenv(python_client.ADDRESS, raising=False)
