"""What the doctor advises, from what it found."""

from __future__ import annotations

import os

import pytest
import torch

from collectives.bench.core.records import Skipped
from collectives.bench.doctor import advise


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def advice(seconds, skipped=()):
    return "\n".join(advise(seconds, skipped))


def test_the_quickest_is_named_with_all_times():
    said = advice({"gloo": 2e-3, "host": 1e-4})
    assert 'CPU tensors: host ("collectives" under torch.distributed), the quickest here' in said
    assert "host 0.1 ms, gloo 2 ms" in said
    assert "mpirun" not in said


def test_a_quicker_one_is_not_hidden():
    assert "mpi was quicker at this size" in advice({"mpi": 1e-4, "host": 2e-4})


def test_without_host_the_quickest_of_the_others_is_taken():
    assert "CPU tensors: gloo (host failed), the quickest here" in advice({"gloo": 2e-3, "round_robin": 3e-3})
    assert "no backend works here" in advice({})


def test_what_is_missing_comes_with_its_line():
    skipped = [
        Skipped("nccl", "finds no GPU"),
        Skipped("mpi", "needs mpi4py, not installed", "python -m pip install mpi4py"),
    ]
    said = advice({"host": 1e-4}, skipped)
    assert "CUDA tensors: none here; nccl finds no GPU" in said
    assert "\n  python -m pip install mpi4py  # mpi" in said
    assert "\n    export COLLECTIVES_SECRET=$(" in said
    assert "Lines to copy" not in advice({"host": 1e-4})


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "advised"),
    [
        (8, 2, 8, 4),
        (8, 2, 5, 4),
        (8, 2, 4, None),
        (8, 3, 4, 2),
        (2, 4, 2, 1),
        (2, 4, 1, None),  # ranks that take turns do so with one thread, too
        (8, 1, 8, None),
    ],
)
def test_more_threads_than_cores(monkeypatch, cores, ranks, threads, advised):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    said = "\n".join(advise({"host": 1e-4}, (), ranks))
    if advised is None:
        assert "too many" not in said
        assert "OMP_NUM_THREADS" not in said
    else:
        assert f"threads: too many, {ranks} ranks with {threads} each for {cores} cores" in said
        assert f"\n  export OMP_NUM_THREADS={advised}  # threads of torch on each of {ranks} ranks" in said
