"""Signals whose handlers raise while a rank is within an operation of the mpi backend."""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from harness import current_store
from mpi_team import Teams

import collectives as dist
from collectives import GroupAbortedError, ProcessGroup
from collectives.backends.mpi.engine import Engine, MPIWork, progress_thread


def interrupted(rank: int, size: int) -> None:
    """A signal ends rank 0's wait for a late rank; the all-reduce goes on, and the next one is right."""
    dist.init_process_group("mpi", store=current_store(), rank=rank, world_size=size)
    store = current_store()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    dist.all_reduce(torch.ones(2))

    def all_reduce_for(seconds: float) -> torch.Tensor:
        x = torch.full((2,), float(size))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - a busy machine may take long to get there
            signal.setitimer(signal.ITIMER_REAL, seconds)
            dist.all_reduce(x)
        return x

    for turn, delay in enumerate((0.1, 0.4)):
        if rank == 0:
            before = signal.signal(signal.SIGALRM, interrupt)
            try:
                left = all_reduce_for(delay)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            store.set(f"interrupted{turn}", "x")
        else:
            store.wait([f"interrupted{turn}"])
            dist.all_reduce(y := torch.ones(2))
            assert y.tolist() == [size + 1.0] * 2
        dist.all_reduce(y := torch.full((2,), rank + 1.0))
        assert y.tolist() == [size * (size + 1) / 2] * 2
        dist.barrier()  # comes after what was left
        assert rank or left.tolist() == [size + 1.0] * 2
    dist.destroy_process_group()


def test_a_signal_during_a_small_all_reduce(mpi: Teams) -> None:
    mpi.run(interrupted, 2, backend=None)


def all_reduce(x: torch.Tensor, rank: int) -> None:
    dist.all_reduce(x)


def message(x: torch.Tensor, rank: int) -> None:
    if rank == 0:
        dist.recv(x, 1)
    else:
        dist.send(x, 0)


def interrupted_at_any_time(
    rank: int, size: int, what: Callable[[torch.Tensor, int], None], name: str, result: float, turns: int
) -> None:
    """Whatever rank 0 has begun goes on, and the next operations are right."""
    dist.init_process_group("mpi", store=current_store(), rank=rank, world_size=size)
    group = dist.group.WORLD
    times = random.Random(rank)

    def begun() -> float:
        return group.stats().get(name, {"count": 0})["count"]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    interrupted = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(turns):
            x = torch.full((64,), rank + 1.0)
            if rank == 0:
                earlier = begun()
                try:
                    signal.setitimer(signal.ITIMER_REAL, times.uniform(1e-5, 4e-3))
                    what(x, rank)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                    if begun() == earlier:
                        what(x, rank)
            else:
                time.sleep(times.uniform(0, 4e-3))
                what(x, rank)
            dist.all_reduce(y := torch.full((2,), rank + 1.0))
            assert y.tolist() == [3.0] * 2
            dist.barrier()  # comes after what was left
            if rank == 0:
                assert x.tolist() == [result] * 64
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rank or interrupted > turns // 20
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("what", "name", "result"), [(all_reduce, "all_reduce", 3.0), (message, "recv", 2.0)]
)
def test_signals_at_any_time(
    mpi: Teams, what: Callable[[torch.Tensor, int], None], name: str, result: float
) -> None:
    mpi.run(interrupted_at_any_time, 2, what, name, result, 200, backend=None)


def interrupted_for_others(rank: int, size: int, turns: int) -> None:
    """A signal that ends a wait leaves nothing locked: another thread goes on with the operation."""
    dist.init_process_group("mpi", store=current_store(), rank=rank, world_size=size)
    times = random.Random(rank)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(turns):
            x = torch.full((64,), rank + 1.0)
            if rank == 1:
                time.sleep(5e-3)
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            if rank == 0:
                try:
                    signal.setitimer(signal.ITIMER_REAL, times.uniform(1e-4, 3e-3))
                    work.wait()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    pass
            waits = threading.Thread(target=work.wait, daemon=True)
            waits.start()
            waits.join(20)
            assert not waits.is_alive()
            assert x.tolist() == [3.0] * 64
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    dist.destroy_process_group()


def test_signals_leave_nothing_locked(mpi: Teams) -> None:
    mpi.run(interrupted_for_others, 2, 60, backend=None)


