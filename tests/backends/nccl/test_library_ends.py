"""How communicators end, over the double: in order, aborted, in error, alone."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from harness import Died, current_store
from nccl_double import NcclDouble
from nccl_double.groups import connected, in_turn, on, shared_id

from collectives.backends.nccl import providers
from collectives.backends.nccl.libnccl import (
    Communicator,
    NcclDataType,
    NcclError,
    NcclStatus,
)

FLOAT = NcclDataType.FLOAT32


def aborts(rank: int, size: int, provider: str, path: Path) -> None:
    with connected(rank, size, provider, path) as (_, library, communicator):
        data = torch.zeros(4)
        at = data.data_ptr()
        part = communicator.split(0, 0)
        assert part is not None

        def blocked(communicator: Communicator, kind: str) -> None:
            if kind == "collective":
                communicator.all_reduce(at, at, 4, FLOAT, 0, 0)
            else:
                with library.group:
                    communicator.send(at, 4, FLOAT, 1 - rank, 0)

        for each, kind in ((part, "collective"), (communicator, "group")):
            if rank == 0:
                ended_by_abort(each, lambda each=each, kind=kind: blocked(each, kind))
                current_store().set(kind, "ended")
            else:  # it does not come
                current_store().wait([kind])
                each.abort()
            each.abort()  # again
            each.destroy()
            assert each.ended
            assert each.handle == 0
            assert each.async_error() is None
            with pytest.raises(NcclError, match="this rank has aborted the communicator") as caught:
                each.all_reduce(at, at, 4, FLOAT, 0, 0)
            assert caught.value.status == NcclStatus.INVALID_USAGE
            with pytest.raises(NcclError, match="aborted"):
                each.split(0, 0)


def ended_by_abort(communicator: Communicator, blocked: object) -> None:
    """Aborts from another thread what blocks in this one, and counts how that one runs meanwhile."""
    ticks = 0
    over = threading.Event()

    def count_and_abort() -> None:
        nonlocal ticks
        while not over.is_set() and ticks < 100:
            ticks += 1
            time.sleep(0.002)
        communicator.abort()

    thread = threading.Thread(target=count_and_abort)
    thread.start()
    with pytest.raises(NcclError, match="stopped while connections were made"):
        blocked()
    over.set()
    thread.join()
    assert ticks == 100, "the blocked call held the GIL, or did not block"


def leaves_in_time(rank: int, size: int, provider: str, path: Path) -> None:
    """Calls that leave NCCL by themselves have a moment to do so, before their communicator is freed."""
    with connected(rank, size, provider, path) as (double, _, communicator):
        double.dry_run(True)
        double.delay_next("ncclAllReduce", 20)
        errors: list[Exception] = []

        def call() -> None:
            try:
                communicator.all_reduce(0, 0, 1, FLOAT, 0, 0)
            except Exception as error:  # noqa: BLE001 - told below
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        while not double.delayed():
            pass
        communicator.abort()
        thread.join()
        assert not errors
        double.dry_run(False)


def ends(rank: int, size: int, provider: str, path: Path) -> None:
    with connected(rank, size, provider, path) as (double, library, communicator):
        data = torch.ones(1)
        parts = [communicator.split(0, 0) for _ in range(3)]
        assert all(parts)
        stream = double.stream()
        double.sleep(stream, 100)
        parts[0].all_reduce(data.data_ptr(), data.data_ptr(), 1, FLOAT, 0, stream)
        parts[0].destroy()
        assert data.item() == size, "destroy waits for what is under way"
        with library.group:  # several at once
            parts[1].abort()
            parts[2].abort()
        assert [part.handle for part in parts] == [0, 0, 0]
        with library.group:
            communicator.all_reduce(data.data_ptr(), data.data_ptr(), 1, FLOAT, 0, 0)
            communicator.abort()


def waits(thread: threading.Thread) -> bool:
    """Returns whether a thread goes on waiting."""
    thread.join(0.3)
    return thread.is_alive()


def met(name: str, rank: int, size: int) -> None:
    """Waits for all ranks."""
    store = current_store()
    store.set(f"{name}/{rank}", "")
    store.wait([f"{name}/{other}" for other in range(size)])


def together(rank: int, size: int, provider: str, path: Path) -> None:
    """An orderly end waits for that of the peers."""
    with connected(rank, size, provider, path) as (_, _, communicator):
        parts = [communicator.split(0, 0) for _ in range(4)]
        for number, last in ((0, 0), (1, size - 1)):
            thread = threading.Thread(target=parts[number].destroy)
            if rank != last:
                thread.start()
                assert waits(thread), "destroyed alone"
            met(f"waited for {number}", rank, size)
            if rank == last:
                thread.start()
            thread.join()
        finalize = ctypes.CDLL(str(path)).ncclCommFinalize
        thread = threading.Thread(target=finalize, args=(ctypes.c_void_p(parts[2].handle),))
        if rank == 0:
            thread.start()
            assert waits(thread), "finalised alone"
            met("waited for the finalised", rank, size)
            thread.join()
        else:
            met("waited for the finalised", rank, size)
        parts[2].destroy()
        # An end of another kind is one, too.
        parts[3].abort() if rank == 1 else parts[3].destroy()


def test_orderly_ends_wait_for_all_ranks(provider: str, nccl_library: Path) -> None:
    on(provider, nccl_library, together, 3)


def in_other_orders(rank: int, size: int, provider: str, path: Path) -> None:
    """Ranks that end communicators in different orders hang, unless they do so in one group of calls."""
    with connected(rank, size, provider, path) as (_, library, communicator):
        pairs = [[communicator.split(0, 0) for _ in range(2)] for _ in range(2)]
        for pair in pairs:
            if rank == 1:
                pair.reverse()
        thread = threading.Thread(target=lambda: [one.destroy() for one in pairs[0]])
        thread.start()
        assert waits(thread), "the order is of no account"
        met("hung", rank, size)
        if rank == 1:  # from another thread it helps
            pairs[0][1].destroy()
        thread.join()
        with library.group:
            for one in pairs[1]:
                one.destroy()


def ends_beside_the_dead(rank: int, size: int, provider: str, path: Path) -> None:
    with connected(rank, size, provider, path) as (_, _, communicator):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        communicator.destroy()


def test_orderly_ends_do_not_wait_for_the_dead(provider: str, nccl_library: Path) -> None:
    results = on(provider, nccl_library, ends_beside_the_dead, 3, lost=(1,))
    assert isinstance(results[1], Died)


def asynchronous_errors(rank: int, size: int, provider: str, path: Path) -> None:
    with connected(rank, size, provider, path) as (double, _, communicator):
        assert communicator.async_error() is None
        part = communicator.split(0, 0)
        assert part is not None
        double.set_async_error(part.handle, 6, "the cable was pulled")
        error = part.async_error()
        assert error is not None
        assert (error.status, error.status_name) == (6, "ncclRemoteError")
        assert "the cable was pulled" in str(error)
        with pytest.raises(NcclError, match=r"ncclRemoteError \(6\).*cable"):
            part.broadcast(0, 0, 1, FLOAT, 0, 0)
        double.set_async_error(part.handle, 7)
        assert part.async_error() is None, "in progress is no error"
        double.set_async_error(part.handle, 8)
        error = part.async_error()
        assert error is not None
        assert error.status == NcclStatus.TIMEOUT
        part.abort()
        assert communicator.async_error() is None

        # Ranks that call different operations.
        stream = double.stream()
        data = torch.zeros(4)
        if rank == 0:
            communicator.all_reduce(data.data_ptr(), data.data_ptr(), 4, FLOAT, 0, stream)
        else:
            communicator.broadcast(data.data_ptr(), data.data_ptr(), 2, FLOAT, 1, stream)
        error = seen(communicator)
        assert error.status == (NcclStatus.REMOTE_ERROR if rank else NcclStatus.INTERNAL_ERROR)
        assert ("rank 0 has closed" if rank else "rank 0 expects 16") in str(error)
        communicator.abort()
        double.synchronize(stream)


def seen(communicator: Communicator) -> NcclError:
    """Waits for an asynchronous error."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        error = communicator.async_error()
        if error is not None:
            return error
        time.sleep(0.005)
    raise AssertionError("no asynchronous error came")


