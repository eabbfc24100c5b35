"""The repository that this package may lie in, and its tests."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import collectives
from collectives.bench.acceptance.report import CheckFailedError, CheckSkippedError, Found

__all__ = ["root", "run_tests"]

_LIMIT_S: Final = 1800.0
_TAIL: Final = 3000


def root() -> Path:
    """Returns the folder that the package lies in: of a checkout, its root."""
    return Path(collectives.__file__).resolve().parents[1]


def run_tests(words: Sequence[str], left_out: str = "") -> Found:
    """Runs tests of the repository; returns their numbers in words and as figures.

    Args:
        words: arguments of pytest.
        left_out: what those leave out, in words.

    Raises:
        CheckSkippedError: there is no repository, or no test failed, but some were skipped.
        CheckFailedError: tests failed, or none was run.
    """
    folder = root()
    if not (folder / "tests" / "gpu").is_dir():
        raise CheckSkippedError(
            "the tests are part of the repository and not of the installed package; run the command from a "
            "checkout that was installed with pip install -e '.[dev]'"
        )
    with tempfile.TemporaryDirectory(prefix="collectives-accept-") as written:
        report = Path(written, "tests.xml")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if not report.exists():
            raise CheckFailedError(f"pytest ended with status {done.returncode}: {done.stdout[-_TAIL:]}")
        suites = list(ET.parse(report).iter("testsuite"))  # noqa: S314 - pytest has just written it
    kinds = ("tests", "failures", "errors", "skipped")
    counts = {kind: sum(int(suite.get(kind, 0)) for suite in suites) for kind in kinds}
    if done.returncode:
        raise CheckFailedError(f"pytest ended with status {done.returncode}: {done.stdout[-_TAIL:]}")
    if counts["skipped"]:
        raise CheckSkippedError(f"{counts['skipped']} of {counts['tests']} tests: {done.stdout[-_TAIL:]}")
    said = f"{counts['tests']} tests passed"
    return f"{said}; left out: {left_out}" if left_out else said, counts
