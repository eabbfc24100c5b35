"""Ranks of several machines that are late, dead, stopped or gone: the others hear of it on all machines."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from harness import Died, current_store, run_ranks
from machines import make_machines  # noqa: F401 - a fixture

import collectives as dist
from collectives.bench.core.namespaces import INTERFACE

SYNCHRONOUS = dist.AllreduceOptions(asyncOp=False)


def _late(group, late):
    rank, size, store = group.rank(), group.size(), current_store()
    group.barrier().wait()
    if rank == late:
        store.wait([f"timed out {other}" for other in range(size) if other != late])
        with pytest.raises(dist.DistError):  # once this machine has heard of it
            group.recv([torch.ones(1)], (late + 1) % size, 0).wait()
        with pytest.raises(dist.GroupAbortedError, match="broken since an earlier error"):
            group.allreduce([torch.ones(1)], SYNCHRONOUS)
        return
    options = dist.AllreduceOptions(timedelta(seconds=2), False)
    with pytest.raises(dist.CollectiveTimeoutError) as caught:
        group.allreduce([torch.ones(5)], options).wait()
    store.set(f"timed out {rank}", "")
    caught.match(rf"waited for rank {late}")
    for r in range(size):
        doing = (
            r"finished barrier number 1" if r == late
            else r"in all_reduce\(SUM, float32, 5 elements\) number 2, waits for .* in _late"
        )  # fmt: skip
        caught.match(rf"rank {r} on '.*': {doing}")


@pytest.mark.parametrize(("layout", "late"), [("aabb", 2), ("aabb", 3), ("abc", 1)])
@pytest.mark.sampled(1)
def test_time_limit_tells_where_every_rank_of_every_machine_is(layout, late):
    run_ranks(_late, len(layout), late, backend="host", placement=layout)


def _killed(group, victim, asynchronous):
    group.barrier().wait()
    if group.rank() == victim:
        time.sleep(0.3)  # by then others wait for it
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(
        dist.PeerLostError, match=rf"rank {victim} on '.*' \(process \d+\) has died"
    ) as caught:
        group.allreduce([torch.ones(1)], dist.AllreduceOptions(asyncOp=asynchronous)).wait()
    assert caught.value.rank == victim


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "victim", "asynchronous"),
    [("aabb", 0, False), ("aabb", 1, True), ("aabb", 2, True), ("aabb", 3, False), ("abc", 1, False)],
)
def test_killed_rank_is_named_on_all_machines(layout, victim, asynchronous):
    options = {"backend": "host", "isolated": True, "lost": [victim], "placement": layout}
    results = run_ranks(_killed, len(layout), victim, asynchronous, **options)
    assert results[victim] == Died(-signal.SIGKILL)


def _killed_with_children(group):
    group.barrier().wait()
    store = current_store()
    if group.rank() == 1:
        child = os.fork()
        if child == 0:  # as a data loader's worker does, it holds copies of all that was open
            time.sleep(60)
            os._exit(0)
        store.set("child", str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    child = int(store.get("child"))
    try:
        with pytest.raises(dist.PeerLostError) as caught:
            group.barrier().wait()
        assert caught.value.rank == 1
    finally:
        os.kill(child, signal.SIGKILL)  # it still runs


def test_killed_rank_is_noticed_although_its_children_live():
    run_ranks(_killed_with_children, 2, backend="host", isolated=True, lost=[1], placement="ab")


def _stopped(group):
    rank = group.rank()
    group.barrier().wait()
    store = current_store()
    if rank == 1:  # a leader
        store.set("process", str(os.getpid()))
    if rank == 0:
        process = int(store.get("process"))
        os.kill(process, signal.SIGSTOP)
        threading.Timer(4.5, os.kill, (process, signal.SIGCONT)).start()
    begin = time.monotonic()
    tensor = torch.ones(3)
    if rank == 1:
        time.sleep(0.2)
    group.allreduce([tensor], SYNCHRONOUS)
    assert tensor[0] == 3
    if rank == 0:
        assert time.monotonic() - begin > 4


@pytest.mark.full
def test_stopped_rank_is_not_taken_for_a_dead_one():
    run_ranks(_stopped, 3, backend="host", placement="abb")


def _dies_beside_a_stopped_leader(group, operation):
    """Rank 3 dies while the leader who would tell of it is stopped: its connections end long before."""
    rank, store = group.rank(), current_store()
    tensor = torch.ones(1 << 20)
    group.allreduce([tensor], SYNCHRONOUS)  # makes all connections
    if rank == 3:
        group.send([tensor], 0, 0).wait()
        store.wait(["stopped"])
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        group.recv([tensor], 3, 0).wait()
        process = int(store.get("process"))
        os.kill(process, signal.SIGSTOP)
        threading.Timer(3, os.kill, (process, signal.SIGCONT)).start()
        store.set("stopped", "")
    if rank == 2:  # calls nothing: when it wakes, the group may be broken already
        store.set("process", str(os.getpid()))
        store.wait(["told 0", "told 1"])
        return
    receives = operation == "recv" and rank == 0
    work = group.recv([tensor], 3, 0) if receives else group.allreduce([tensor])
    with pytest.raises(dist.PeerLostError, match=r"rank 3 .*has died") as caught:
        work.wait()
    assert caught.value.rank == 3
    store.set(f"told {rank}", "")


@pytest.mark.full
@pytest.mark.parametrize("operation", ["recv", "allreduce"])
def test_a_death_that_is_told_late_is_told(operation):
    options = {"backend": "host", "isolated": True, "lost": [3], "placement": "aabb"}
    run_ranks(_dies_beside_a_stopped_leader, 4, operation, **options)


def _reduce_until_an_error(group, tensor, timeout):
    for _ in range(1000):
        group.allreduce([tensor], dist.AllreduceOptions(timeout, False)).wait()


def _stops_reading(group, stops):
    """A rank is stopped within a long transfer, whose window at the others' ends is soon full."""
    rank, store = group.rank(), current_store()
    tensor = torch.ones(16 << 20)
    group.barrier().wait()
    if rank == stops:
        store.set("process", str(os.getpid()))
        with pytest.raises(dist.DistError):  # once it goes on, and has heard of it
            _reduce_until_an_error(group, tensor, timedelta(seconds=30))
        return
    if rank == 0:
        process = int(store.get("process"))
        threading.Timer(0.5, os.kill, (process, signal.SIGSTOP)).start()
    # Whom a rank waits for may wait for the stopped one itself.
    with pytest.raises(dist.CollectiveTimeoutError, match=r"rank \d waited for rank \d.* Every rank:\n"):
        _reduce_until_an_error(group, tensor, timedelta(seconds=3))
    store.set(f"timed out {rank}", "")
    if rank == 0:
        store.wait([f"timed out {other}" for other in range(group.size()) if other != stops])
        os.kill(process, signal.SIGCONT)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "stops"), [("aabb", 2), ("aabb", 3), ("ab", 1)])
