"""What goes wrong between ranks: deaths, hangs, aborts, different operations; errors name the rank."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
from conformance.test_works import gate
from harness import Died, current_store, run_ranks

from collectives import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistError,
    GroupAbortedError,
    PeerLostError,
    ProcessGroup,
    ReduceOp,
    Work,
)
from collectives.core.types import AllreduceOptions, BarrierOptions, BroadcastOptions

PATIENCE = 15.0
"""Seconds within which survivors must know; far below the time limits of the operations."""


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def collective(group: ProcessGroup) -> Work:
    return group.allreduce(torch.ones(1000))


def collective_on_this_thread(group: ProcessGroup) -> Work:
    return group.allreduce([torch.ones(1000)], AllreduceOptions(asyncOp=False))


def large_collective(group: ProcessGroup) -> Work:
    return group.allreduce(torch.ones(3_000_000))


def gathering(group: ProcessGroup) -> Work:
    return group.allgather([torch.ones(10) for _ in range(group.size())], torch.ones(10))


def barrier(group: ProcessGroup) -> Work:
    return group.barrier()


def receive(group: ProcessGroup) -> Work:
    return group.recv(torch.ones(3), 1)


def to_a_rank_that_lives(group: ProcessGroup) -> Work:
    return group.send(torch.ones(3), 2 if group.rank() == 0 else 0)


OPERATIONS: list[Callable[[ProcessGroup], Work]] = [
    collective,
    collective_on_this_thread,
    large_collective,
    gathering,
    barrier,
    receive,
]


def lose_a_rank(group: ProcessGroup, operation: Callable[[ProcessGroup], Work], before: bool) -> float:
    """Rank 1 dies while the others wait for it, or before they do; returns how long they waited."""
    for _ in range(3):
        group.allreduce(torch.ones(1000)).wait()
    gate("ready", group)
    if group.rank() == 1:
        time.sleep(0.0 if before else 0.2)
        kill_me()
    if before:
        time.sleep(0.4)
    began = time.monotonic()
    with pytest.raises(PeerLostError) as info:
        operation(group).wait()
    took = time.monotonic() - began
    assert info.value.rank == 1, info.value
    assert "rank 1" in str(info.value)
    assert f"[rank {group.rank()}]" in str(info.value)
    names = {"all_reduce", "all_gather", "barrier", "recv"}
    assert info.value.operation in names, info.value.details()
    assert info.value.sequence > 0 or info.value.operation == "recv", info.value.details()
    for call in (collective, collective_on_this_thread, barrier, receive, to_a_rank_that_lives):
        with pytest.raises(PeerLostError) as later:
            call(group).wait()
        assert later.value.rank == 1, f"{call.__name__}: {later.value}"
        assert "rank 1" in str(later.value)
    group.abort()
    with pytest.raises(GroupAbortedError, match="rank 1") as ended:
        collective(group).wait()
    assert isinstance(ended.value.cause, PeerLostError), ended.value.details()
    assert ended.value.cause.rank == ended.value.rank == 1
    return took


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_is_killed(backend: str, operation: Callable[[ProcessGroup], Work]) -> None:
    results = run_ranks(lose_a_rank, 4, operation, False, backend=backend, isolated=True, lost={1})
    assert results[1] == Died(-signal.SIGKILL)
    assert max(results[rank] for rank in (0, 2, 3)) < PATIENCE, f"seconds that each rank waited: {results}"


def test_a_rank_is_gone_before(backend: str) -> None:
    results = run_ranks(lose_a_rank, 3, collective, True, backend=backend, isolated=True, lost={1})
    assert max(results[0], results[2]) < PATIENCE


def learn_late(group: ProcessGroup) -> None:
    """Rank 2 does something else while others lose rank 1; its first call finds the group broken."""
    group.allreduce(torch.ones(3)).wait()
    gate("ready", group)
    if group.rank() == 1:
        kill_me()
    if group.rank() == 2:
        time.sleep(0.6)
    with pytest.raises(PeerLostError) as info:
        group.allreduce(torch.ones(3)).wait()
    assert info.value.rank == 1, info.value


def test_who_took_no_part_hears_of_the_same_rank(backend: str) -> None:
    run_ranks(learn_late, 3, backend=backend, isolated=True, lost={1})


def lose_with_futures(group: ProcessGroup) -> None:
    gate("ready", group)
    if group.rank() == 1:
        time.sleep(0.3)
        kill_me()
    works = [group.allreduce(torch.ones(100)[::2]) for _ in range(4)]
    works.append(group.allreduce_coalesced([torch.ones(3), torch.ones(4)]))
    futures = [work.get_future() for work in works]
    codes = [work.get_future_result() for work in works]
    for work, future, code in zip(works, futures, codes, strict=True):
        with pytest.raises(PeerLostError) as info:
            future.wait()
        assert info.value.rank == 1
        assert code.wait() != 0
        with pytest.raises(PeerLostError):
            work.wait()
        with pytest.raises(PeerLostError):
            work.wait()
        with pytest.raises(PeerLostError):
            work.result()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), PeerLostError)


def test_all_in_flight_fail_and_futures_keep_the_class(backend: str) -> None:
    run_ranks(lose_with_futures, 3, backend=backend, isolated=True, lost={1})


def stopped_rank(group: ProcessGroup) -> float:
    group.allreduce(torch.ones(3)).wait()
    gate("ready", group)
    group.set_timeout(timedelta(seconds=1.5))
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    time.sleep(0.3)
    began = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as info:
        group.allreduce(torch.ones(3)).wait()
    took = time.monotonic() - began
    assert "all_reduce" in str(info.value)
    says_so(info.value, group, operation="all_reduce", missing_ranks=[1])
    with pytest.raises(GroupAbortedError) as later:
        group.allreduce(torch.ones(3)).wait()
    assert isinstance(later.value.cause, CollectiveTimeoutError), later.value.cause
    says_so(later.value, group, operation="all_reduce", missing_ranks=[1])
    return took


def says_so(error: DistError, group: ProcessGroup, operation: str, missing_ranks: list[int]) -> None:
    """Checks what an error about ranks that did not come says to programs; Gloo cannot tell which."""
    assert error.operation == operation, error.details()
    assert error.sequence > 0, error.details()
    tells = group.name() != "gloo"
    assert list(error.missing_ranks) == (missing_ranks if tells else []), error.details()
    assert error.rank == (missing_ranks[0] if tells else -1), error.details()
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert again.details() == error.details()


@pytest.mark.sampled(1)
def test_a_rank_is_stopped(backend: str) -> None:
    results = run_ranks(stopped_rank, 3, backend=backend, isolated=True, lost={1})
    for rank in (0, 2):
        assert results[rank] < 1.5 + PATIENCE


def late_rank(group: ProcessGroup) -> None:
    """Only one of the ranks comes; the limit is the operation's own."""
    options = AllreduceOptions(timeout=timedelta(milliseconds=300))
    if group.rank() != 0:
        current_store().wait(["passed"])
        with pytest.raises((PeerLostError, GroupAbortedError, CollectiveTimeoutError)):
            group.allreduce([torch.ones(3)], options).wait()
        return
    for asynchronous in (True, False):
        options.asyncOp = asynchronous
        error = CollectiveTimeoutError if asynchronous else GroupAbortedError
        began = time.monotonic()
        with pytest.raises(error) as info:
            group.allreduce([torch.ones(3)], options).wait()
        assert time.monotonic() - began < PATIENCE
        assert "0.3 s" in str(info.value), info.value
    current_store().set("passed", "")


