"""``collectives bench nccl-host-cost`` as users run it, and what calls may cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from collectives.bench import nccl_host_cost
from collectives.cli import main

MOST = {
    "all_reduce, asynchronous": (60, 46),
    "all_reduce, synchronous": (60, 53),
    "all_reduce of 10, coalesced": (69, 173),
}
"""Frames of Python and calls of C functions that each call may take; to be lowered, and not raised."""

MORE_SEEN = 3 if sys.version_info >= (3, 14) else 0
"""From 3.14 on, profilers see the four entries into ``with`` blocks, and not the making of the lock."""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert main(["bench", "nccl-host-cost", "--calls", "10", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [row["call"] for row in rows] == list(MOST)
    assert all(row["microseconds"] > 0 for row in rows)
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + len(MOST)
    assert all(row["call"] in line for row, line in zip(rows, table[1:], strict=True))


def test_what_calls_cost() -> None:
    first, second = (nccl_host_cost.measure(1) for _ in range(2))
    assert [(one.frames, one.c_calls) for one in first] == [(one.frames, one.c_calls) for one in second]
    for cost in first:
        frames, c_calls = MOST[cost.call]
        assert cost.frames <= frames
        assert cost.c_calls <= c_calls + MORE_SEEN
