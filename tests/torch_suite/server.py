"""Runs torch's tests by name: a process that has them imported, and forks the ranks of each.

Started by :mod:`torch_suite.player`, with the number of a descriptor for answers, each a line of JSON. A line
of its standard input with a backend and a number of ranks forks a process for them: tests are made for one
of each while they are imported, but what they import takes far longer, and is loaded before. A path after
these names a file with tests, in the place of the suite. That process answers with the names of all tests,
then to each line with a test's name, and to an empty one, which ends it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
import unittest
from typing import TextIO

from torch_suite import files, gates

if __name__ == "__mp_main__" and files.VARIABLE in os.environ:  # a process that a test spawned
    files.aim(os.environ[files.VARIABLE])


class _Outcome(unittest.TestResult):
    """The outcome of one test."""

    def __init__(self) -> None:
        super().__init__()
        self.status, self.text = "passed", ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.status, self.text = "skipped", reason

    def addError(self, test: unittest.TestCase, err: object) -> None:
        self.status, self.text = "failed", self._exc_info_to_string(err, test)

    addFailure = addError


def serve(backend: str, ranks: int, path: str, answers: TextIO) -> None:
    """Answers for a backend, a number of ranks and a file (or the suite) until there is an empty line."""
    if backend.startswith("collectives"):
        from collectives.torch_bridge import register_backend

        register_backend("collectives_gloo", "gloo")  # not one of those that come registered
    with tempfile.TemporaryDirectory() as folder:
        tests = files.load(path, backend) if path else gates.load(backend, ranks, folder)
        print(json.dumps(list(tests)), file=answers)
        while name := sys.stdin.readline().strip():
            outcome, started = _Outcome(), time.monotonic()
            tests[name].run(outcome)
            record = {"status": outcome.status, "text": outcome.text, "seconds": time.monotonic() - started}
            print(json.dumps(record), file=answers)
    # What is asked next must not be in this process's buffer of the input, so the other side waits for this.
    print(json.dumps(None), file=answers)


def main() -> None:
    """Forks until the input ends."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    os.set_inheritable(answers.fileno(), False)
    while line := sys.stdin.readline():
        backend, ranks, path = line.strip("\n").split(" ", 2)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                serve(backend, int(ranks), path, answers)
                status = 0
            except BaseException:  # noqa: BLE001 - a forked process must not go on in this function
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            sys.exit(f"the process for {ranks} ranks of {backend} ended with status {status}")


if __name__ == "__main__":
    main()