def test_a_limit_of_an_operation(backend: str) -> None:
    run_ranks(late_rank, 2, backend=backend, isolated=True)


def message_limit(group: ProcessGroup) -> None:
    if group.rank() == 0:
        group.set_timeout(timedelta(milliseconds=300))
        for work in (group.recv(torch.ones(3), 1), group.recv(torch.ones(3), 0, 2)):
            with pytest.raises((CollectiveTimeoutError, GroupAbortedError)):
                work.wait()
        current_store().set("passed", "")
    else:
        current_store().wait(["passed"])


def test_a_limit_of_a_message(backend: str) -> None:
    run_ranks(message_limit, 2, backend=backend, isolated=True)


def abort_here(group: ProcessGroup, waiting: bool) -> float:
    """Rank 0 waits and is released by another thread; the others, who wait too, learn of it."""
    gate("ready", group)
    began = time.monotonic()
    if group.rank() == 0:
        aborter = threading.Timer(0.4, group.abort)
        aborter.start()
        if waiting:
            with pytest.raises(GroupAbortedError, match="abort"):
                group.recv(torch.ones(3), 1).wait()
        else:
            aborter.join()
    else:
        with pytest.raises(GroupAbortedError) as info:
            group.allreduce(torch.ones(3)).wait()
        assert "rank 0" in str(info.value), info.value
        assert info.value.rank == 0
        assert info.value.cause is None
    took = time.monotonic() - began
    with pytest.raises(GroupAbortedError):
        group.allreduce(torch.ones(3)).wait()
    gate("seen", group)
    return took


