"""Ranks that start in a moment, because they are forked off a process that has already loaded torch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from collectives.ranks import processes
from collectives.secret import SECRET

_SECRET = "of all ranks that are forked here"

PRELOADED = [
    "torch",
    "torch._dynamo",  # which optimizers load in their first step
    "pytest",
    "sklearn.datasets",
    "collectives.bench.comparison.command",
    "collectives.backends.gloo",
]


@pytest.fixture(scope="session")
def loaded_process() -> Iterator[None]:
    """A process that has loaded all that ranks need; it ends before the harness looks for strays."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, _SECRET)
        patch.setenv("OMP_NUM_THREADS", "1")  # no thread of torch's or numpy's before the fork
        forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()


@pytest.fixture(scope="module")
def quick_ranks(loaded_process: None) -> Iterator[None]:
    """Forks the ranks of a :class:`SpawnedRanks`: starting them as users do costs seconds of import each.

    Not for tests of that start, of what ranks write, or of an environment of theirs: they keep the output and
    the environment of the first of all these tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes.SpawnedRanks, "start_method", "forkserver")
        patch.setenv(SECRET, _SECRET)  # which a launcher would give its ranks
        yield
