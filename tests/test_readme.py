"""The README's code runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.cli import main

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^collectives (.*)$", README, re.MULTILINE)


def test_there_is_a_block_for_each_use():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split(",")[0].removeprefix("# "))
def test_python_block_runs_as_its_first_line_says(block, tmp_path):
    file, program, *arguments = re.match(r"# (\S+), run with: (\S+) (.*)\n", block).groups()
    arguments = arguments[0].split()
    assert arguments[-1] == file
    (tmp_path / file).write_text(block, encoding="utf-8")
    starts = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[program]
    done = subprocess.run(
        [sys.executable, *starts, *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command, monkeypatch):
    reached = []
    monkeypatch.setattr("collectives.bench.allreduce.run", lambda arguments: reached.append(arguments) or 0)
    assert main(command.split()) == 0
    assert reached[0].nproc == (2, 4)


def test_environment_variables_are_read_somewhere():
    root = Path(__file__).resolve().parents[1]
    table = README.partition("## Environment variables")[2].partition("##")[0]
    names = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert "COLLECTIVES_SOCKET_IFNAME" in names
    folders = ("collectives", "store", "backends")
    sources = [
        path
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.suffix in {".py", ".cpp", ".hpp"}
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert [name for name in sorted(names) if name not in text] == []