@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "idle"])
def test_abort_releases_everybody(backend: str, waiting: bool) -> None:
    results = run_ranks(abort_here, 3, waiting, backend=backend, isolated=True)
    assert max(results) < PATIENCE


def abort_behind(group: ProcessGroup) -> None:
    """Rank 0 aborts because of an exception, of which the others hear."""
    gate("ready", group)
    if group.rank() == 0:
        try:
            raise ValueError("bad shard 3")
        except ValueError:
            group.abort()
    else:
        for _ in range(2):
            with pytest.raises(GroupAbortedError, match=r"rank 0 .*after ValueError: bad shard 3") as info:
                group.allreduce(torch.ones(3)).wait()
            assert info.value.rank == 0
            assert type(info.value.cause) is DistError
            assert str(info.value.cause) == "ValueError: bad shard 3"
            assert info.value.cause.rank == 0
    gate("seen", group)


def test_an_abort_tells_the_exception_behind_it(backend: str) -> None:
    run_ranks(abort_behind, 3, backend=backend, isolated=True)


def abort_many(group: ProcessGroup) -> None:
    gate("ready", group)
    if group.rank() == 1:
        current_store().wait(["done"])
        return
    works = [group.allreduce(torch.ones(50)) for _ in range(10)]
    works += [group.recv(torch.ones(1), 1, tag) for tag in range(3)]
    works.append(group.recv(torch.ones(1), 0, 9))
    outcomes: list[str] = []

    def wait(work: Work) -> None:
        try:
            work.wait()
        except GroupAbortedError as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=wait, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    began = time.monotonic()
    group.abort()
    for thread in threads:
        thread.join(PATIENCE)
    assert time.monotonic() - began < PATIENCE
    assert len(outcomes) == len(works)
    assert all(work.is_completed() for work in works)
    current_store().set("done", "x")


def test_abort_releases_every_thread(backend: str) -> None:
    run_ranks(abort_many, 2, backend=backend, isolated=True)


