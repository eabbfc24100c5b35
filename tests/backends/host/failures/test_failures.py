"""What the host backend does when ranks die, leave, hang, or never come."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from harness import Died, current_store, run_ranks
from torch.distributed import PrefixStore

import collectives as dist
from collectives.backends.host import ProcessGroupHost

LIMIT = timedelta(seconds=20)
SYNCHRONOUS = dist.AllreduceOptions(asyncOp=False)


def _group(rank, size, timeout=LIMIT):
    return ProcessGroupHost(current_store(), rank, size, timeout, group_name="test")


# ---- ranks that are late, dead or gone -------------------------------------------------------------------


def _late(rank, size, asynchronous):
    group, store = _group(rank, size), current_store()
    group.barrier().wait()
    if rank == 2:
        store.wait(["timed out 0", "timed out 1"])
        with pytest.raises(dist.GroupAbortedError, match="broken since an earlier error"):
            group.allreduce([torch.ones(1)], SYNCHRONOUS)
    else:
        options = dist.AllreduceOptions(timedelta(seconds=2), asynchronous)
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            group.allreduce([torch.ones(5)], options).wait()
        store.set(f"timed out {rank}", "")
        caught.match(r"rank 0: in all_reduce\(SUM, float32, 5 elements\) number 2")
        caught.match(r"rank 2: finished barrier number 1")
        if not asynchronous:
            caught.match(r"test_failures.py:\d+ in _late")
        with pytest.raises(dist.GroupAbortedError, match="number 2 was not done"):
            group.barrier().wait()
    group.shutdown()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_time_limit_tells_where_every_rank_is(asynchronous):
    run_ranks(_late, 3, asynchronous)


def _victim(group):
    tensor = torch.ones(1 << 20)
    while True:
        group.allreduce([tensor], SYNCHRONOUS)


def _killed(rank, size, what):
    group = _group(rank, size)
    group.barrier().wait()
    if rank == 1:
        if what == "busy":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
            _victim(group)
        time.sleep(0.2)  # by then others wait for it
        os.kill(os.getpid(), signal.SIGKILL)
    calls = {
        "busy": lambda: _victim(group),
        "receive": lambda: group.recv([torch.empty(1)], 1).wait(),
        "asynchronous": lambda: group.allreduce([torch.ones(1)]).wait(),
        "synchronous": lambda: group.allreduce([torch.ones(1)], SYNCHRONOUS),
    }
    with pytest.raises(dist.PeerLostError, match="rank 1") as caught:
        calls[what]()
    assert caught.value.rank == 1
    with pytest.raises(dist.PeerLostError, match="rank 1"):
        group.barrier().wait()
    group.shutdown()


@pytest.mark.parametrize("what", ["synchronous", "asynchronous", "receive", "busy"])
def test_killed_rank_is_named_on_all_others(what):
    results = run_ranks(_killed, 3, what, isolated=True, lost=[1])
    assert results[1] == Died(-signal.SIGKILL)


def _leaves(rank, size):
    group = _group(rank, size)
    group.barrier().wait()
    if rank == 1:
        group.shutdown()
        group.shutdown()
        with pytest.raises(dist.GroupAbortedError, match="was shut down"):
            group.barrier().wait()
        with pytest.raises(dist.GroupAbortedError, match="was shut down"):
            group.send([torch.ones(1)], 0).wait()
        return
    with pytest.raises(dist.PeerLostError, match=r"rank 1 .*has left the group") as caught:
        group.allreduce([torch.ones(1)], SYNCHRONOUS)
    assert caught.value.rank == 1
    group.shutdown()


def test_rank_that_left_is_named_by_those_who_go_on():
    run_ranks(_leaves, 2)


def _outstanding(rank, size):
    group = _group(rank, size)
    tensors = [torch.full((300_000,), float(rank)) for _ in range(20)]
    works = [group.allreduce([tensor]) for tensor in tensors]
    message = group.send([torch.ones(1_000_000)], 1 - rank)
    received = torch.zeros(1_000_000)
    works.append(group.recv([received], 1 - rank))
    group.shutdown()
    assert all(work.is_completed() for work in (*works, message))
    assert all((tensor == 1).all() for tensor in tensors)
    assert received.sum() == 1_000_000


def test_shutdown_finishes_what_was_issued():
    run_ranks(_outstanding, 2)


# ---- abort -----------------------------------------------------------------------------------------------


def _abort(rank, size, what):
    group, store = _group(rank, size), current_store()
    group.barrier().wait()
    if rank == 0:
        threading.Timer(0.3, group.abort).start()
    elif rank == 2:  # comes too late
        store.wait(["aborted"])
    options = dist.AllreduceOptions(asyncOp=what == "asynchronous")
    receives = what == "receive" and rank < 2
    call = (
        (lambda: group.recv([torch.empty(1)], 2))
        if receives
        else (lambda: group.allreduce([torch.ones(1)], options))
    )
    with pytest.raises(dist.GroupAbortedError, match="rank 0 aborted it"):
        call().wait()
    if rank == 0:
        store.set("aborted", "")
    group.abort()
    with pytest.raises(dist.GroupAbortedError, match="rank 0 aborted it"):
        group.barrier().wait()
    group.shutdown()


@pytest.mark.parametrize("what", ["synchronous", "asynchronous", "receive"])
def test_abort_releases_all_ranks(what):
    run_ranks(_abort, 3, what)


def _abort_all(rank, size):
    """Every kind of waiter of rank 0 is released at once by a thread that waits for none of them."""
    group = _group(rank, size)
    group.barrier().wait()
    if rank == 1:
        current_store().wait(["aborted"])
        return
    works = [group.recv([torch.ones(1)], 1, tag) for tag in range(3)]
    works.append(group.send([torch.ones(1 << 24)], 1))  # more than the kernel takes over
    works += [group.allreduce([torch.ones(10)]) for _ in range(3)]
    other = ProcessGroupHost(PrefixStore("alone", current_store()), 0, 1, LIMIT)
    released = []

    def wait(call):
        with pytest.raises(dist.GroupAbortedError, match="rank 0 aborted it"):
            call()
        released.append(call)

    def future_of(work):
        future = work.get_future()
        while not future.done():
            time.sleep(0.001)
        future.value()

    calls = [work.wait for work in works]
    calls += [lambda: works[0].wait(timedelta(seconds=10)), lambda: future_of(works[1])]
    calls.append(lambda: future_of(works[4]))
    calls.append(lambda: group.allreduce([torch.ones(10)], SYNCHRONOUS))  # waits behind those in flight
    threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert not released
    group.abort()
    for thread in threads:
        thread.join(20)
    assert len(released) == len(calls)
    tensor = torch.ones(2)
    other.allreduce([tensor]).wait()  # another group of the process is as good as before
    other.shutdown()
    current_store().set("aborted", "")


@pytest.mark.parametrize("placement", ["aa", "ab"])
def test_abort_releases_every_kind_of_waiter_at_once(placement):
    run_ranks(_abort_all, 2, placement=placement)


def _issue_while_the_group_ends(rank, size, rounds):
    sys.setswitchinterval(1e-5)  # the threads meet anywhere

    def issue(group):
        with contextlib.suppress(dist.DistError):
            while True:
                group.allreduce([torch.ones(3)])

    for number in range(rounds):
        group = ProcessGroupHost(PrefixStore(str(number), current_store()), rank, size, LIMIT)
        threads = [threading.Thread(target=issue, args=(group,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        group.abort()
        for thread in threads:
            thread.join()


@pytest.mark.full
def test_threads_that_issue_while_their_group_is_aborted_are_refused():
    run_ranks(_issue_while_the_group_ends, 2, 100, isolated=True, timeout=60)


# ---- forming a group -------------------------------------------------------------------------------------


def _without_first(rank, size):
    if rank > 0:
        with pytest.raises(dist.CollectiveTimeoutError, match=r"rank 0 did not come within 0\.5 s"):
            _group(rank, size, timedelta(seconds=0.5))


def test_missing_rank_0_is_named():
    run_ranks(_without_first, 2)


# ---- memory ----------------------------------------------------------------------------------------------


def _reduce_without_memory(rank, size, victim):
    group = _group(rank, size)
    group.allreduce([torch.ones(2)]).wait()
    if rank == victim:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the folder's own, closed since
                if str(link.readlink()).startswith("/memfd:collectives"):
                    os.dup2(nowhere, int(link.name))  # in which the kernel allocates nothing
    try:
        group.allreduce([torch.ones(1 << 18)]).wait()
    except dist.DistError as error:
        with pytest.raises(dist.DistError, match="has no memory"):
            group.barrier().wait()
        return type(error), error.rank, str(error)
    return None


@pytest.mark.parametrize("placement", ["aa", "aab"])
@pytest.mark.sampled(1)
def test_all_hear_of_a_rank_that_has_no_memory_for_a_large_tensor(placement):
    results = run_ranks(
        _reduce_without_memory, len(placement), 1, isolated=True, placement=placement, timeout=30
    )
    for kind, named, text in results:
        assert issubclass(kind, dist.DistBackendError)
        assert named == 1
        assert "rank 1 has no memory to stage tensors in: shared memory: cannot allocate" in text
