"""torch's own distributed tests, opened for any backend.

torch ships the tests of its backends (``torch.testing._internal.distributed.distributed_test``). Most stand
behind a *gate*: a decorator, or a line in the body, that lets in only backends of certain names. The tests
are imported here with gates that take the backend under test for both Gloo and MPI; nothing of them is
copied or changed.
"""

from __future__ import annotations

import collections
import importlib
import multiprocessing
import os
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_distributed

SUITE = "torch.testing._internal.distributed.distributed_test"


class Name(str):
    """A backend's name that equals the names of others too."""

    __slots__ = ("_equals",)

    @classmethod
    def of(cls, name: str, *equals: str) -> Name:
        made = cls(name)
        made._equals = frozenset({name, *equals})
        return made

    def __eq__(self, other: object) -> bool:
        return other in self._equals

    def __ne__(self, other: object) -> bool:
        return other not in self._equals

    __hash__ = str.__hash__


def _skipped_unless(allowed: bool, reason: str) -> Callable[[Any], Any]:
    return (lambda test: test) if allowed else unittest.skip(reason)


def _skip_early() -> None:
    """Lets tests be skipped before their ranks are started, where torch would have each rank find out."""
    ranks = int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()

    def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = False) -> Callable[[Any], Any]:
        return _skipped_unless(gpus >= x or (allow_cpu and not gpus), f"needs {x} GPUs")

    common_distributed.skip_if_lt_x_gpu = skip_if_lt_x_gpu
    common_distributed.skip_if_no_gpu = _skipped_unless(gpus >= ranks, "needs a GPU for each rank")
    common_distributed.skip_if_small_worldsize = _skipped_unless(ranks >= 8, "needs 8 ranks")
    common_distributed.skip_if_odd_worldsize = _skipped_unless(
        ranks % 2 == 0, "needs an even number of ranks"
    )


def load(backend: str, ranks: int, folder: str) -> dict[str, unittest.TestCase]:
    """Returns the tests by name, which each start their own ranks, by forking this process.

    To be called once in a process, which must have one thread only.

    Args:
        backend: name in ``torch.distributed``.
        ranks: number of ranks.
        folder: where files may lie until the process ends.
    """
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(ranks), INIT_METHOD=f"file://{folder}/init")
    _skip_early()
    decided_as = collections.ChainMap({"BACKEND": Name.of("gloo", "mpi")}, os.environ)
    with mock.patch.object(os, "environ", decided_as):
        suite = importlib.import_module(SUITE)
    suite.BACKEND = Name.of(backend, "gloo", "mpi")
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add(backend)
    for names in (suite.PROFILING_SUPPORTED_BACKENDS, suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        names.append(backend)

    class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            suite.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(multiprocessing.get_context("fork").Process)

    return {name: Tests(name) for name in unittest.defaultTestLoader.getTestCaseNames(Tests)}