def mismatches(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()

    def pick(*choices: Callable[[], Work]) -> Callable[[], Work]:
        return choices[1] if me == size - 1 else choices[0]

    a, b, c = (torch.full((4,), 1.0 + me) for _ in range(3))
    five, ints = torch.full((5,), 1.0 + me), torch.full((4,), 1 + me, dtype=torch.int32)
    cases = {
        "size": (pick(lambda: group.allreduce(a), lambda: group.allreduce(five)), "4 elements", "5 elements"),
        "dtype": (pick(lambda: group.allreduce(a), lambda: group.allreduce(ints)), "float32", "int32"),
        "reduction": (pick(lambda: group.allreduce(a), lambda: group.allreduce(b, ReduceOp.MAX)),
                      "SUM", "MAX"),
        "operation": (pick(lambda: group.allreduce(a), lambda: group.broadcast(b, root=0)),
                      "all_reduce", "broadcast"),
        "root": (pick(lambda: group.broadcast(a, root=0), lambda: group.broadcast(b, root=1)),
                 "root 0", "root 1"),
        "gathered size": (
            pick(lambda: group.allgather([torch.empty(4) for _ in range(size)], a),
                 lambda: group.allgather([torch.empty(5) for _ in range(size)], five)),
            "all_gather", "all_gather",
        ),
    }  # fmt: skip
    for name, (call, first, second) in cases.items():
        with pytest.raises(CollectiveMismatchError) as info:
            call().wait()
        text = str(info.value)
        assert info.value.sequence > 0, name
        assert info.value.operation in {"all_reduce", "broadcast", "all_gather"}, name
        for rank in range(size):
            assert f"rank {rank}: " in text, f"{name}: {text}"
        assert first in text, f"{name}: {text}"
        assert second in text, f"{name}: {text}"
        # Nothing was written, and the group goes on.
        for tensor in (a, b, five, ints):
            assert tensor.unique().tolist() == [1 + me], name
        c.fill_(1.0)
        group.allreduce(c).wait()
        assert c.tolist() == [size] * 4, name


def barrier_mismatches(group: ProcessGroup) -> None:
    """A barrier meets something else, on each lane of a composition first; the group goes on."""
    me, x = group.rank(), torch.full((4,), 1.0 + group.rank())
    other: list[Callable[[], Work]] = [
        lambda: group.allreduce(x),
        lambda: group.broadcast(x, BroadcastOptions(asyncOp=False)),
        lambda: group.allgather([torch.empty(4) for _ in range(group.size())], x),
    ]
    for turn in range(5):
        options = BarrierOptions(asyncOp=(turn + me) % 2 == 0)
        call = other[turn % 3] if me == turn % group.size() else partial(group.barrier, options)
        with pytest.raises(CollectiveMismatchError) as info:
            call().wait()
        for rank in range(group.size()):
            assert f"rank {rank}: " in str(info.value)
        assert "barrier" in str(info.value)
        assert x.unique().tolist() == [1 + me]
        # Several at once and a barrier that covers them, so that lanes out of step would be seen.
        works = [group.allreduce(torch.full((3,), float(n))) for n in range(turn + 1)]
        group.barrier().wait()
        for n, work in enumerate(works):
            assert work.is_completed()
            assert work.result()[0].tolist() == [n * group.size()] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_a_barrier_meets_another_operation(backend: str, size: int) -> None:
    if backend == "gloo":
        pytest.skip("Gloo compares nothing between ranks; its docstring says so")
    run_ranks(barrier_mismatches, size, backend=backend, isolated=True)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_issue_different_operations(backend: str, size: int) -> None:
    if backend == "gloo":
        pytest.skip("Gloo compares nothing between ranks; its docstring says so")
    run_ranks(mismatches, size, backend=backend, isolated=True)


def leave_one_group(group: ProcessGroup) -> None:
    """An abort of one group leaves another of the same ranks alone."""
    from collectives.registry.backends import GroupOptions, create_group
    from collectives.store import PrefixStore

    store = PrefixStore("other", current_store())
    other = create_group(group.name(), GroupOptions(store, group.rank(), group.size(), group_name="other"))
    gate("made", group)
    if group.rank() == 0:
        other.abort()
    gate("aborted", group)
    x = torch.ones(3)
    group.allreduce(x).wait()
    assert x.tolist() == [group.size()] * 3
    other.abort()


def test_groups_fail_alone(backend: str) -> None:
    run_ranks(leave_one_group, 2, backend=backend)
