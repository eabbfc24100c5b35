"""Plays tests of torch's suite in a process of its own, :mod:`torch_suite.server`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass

import preloaded_python
from sources import PYTHONPATH, SAFE_PATH

_TEST_SECONDS = "60"


@dataclass(frozen=True)
class Outcome:
    """What became of a test.

    Attributes:
        status: ``passed``, ``skipped`` or ``failed``.
        text: the reason or the error.
        seconds: how long it took.
    """

    status: str
    text: str
    seconds: float


class Player:
    """The server of torch's tests, for a backend and number of ranks at a time; to be closed.

    Attributes:
        names: names of all tests, once it was told whose.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._whose: tuple[str, int, str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server runs
        answers, theirs = os.pipe()
        environment = {
            **os.environ,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": _TEST_SECONDS,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": PYTHONPATH,
        }
        try:
            self._process = subprocess.Popen(
                [preloaded_python.executable(), *SAFE_PATH, "-m", "torch_suite.server", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
                start_new_session=True,
                text=True,
                bufsize=1,
                env=environment,
            )
        finally:
            os.close(theirs)
        self._answers = os.fdopen(answers)

    def take(self, backend: str, ranks: int, path: str = "") -> None:
        """Plays the tests of a backend from now on.

        Args:
            backend: name in ``torch.distributed``.
            ranks: number of ranks; those of a file have their own.
            path: a file with tests; torch's suite without.
        """
        if self._whose == (backend, ranks, path):
            return
        if self._whose is not None:
            self._ask("")
        self._whose = backend, ranks, path
        self.names = self._ask(f"{backend} {ranks} {path}")

    def _ask(self, question):
        self._process.stdin.write(f"{question}\n")
        line = self._answers.readline()
        if not line:
            self._log.seek(0)
            output = self._log.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"the server ended with status {self._process.wait()}\n{output}")
        return json.loads(line)

    def play(self, name: str) -> Outcome:
        """Runs a test."""
        return Outcome(**self._ask(name))

    def close(self) -> None:
        """Ends the server, and what it may have left."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._answers.close()
        self._log.close()