def interrupted_in_stages(rank: int, size: int, turns: int) -> None:
    """A large reduction that is interrupted ends right, or with an error on all ranks."""
    dist.init_process_group("mpi", store=current_store(), rank=rank, world_size=size)
    times = random.Random(rank)
    told: list[dist.GroupAbortedError] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(turns):
            group = dist.new_group()
            x = torch.full((2 << 20,), rank + 1.0)
            try:
                try:
                    if rank == 0:
                        signal.setitimer(signal.ITIMER_REAL, times.uniform(1e-4, 0.02))
                    dist.all_reduce(x, group=group)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    if not group.stats():  # it was not begun
                        dist.all_reduce(x, group=group)
                dist.barrier(group=group)
                assert x.eq(3.0).all()
            except dist.GroupAbortedError as error:
                told.append(error)
            group.abort()
            dist.barrier()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert {error.rank for error in told} <= {0}
    for error in told:
        assert re.search(r"was interrupted within its all_reduce #1, after KeyboardInterrupt", str(error))
    dist.destroy_process_group()


def test_signals_during_a_large_all_reduce(mpi: Teams) -> None:
    mpi.run(interrupted_in_stages, 2, 20, backend=None)


@contextmanager
def raising_once(owner: Any, name: str, error: type[BaseException]) -> Iterator[None]:
    """Raises once where a method begins, as a signal's handler may, which runs on the main thread alone."""
    method, raised = getattr(owner, name), []

    def call(*args: Any) -> Any:
        if not raised and threading.current_thread() is threading.main_thread():
            raised.append(name)
            raise error("of a handler")
        return method(*args)

    with mock.patch.object(owner, name, call):
        yield
    assert raised


def raises_while_others_are_told(group: ProcessGroup) -> None:
    """The operation that passed its limit has its error, and the other one ends, too."""
    with mock.patch.object(progress_thread, "serve"):  # left to the thread that waits
        group.allreduce(torch.ones(3)).wait()
        me = group.rank()
        waits = group.recv(torch.ones(1), me, 1)
        group.set_timeout(timedelta(seconds=0.3))
        with raising_once(Engine, "publish", KeyboardInterrupt):
            passes = group.recv(torch.ones(1), me, 2)
            with pytest.raises(KeyboardInterrupt):
                passes.wait()
            with pytest.raises(dist.CollectiveTimeoutError, match="passed its time limit"):
                passes.wait()
            with pytest.raises(GroupAbortedError):
                waits.wait(timedelta(seconds=5))
        group.abort()


def raises_before_others_are_told(group: ProcessGroup) -> None:
    """What nobody has ended ends at its own limit."""
    with mock.patch.object(progress_thread, "serve"):  # left to the thread that waits
        group.allreduce(torch.ones(3)).wait()
        group.set_timeout(timedelta(seconds=1.5))
        waits = group.recv(torch.ones(1), group.rank(), 1)
        with raising_once(Engine, "_stop", KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                group.abort()
            with pytest.raises(GroupAbortedError, match="aborted"):
                waits.wait(timedelta(seconds=20))


@pytest.mark.parametrize("when", [raises_while_others_are_told, raises_before_others_are_told])
def test_a_signal_while_a_group_breaks(mpi: Teams, when: Callable[[ProcessGroup], None]) -> None:
    mpi.run_alone(when, 2)


def wait_for_all(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def raises_while_operations_move(group: ProcessGroup) -> None:
    """It is no error of the operations: they go on, and who asks for their results has them."""
    with mock.patch.object(progress_thread, "serve"):  # left to the thread that waits
        me = group.rank()
        group.allreduce(torch.ones(3)).wait()
        for error, owner, name in (
            (RuntimeError, Engine, "raise_error_of"),
            (KeyboardInterrupt, MPIWork, "tell_end"),
        ):
            tensors = [torch.zeros(1) for _ in range(2)]
            receives = [group.recv(tensor, me, tag) for tag, tensor in enumerate(tensors)]
            futures = [receive.get_future() for receive in receives]
            sends = [group.send(torch.full((1,), tag + 1.0), me, tag) for tag in range(2)]
            with raising_once(owner, name, error):
                with pytest.raises(error, match="of a handler"):
                    wait_for_all([*sends, *receives])
                wait_for_all([*sends, *receives])
                other = group.recv(torch.zeros(1), me, 9)
                until = time.monotonic() + 10
                while not all(future.done() for future in futures) and time.monotonic() < until:
                    other.is_completed()  # which looks after all
                wait_for_all([group.send(torch.ones(1), me, 9), other])
            assert [future.value()[0].item() for future in futures if future.done()] == [1.0, 2.0]
            assert [tensor.item() for tensor in tensors] == [1.0, 2.0]


def test_a_signal_while_operations_move_or_tell_their_end(mpi: Teams) -> None:
    mpi.run(raises_while_operations_move, 2)
