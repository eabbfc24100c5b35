"""What a group over the double of NCCL states about itself is true."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.oracle import NcclReport
from conformance.statements import check_statements
from nccl_double.groups import run_over_double

from collectives import ProcessGroup


def hold(group: ProcessGroup) -> tuple[int, int]:
    return check_statements(group, "cpu", None, NcclReport)


@pytest.mark.full
@pytest.mark.parametrize("provider", ["cupy", "pynccl"])
def test_statements(nccl_library: Path, provider: str) -> None:
    results = run_over_double(hold, 2, nccl_library, provider=provider, timeout=100)
    assert len(set(results)) == 1
    assert min(results[0]) > 100