def test_a_rank_that_stops_reading_ends_a_long_transfer_within_its_time_limit(layout, stops):
    run_ranks(_stops_reading, len(layout), stops, backend="host", placement=layout)


def _leaves(group, leaver):
    group.barrier().wait()
    if group.rank() == leaver:
        group.shutdown()
        group.shutdown()
        return
    with pytest.raises(dist.PeerLostError, match=rf"rank {leaver} on .* has left the group") as caught:
        group.allreduce([torch.ones(1)], SYNCHRONOUS)
    assert caught.value.rank == leaver


@pytest.mark.parametrize("leaver", [2, 3])
def test_rank_that_left_is_named_on_all_machines(leaver):
    run_ranks(_leaves, 4, leaver, backend="host", placement="aabb")


def _abort(group, aborter):
    rank, store = group.rank(), current_store()
    group.barrier().wait()
    if rank == aborter:
        threading.Timer(0.3, group.abort).start()
    elif rank == 2:  # comes too late
        store.wait(["aborted"])
        with pytest.raises(dist.DistError):  # once this machine has heard of it
            group.recv([torch.ones(1)], 3, 0).wait()
    with pytest.raises(dist.GroupAbortedError, match=f"rank {aborter} aborted it"):
        group.allreduce([torch.ones(1)], SYNCHRONOUS if rank % 2 else None).wait()
    if rank == aborter:
        store.set("aborted", "")
    group.abort()


@pytest.mark.parametrize("aborter", [0, 1])
def test_abort_releases_the_ranks_of_all_machines(aborter):
    run_ranks(_abort, 4, aborter, backend="host", placement="aabb")


def _vanishes(group):
    rank = group.rank()
    group.barrier().wait()
    if rank == 2:
        time.sleep(0.5)  # by then others wait for it
        subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True)
    with contextlib.suppress(dist.PeerLostError):  # what the others sent before may complete it
        group.allreduce([torch.ones(1)], SYNCHRONOUS if rank % 2 else None).wait()
    with pytest.raises(dist.PeerLostError, match=r"rank . on .* cannot be reached any more") as caught:
        group.allreduce([torch.ones(1)], SYNCHRONOUS if rank % 2 else None).wait()
    assert caught.value.rank == (2 if rank < 2 else 0)


@pytest.mark.full
def test_machine_that_vanishes_is_noticed_on_both_sides(make_machines):  # noqa: F811
    machines = make_machines(2)
    run_ranks(_vanishes, 4, backend="host", isolated=True, machines=(machines, [0, 0, 1, 1]))


def _sockets():
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the list itself
            if str(entry.readlink()).startswith("socket:"):
                found.add(int(entry.name))
    return found


def _leave_behind_a_broken_connection(group):
    """The connection for messages from rank 0 to rank 1 breaks; a moment later rank 1 has left."""
    store = current_store()
    group.barrier().wait()
    store.barrier("reached the store", 2)
    before = _sockets()
    store.barrier("before the message", 2)
    if group.rank() == 1:
        group.recv([torch.ones(1)], 0).wait()
        for fd in _sockets() - before:
            with socket.socket(fileno=os.dup(fd)) as stream:
                stream.shutdown(socket.SHUT_RDWR)
        store.set("broken", "")
        store.wait(["sent"])
        group.shutdown()
        return
    group.send([torch.ones(1)], 1).wait()
    store.wait(["broken"])
    with pytest.raises(dist.PeerLostError, match="left the group") as info:  # noqa: PT012
        while True:
            work = group.send([torch.ones(1)], 1)
            time.sleep(0.01)
            if not work.is_completed():
                store.set("sent", "")
            work.wait()
    assert info.value.rank == 1


def test_a_rank_that_left_is_named_also_where_its_connection_broke_first():
    run_ranks(_leave_behind_a_broken_connection, 2, backend="host", placement="ab", isolated=True)
