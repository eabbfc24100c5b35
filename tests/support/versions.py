"""Runs the quick tier in a new environment.

Use: ``python tests/support/versions.py --torch 2.12.0 --numpy 1.26.4 --python python3.12 -- -n 2``. Clones
the last commit of the checkout, installs the clone with the extra ``dev`` as README says, and runs pytest.
Versions that are not named stay those of constraints.txt. What follows ``--`` goes to pytest.

Prints a row of Markdown, then the same as JSON with the commit and the names of the tests that failed. The
exit status is pytest's. For x86-64, PyPI has CUDA builds of torch alone, which bring several GB of packages;
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu finds builds for the CPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

CHECKOUT = Path(__file__).resolve().parents[2]

INSTALLED = """
import json, platform
from importlib.metadata import version
print(json.dumps({"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")}))
"""


@dataclass(frozen=True)
class Row:
    """What was run, and what came out."""

    python: str
    torch: str
    numpy: str
    date: str
    commit: str
    without: list[str]
    passed: int
    failed: list[str]
    skipped: int

    def markdown(self) -> str:
        """Returns the row of the table."""
        result = f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped"
        without = "".join(f"; without {name}" for name in self.without)
        return f"| {self.python} | {self.torch} | {self.numpy} | {self.date} | {result}{without} |"


def pinned(constraints: str, versions: dict[str, str]) -> str:
    """Returns the text of constraints.txt with other versions of some packages."""
    lines = [line for line in constraints.splitlines() if re.split("[=<> ]", line)[0] not in versions]
    return "\n".join([*lines, *(f"{name}=={version}" for name, version in versions.items())]) + "\n"


def left_out(project: str, names: Sequence[str]) -> str:
    """Returns the text of pyproject.toml without the lines that ask for some packages."""
    for name in names:
        project, count = re.subn(rf'^ *"{re.escape(name)}[^\w-].*\n', "", project, flags=re.MULTILINE)
        if not count:
            raise SystemExit(f"no line of pyproject.toml asks for {name} alone")
    return project


def outcomes(report: Path) -> tuple[Counter[str], list[str]]:
    """Returns how many tests ended how, and the names of those that failed, from pytest's report in XML."""
    ends: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        name, kinds = f"{case.get('classname')}::{case.get('name')}", {child.tag for child in case}
        if kinds & {"failure", "error"}:
            ends[name] = "failed"  # one whose fixture fails after it has a second entry
        else:
            ends.setdefault(name, "skipped" if "skipped" in kinds else "passed")
    return Counter(ends.values()), [name for name, end in ends.items() if end == "failed"]


def play(given: argparse.Namespace, folder: Path) -> tuple[Row, int]:
    """Installs and tests in a folder; returns the row and pytest's status."""
    home, clone, report = folder / "environment", folder / "clone", folder / "report.xml"
    python = home / "bin" / "python"
    # As the environment's activation does: tests start torchrun and mpirun by their names.
    environment = {
        **{k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}},
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(home),
        "OMP_NUM_THREADS": "1",
    }

    def run(*command: str | Path, check: bool = True) -> int:
        here = clone if clone.exists() else folder
        return subprocess.run(command, cwd=here, env=environment, stdout=sys.stderr, check=check).returncode

    def say(*command: str | Path) -> str:
        return subprocess.check_output(command, cwd=clone, env=environment, text=True)

    run("git", "clone", "-q", CHECKOUT, clone)
    others = {name: value for name in ("torch", "numpy") if (value := getattr(given, name))}
    constraints, project = clone / "constraints.txt", clone / "pyproject.toml"
    constraints.write_text(pinned(constraints.read_text("utf-8"), others), "utf-8")
    project.write_text(left_out(project.read_text("utf-8"), given.without), "utf-8")
    run(given.python, "-m", "venv", home)
    run(python, "-m", "pip", "install", "-c", constraints, "-e", ".[dev]")
    status = run(python, "-m", "pytest", f"--junitxml={report}", *given.pytest, check=False)
    counts, failed = outcomes(report)
    row = Row(
        **json.loads(say(python, "-c", INSTALLED)),
        date=dt.datetime.now(dt.timezone.utc).date().isoformat(),
        commit=say("git", "rev-parse", "HEAD").strip(),
        without=given.without,
        passed=counts["passed"],
        failed=failed,
        skipped=counts["skipped"],
    )
    return row, status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", metavar="VERSION")
    parser.add_argument("--numpy", metavar="VERSION")
    parser.add_argument("--python", metavar="PATH", default=sys.executable, help="interpreter (this one)")
    parser.add_argument(
        "--without", metavar="NAME", action="append", default=[],
        help="package of the extras to leave out, as one that refuses these versions; may be repeated",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="new folder to keep the environment in (a temporary one)")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, behind --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if given.folder is None else given.folder.resolve()
        folder.mkdir(parents=True, exist_ok=given.folder is None)
        row, status = play(given, folder)
    print(row.markdown())
    print(json.dumps(asdict(row)))
    return status


if __name__ == "__main__":
    sys.exit(main())