def killed(rank: int, size: int, provider: str, path: Path) -> None:
    with connected(rank, size, provider, path) as (double, _, communicator):
        stream = double.stream()
        data = torch.ones(4)
        communicator.all_reduce(data.data_ptr(), data.data_ptr(), 4, FLOAT, 0, 0)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        communicator.all_reduce(data.data_ptr(), data.data_ptr(), 4, FLOAT, 0, stream)
        error = seen(communicator)
        assert error.status == NcclStatus.REMOTE_ERROR
        event = double.event()
        double.record(event, stream)
        assert not double.query(event), "the operation hangs until the abort"
        communicator.abort()
        double.synchronize(stream)


def test_a_rank_that_dies(provider: str, nccl_library: Path) -> None:
    results = on(provider, nccl_library, killed, 3, lost=(1,))
    assert isinstance(results[1], Died)


def missing(rank: int, size: int, provider: str, path: Path) -> bool:
    NcclDouble(path)
    library = providers.load(provider)
    identifier = shared_id(library, rank)
    if rank == 1:
        return True  # never comes
    thread = threading.Thread(target=lambda: library.init(identifier, size, rank), daemon=True)
    thread.start()
    thread.join(0.3)  # runs while the other blocks, as the GIL is released
    return thread.is_alive()


def test_a_rank_that_never_comes(provider: str, nccl_library: Path) -> None:
    assert on(provider, nccl_library, missing, 2) == [True, True]


def forgotten(rank: int, size: int, provider: str, path: Path) -> None:
    with connected(rank, size, provider, path) as (double, _, communicator):
        part = communicator.split(0, 0)
        assert part is not None
        handle = part.handle
        del part
        gc.collect()
        assert double.communicators() == 2, "only abort and destroy end a communicator"
        double.set_async_error(handle, 0)  # it is still there
        ctypes.CDLL(str(path)).ncclCommAbort(ctypes.c_void_p(handle))


def test_ends(provider: str, nccl_library: Path) -> None:
    bodies = [ends, aborts, leaves_in_time, in_other_orders, asynchronous_errors, forgotten]
    on(provider, nccl_library, in_turn, 2, bodies)
