"""Type checkers know what our functions return, and find what linked folders import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from __future__ import annotations

import torch
from torch.futures import Future
from typing_extensions import assert_type

import collectives as dist
from collectives import Work


def total(value: int) -> float:
    tensor = torch.ones(2) * value
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return float(tensor.sum())


def every(tensor: torch.Tensor, rows: list[torch.Tensor], group: dist.ProcessGroup, later: bool) -> None:
    assert_type(dist.all_reduce(tensor), None)
    assert_type(dist.all_reduce(tensor, async_op=False), None)
    assert_type(dist.all_reduce(tensor, dist.ReduceOp.MAX, group, True), Work)
    assert_type(dist.all_reduce(tensor, async_op=later), "Work | None")
    assert_type(dist.all_reduce_into_tensor(tensor, tensor, async_op=True), Work)
    assert_type(dist.broadcast(tensor, 0, async_op=True), Work)
    assert_type(dist.reduce(tensor, 0, async_op=True, group_dst=None), Work)
    assert_type(dist.all_gather(rows, tensor, async_op=True), Work)
    assert_type(dist.all_gather_single(tensor, tensor, async_op=True), Work)
    assert_type(dist.all_gather_into_tensor(tensor, tensor, group, True), Work)
    assert_type(dist.gather(tensor, rows, 0, async_op=True), Work)
    assert_type(dist.scatter(tensor, rows, 0, group, True), Work)
    assert_type(dist.reduce_scatter(tensor, rows, async_op=True), Work)
    assert_type(dist.reduce_scatter_single(tensor, tensor, async_op=True), Work)
    assert_type(dist.reduce_scatter_tensor(tensor, tensor, async_op=True), Work)
    assert_type(dist.all_to_all(rows, rows, async_op=True), Work)
    assert_type(dist.all_to_all_single(tensor, tensor, async_op=True), Work)
    assert_type(dist.barrier(async_op=True), Work)
    assert_type(dist.barrier(), None)
    assert_type(dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)]), list[Work])
    assert_type(group.allreduce([tensor]), Work)
    dist.all_reduce(tensor, async_op=True).get_future().wait()


assert_type(dist.launch(total, (3,), nproc=2), list[float])
largest = max(dist.launch(total, [3]))
"""

CHECKOUT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.full, pytest.mark.timeout(450)]  # a minute of processor time, on a busy machine


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def check(*command: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return done.stdout


def test_mypy_takes_a_typed_program(program: Path) -> None:
    pytest.importorskip("mypy")
    found = check("mypy", program)  # with what the check of the package leaves in mypy's cache
    assert found.startswith("Success: no issues found in 1 source file"), found


def test_pyright_takes_a_typed_program(program: Path) -> None:
    pytest.importorskip("basedpyright")
    linked = [f"collectives/{file}" for file in ("store/__init__.py", "backends/host/__init__.py",
                                                 "ddp/__init__.py", "bench/store.py")]  # fmt: skip
    options = ["--pythonpath", sys.executable, "--outputjson", "--level", "error"]
    report = json.loads(check("basedpyright", *options, program, *linked))
    assert report["summary"]["filesAnalyzed"] == 1 + len(linked)
    assert not report["generalDiagnostics"]
