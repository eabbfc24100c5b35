"""Runs torch's tests by name: a process that has them imported, and forks the ranks of each.

Started by :mod:`torch_suite.player`. Reads a test's name from each line of its standard input and answers, on
the descriptor of its last argument, with a line of JSON. Before the first it answers with the names of all.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import unittest

from torch_suite import gates


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


def main() -> None:
    """Answers until the input ends."""
    backend, ranks, answers = sys.argv[1], int(sys.argv[2]), os.fdopen(int(sys.argv[3]), "w", buffering=1)
    if backend.startswith("collectives"):
        from collectives.bridge import register_backend

        register_backend("collectives_gloo", "gloo")  # not one of those that come registered
    os.set_inheritable(answers.fileno(), False)
    with tempfile.TemporaryDirectory() as folder:
        tests = gates.load(backend, ranks, folder)
        print(json.dumps(unittest.defaultTestLoader.getTestCaseNames(tests)), file=answers)
        for line in sys.stdin:
            outcome, started = _Outcome(), time.monotonic()
            tests(line.strip()).run(outcome)
            record = {"status": outcome.status, "text": outcome.text, "seconds": time.monotonic() - started}
            print(json.dumps(record), file=answers)


if __name__ == "__main__":
    main()
