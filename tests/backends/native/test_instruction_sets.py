"""The reduction kernels for every instruction set of the CPU: the same bits."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import quantize_oracle
import torch
from kernel_oracle import (
    OP_NAMES,
    OPS,
    REDUCIBLE,
    factor_for,
    random_bits,
    random_values,
    raw,
    reduce,
)
from sources import IMPORTED_FROM

from collectives import _native

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def digest() -> str:
    """A hash over results of every type and operation, at sizes around every vector width."""
    total = hashlib.sha256()
    for dtype in REDUCIBLE:
        for op in OPS[dtype]:
            for n, count in ((1, 37), (2, 1), (2, 7), (3, 263), (6, 64), (9, 1029)):
                for make in (random_values, random_bits):
                    sources = [make(dtype, count, seed=n * count + k) for k in range(n)]
                    total.update(raw(reduce(op, sources, factor_for(op, n))).numpy().tobytes())
    return total.hexdigest()


def partials_digest() -> str:
    """A hash over a machine's partials, and what becomes of two, of every type and operation."""
    total = hashlib.sha256()
    count = 517
    for name, code in _native.DTYPES.items():
        for op in range(len(OP_NAMES)):
            if not _native.reducible(code, op):
                continue
            dtype = getattr(torch, name)
            generator = torch.Generator().manual_seed(code * 9 + op)
            shape = (count * dtype.itemsize,)
            top = 2 if dtype == torch.bool else 120
            sources = [torch.randint(0, top, shape, generator=generator, dtype=torch.uint8) for _ in range(3)]
            partial = torch.zeros(count * _native.accumulator_bytes(code, op), dtype=torch.uint8)
            _native.accumulate(partial.data_ptr(), [s.data_ptr() for s in sources], count, code, op, 3.0)
            total.update(partial.numpy().tobytes())
            result = torch.zeros(shape, dtype=torch.uint8)
            _native.combine(result.data_ptr(), [partial.data_ptr()] * 2, count, code, op, 3.0)
            total.update(result.numpy().tobytes())
    return total.hexdigest()


def run_with_capability(capability: str, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLLECTIVES_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    this = Path(__file__)
    paths = [str(this.parent), *map(str, IMPORTED_FROM)]
    script = f"import sys; sys.path[:0] = {paths!r}; import {this.stem} as t; {code}"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.full
def test_all_instruction_sets_give_the_same_bits() -> None:
    best = _native.cpu_capability()
    sets = ["default", "avx2", "avx512"]
    lower = sets[: sets.index(best)]
    if not lower:
        pytest.skip("this CPU has the baseline alone")
    expected = [digest(), partials_digest(), quantize_oracle.digest()]
    for capability in lower:
        digests = "t.digest(), t.partials_digest(), t.quantize_oracle.digest()"
        ran = run_with_capability(capability, f"print(t._native.cpu_capability(), {digests})")
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.split() == [capability, *expected]


@pytest.mark.full
def test_unknown_instruction_set_is_a_clear_error() -> None:
    ran = run_with_capability("sse9", "t._native.cpu_capability()")
    assert ran.returncode == 1
    assert (
        "ValueError: COLLECTIVES_CPU_CAPABILITY=sse9 names no instruction set of this CPU; usable here:"
        in ran.stderr
    )
    assert "default" in ran.stderr
