"""The pytest fixture that runs functions of tests on ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sources import PYTHONPATH

import collectives.testing

pytestmark = pytest.mark.usefixtures("preloaded_python")

CONFTEST = "import collectives.testing\nranks = collectives.testing.world(2, environment={'A': 'b'})\n"

TESTS = """
import os
import collectives
import torch

def total(n):
    collectives.init_process_group("host")
    tensor = torch.tensor(n + collectives.get_rank())
    collectives.all_reduce(tensor)
    return tensor.item(), os.getpid(), os.environ["A"]

pids = []

def test_first(ranks):
    results = ranks(total, 10)
    pids.extend(pid for _, pid, _ in results)
    assert [(n, a) for n, _, a in results] == [(21, "b")] * 2

def test_second(ranks):
    assert [pid for _, pid, _ in ranks(total, 1)] == pids

def test_that_fails(ranks):
    ranks(lambda: 1 / 0)

def test_after_it(ranks):
    assert [n for n, _, _ in ranks(total, 1)] == [3, 3]
"""


@pytest.mark.full
def test_ranks_serve_the_tests_of_a_session(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_sums.py").write_text(TESTS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 3 passed" in done.stdout
    assert "ZeroDivisionError: division by zero" in done.stdout
    assert "FAILED test_sums.py::test_that_fails" in done.stdout


def test_wrong_arguments():
    with pytest.raises(ValueError, match="nproc must be at least 1, but is 0"):
        collectives.testing.world(0)
