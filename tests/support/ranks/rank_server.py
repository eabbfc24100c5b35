"""The processes that play ranks, which run task after task.

The program of a rank of :mod:`harness`, with the number of its connection; :mod:`mpi_rank` is another.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


@dataclass
class Task:
    """One call of a function on one rank.

    Attributes:
        rank: the rank.
        size: number of ranks.
        modules: names and files of the modules to load before ``payload`` is unpickled.
        module: name of the module that has the function.
        qualname: name of the function in it.
        payload: the pickled arguments.
        store: host and port of the store.
        call: prefix of this call's keys.
        backend: backend of the group that the function gets; ``None`` for none.
        world: whether the backend is initialised as the default group instead.
        options: further fields of the group's options, or further arguments of ``init_process_group``.
        env: environment variables during the call.
        namespace: network namespace that the process moves to for good; ``None`` for none.
    """

    rank: int
    size: int
    modules: list[tuple[str, str]]
    module: str
    qualname: str
    payload: bytes
    store: tuple[str, int]
    call: str
    backend: str | None = None
    world: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    namespace: str | None = None


@dataclass
class Outcome:
    """What a call came to: ``error`` is its traceback, ``raised`` its exception where that can be pickled."""

    value: Any = None
    error: str | None = None
    raised: bytes | None = None
    skipped: str | None = None


_current: Task | None = None


def is_rank() -> bool:
    """Returns whether this process is a rank that runs a task."""
    return _current is not None


def current_store() -> Any:
    """Returns a store shared by the ranks of the current call, empty when the call began."""
    from collectives.store import PrefixStore, TCPStore

    if _current is None:
        raise RuntimeError("only a rank that runs a task has a store")
    host, port = _current.store
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    return PrefixStore(_current.call, client)


def load_module(name: str, path: str) -> None:
    """Makes a module known under the name that it has in pytest's process, wherever its file is."""
    if name in sys.modules:
        return
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and Path(spec.origin).samefile(path):
            importlib.import_module(name)
            return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path} as {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _call(task: Task) -> Any:
    for name, path in task.modules:
        load_module(name, path)
    target: Any = sys.modules[task.module]
    for part in task.qualname.split("."):
        target = getattr(target, part)
    args = pickle.loads(task.payload)
    if task.backend is None:
        return target(task.rank, task.size, *args)
    if task.world:
        return _call_in_world(task, target, args)
    from collectives.registry.backends import GroupOptions, create_group

    group = create_group(
        task.backend,
        GroupOptions(current_store(), task.rank, task.size, group_name=task.call, **task.options),
    )
    try:
        value = target(group, *args)
    except BaseException:
        group.abort()
        raise
    group.shutdown()
    return value


def _call_in_world(task: Task, target: Any, args: Any) -> Any:
    import collectives

    collectives.init_process_group(
        task.backend, store=current_store(), rank=task.rank, world_size=task.size, **task.options
    )
    try:
        return target(task.rank, task.size, *args)
    finally:
        if collectives.is_initialized():
            collectives.destroy_process_group()


def run(task: Task) -> Outcome:
    """Runs a task; an exception becomes an outcome."""
    global _current
    _current = task
    before = {name: os.environ.get(name) for name in task.env}
    _set_environment(task.env)
    try:
        if task.namespace is not None:
            from collectives.bench.core.namespaces import enter

            enter(task.namespace)
        return Outcome(value=_call(task))
    except BaseException as error:  # noqa: BLE001 - reported to the parent
        if type(error).__name__ == "Skipped":
            return Outcome(skipped=str(error))
        raised = None
        with contextlib.suppress(Exception):
            raised = pickle.dumps(error)
        return Outcome(error=traceback.format_exc(), raised=raised)
    finally:
        _set_environment(before)
        _current = None


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def serve_rank(connection: Connection) -> None:
    """Runs tasks until the connection closes."""
    from collectives.ranks.processes import commands

    for task in commands(connection):
        outcome = run(task)
        try:
            answer = pickle.dumps(outcome)
        except Exception:  # noqa: BLE001 - reported to the parent
            answer = pickle.dumps(Outcome(error=f"the result cannot be pickled\n{traceback.format_exc()}"))
        del outcome
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(answer)


def be_rank(connection: Connection) -> None:
    """Makes this process a rank, which ends with its parent or the connection."""
    import torch

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Makes torch's pool of threads anew, which threads of the rank would do at the same time.
    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)  # the last lines of one that dies must be in its log
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    warnings.filterwarnings("error", module=r"collectives(\.|$)")
    # torch says so once for any use of complex32, a data type that the backends must move and reduce.
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    # torch 2.11 and 2.12 say so of every sparse tensor.
    warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
    serve_rank(connection)
    gc.collect()


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    from sources import IMPORTED_FROM

    sys.path[:1] = map(str, IMPORTED_FROM)
    import rank_server  # under this name the classes above are pickled on the other side

    status = 1
    try:
        os.set_inheritable(int(sys.argv[1]), False)
        rank_server.be_rank(Connection(int(sys.argv[1])))
        status = 0
    except BaseException:  # noqa: BLE001 - in its log
        traceback.print_exc()
    finally:
        # Without the interpreter's shutdown: a thread of a group that a test left behind must not hold it.
        os._exit(status)
