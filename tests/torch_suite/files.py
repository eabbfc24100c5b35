"""Test files of PyTorch's repository (``test/distributed``), aimed at any backend; torch does not ship them.

Such a file names Gloo: in ``init_process_group`` and ``new_group``, and as the class ``ProcessGroupGloo``.
These make groups of another backend here, without Gloo's options, and that backend is a device's default,
too; all else that the file asks Gloo for is an outcome of its tests.
With ``+dropin`` behind the backend's name, files get our classes, too, where torch has some of the same name:
stores, Join, optimizers, hooks and DDP.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import multiprocessing
import os
import re
import select
import signal
import sys
import traceback
import unittest
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal import common_distributed
from torch_suite.gates import Name

VARIABLE = "COLLECTIVES_TEST_AIMED_AT"
"""Tells processes that a test spawns what its file is aimed at."""

_HOOKS = (
    "ddp_zero_hook",
    "debugging_hooks",
    "default_hooks",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_hooks",
)
_HAVE_STORES = ("torch.distributed", "torch.distributed.rendezvous", "torch.distributed.distributed_c10d")
_DROP_IN = {
    **dict.fromkeys(_HAVE_STORES, "collectives.store"),
    "torch.distributed.algorithms.join": "collectives.ddp.join",
    "torch.distributed.optim": "collectives.ddp.optim",
    "torch.nn.parallel": "collectives.ddp",
    "torch.nn.parallel.distributed": "collectives.ddp",
    "torch.distributed.algorithms.ddp_comm_hooks": "collectives.ddp.hooks.registration",
    **{
        f"torch.distributed.algorithms.ddp_comm_hooks.{hook}": f"collectives.ddp.hooks.{hook}"
        for hook in _HOOKS
    },
}
"""Modules of torch, and the modules of ours whose names replace theirs."""

_GLOO = re.compile(r"\bgloo\b")
_LIMIT = 150.0  # torch's own classes give up before


class Forked:
    """A test that runs in a process of its own: it may leave threads, crash, or never end."""

    def __init__(self, test: unittest.TestCase) -> None:
        self._test = test

    def run(self, result: Any) -> None:
        """Runs the test, and gives ``status`` and ``text`` to the result."""
        answers, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            with os.fdopen(theirs, "w") as stream:
                outcome = type(result)()
                try:
                    self._test.run(outcome)
                except BaseException:  # noqa: BLE001 - a forked process must not go on in the caller
                    outcome.status, outcome.text = "failed", traceback.format_exc()
                json.dump([outcome.status, outcome.text], stream)
            os._exit(0)
        os.close(theirs)
        with os.fdopen(answers) as stream:
            # The ranks of a test have the pipe, too, and a lost one would hold it open after the answer.
            answered = bool(select.select([stream], [], [], _LIMIT)[0])
            for process in [] if answered else [*_descendants(pid), pid]:
                os.kill(process, signal.SIGKILL)
            os.waitpid(pid, 0)
            text = stream.read() if answered else ""
        default = ["failed", "the process of the test died" if answered else f"no end within {_LIMIT:g} s"]
        result.status, result.text = json.loads(text) if text else default


def _descendants(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from _descendants(int(child))
        yield int(child)


def load(path: str, backend: str) -> dict[str, Forked]:
    """Returns the tests of a file by name, aimed at a backend.

    A file that cannot be imported has one test, which fails. To be called once in a process, which must have
    one thread only: the tests' ranks are forked.

    Args:
        path: the file. What lies beside it can be imported.
        backend: name in ``torch.distributed``.
    """
    aim(backend)
    os.environ[VARIABLE] = backend
    common_distributed.MultiProcessTestCase._spawn_processes = _fork_processes
    sys.path.insert(0, str(Path(path).parent))
    try:
        module = importlib.import_module(Path(path).stem)
    except BaseException:  # noqa: BLE001 - files end the process where they think that there is nothing to test
        error = traceback.format_exc()

        def test_import() -> None:
            raise ImportError(error)

        return {"import": Forked(unittest.FunctionTestCase(test_import))}
    # PyTorch's load_tests refuses tests of another file than the one that was started.
    vars(module).pop("load_tests", None)
    found = _flat(unittest.defaultTestLoader.loadTestsFromModule(module))
    return {".".join(test.id().split(".")[-2:]): Forked(test) for test in found}


def _fork_processes(test: Any) -> None:
    test._start_processes(multiprocessing.get_context("fork").Process)


def _flat(suite: Any) -> Iterator[unittest.TestCase]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from _flat(one)
        else:
            yield one


def aim(backend: str) -> None:
    """Makes whoever asks torch for Gloo in this process get another backend."""
    backend, _, classes = backend.partition("+")
    if classes:
        _drop_in()
    if backend == "gloo":
        return
    for features in common_distributed.DistTestCases.backend_feature.values():
        features.add(backend)
    for name, default in (("init_process_group", backend), ("new_group", None)):
        aimed = _aimed(getattr(distributed_c10d, name), backend, default)
        for module in (dist, distributed_c10d, device_mesh):
            setattr(module, name, aimed)
    of_device = distributed_c10d.get_default_backend_for_device

    def default_of_device(device: Any) -> str:
        name = of_device(device)
        return Name.of(backend, name) if name == "gloo" else name

    for module in (dist, distributed_c10d):
        module.get_default_backend_for_device = default_of_device
    dist.ProcessGroupGloo = _class(dist.ProcessGroupGloo, backend)


def _drop_in() -> None:
    for theirs, ours in _DROP_IN.items():
        old, new = importlib.import_module(theirs), importlib.import_module(ours)
        for name in set(new.__all__) & set(dir(old)):
            setattr(old, name, getattr(new, name))


def _aimed(function: Callable[..., Any], backend: str, default: str | None) -> Callable[..., Any]:
    """Returns a function that makes groups, with ``backend`` for Gloo in its argument of that name."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        name = given.arguments.get("backend")
        given.arguments["backend"] = default if name is None else _GLOO.sub(backend, str(name))
        if isinstance(given.arguments.get("pg_options"), dist.ProcessGroupGloo._Options):
            del given.arguments["pg_options"]
        return function(*given.args, **given.kwargs)

    return call


def _class(gloo: Any, backend: str) -> type:
    """Returns what makes groups of ``backend`` when called as Gloo's class is, and has its further names."""
    numbers = itertools.count()

    def make(cls: type, store: Any, rank: int, size: int, about: Any = None) -> Any:
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, size
        options.group_id = f"of {gloo.__name__} {next(numbers)}"
        limit = getattr(about, "_timeout", about)
        options.timeout = limit if isinstance(limit, timedelta) else dist.default_pg_timeout
        return dist.Backend._plugins[backend.upper()].creator_fn(options, None)

    names = {name: getattr(gloo, name) for name in dir(gloo) if not name.startswith("__")}
    return type(gloo.__name__, (), {**names, "__new__": make})
