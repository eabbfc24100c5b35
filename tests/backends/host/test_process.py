"""What groups of the host backend leave in a process, and what its signals, forks and end do to them."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from census import census, growth, segment_bytes
from harness import current_store, run_ranks
from torch.distributed import PrefixStore

import collectives as dist
from collectives.backends.host import ProcessGroupHost

pytestmark = pytest.mark.usefixtures("preloaded_python")

LIMIT = timedelta(seconds=20)


FUTURES = 3
"""Threads that complete futures, one of which is idle, may be more than were there before."""


def _nothing_is_left(before):
    more = growth({**before, "threads": before["threads"] + FUTURES})
    assert not more, (before, more)


def _memory_of_uses(rank, size):
    """Returns what the segment of a group takes before, and after a large tensor, in MiB."""
    before = segment_bytes()
    group = ProcessGroupHost(current_store(), rank, size, LIMIT)
    group.allreduce([torch.ones(1000)]).wait()
    group.barrier().wait()
    small = segment_bytes()
    group.allreduce([torch.ones(1 << 18)]).wait()
    group.barrier().wait()
    large = segment_bytes()
    group.shutdown()
    return (small - before) / (1 << 20), (large - small) / (1 << 20)


def test_a_group_takes_memory_for_large_tensors_when_there_is_one():
    for small, large in run_ranks(_memory_of_uses, 2):
        assert 0 < small < 0.25
        assert large == 2 * 5.25


ROUNDS = 40
placements = pytest.mark.parametrize("placement", ["aa", "ab"])


def _rounds(rank, size):
    store = current_store()
    numbers = itertools.count()

    def make():
        return ProcessGroupHost(PrefixStore(str(next(numbers)), store), rank, size, LIMIT)

    def once():
        group = make()
        works = [group.allreduce([torch.ones(10)]), group.send([torch.ones(2)], 1 - rank)]
        works.append(group.recv([torch.empty(2)], 1 - rank))
        works[0].get_future()
        for work in works:
            work.wait()
        group.shutdown()

    once()
    before = census()
    for _ in range(ROUNDS):
        once()
    _nothing_is_left(before)
    assert before["segments"] == before["children"] == 0
    # A group that nobody shuts down ends when it is collected, one that was aborted at once.
    for _ in range(3):
        group = make()
        group.allreduce([torch.ones(10)]).wait()
        del group
        with contextlib.suppress(dist.GroupAbortedError):  # the peer's abort may come first
            group = make()
            group.recv([torch.ones(1)], 1 - rank)
            group.abort()
    group = None
    _nothing_is_left(before)


@placements
def test_nothing_is_left_of_groups_made_and_ended(placement):
    run_ranks(_rounds, 2, placement=placement, isolated=True)


def _worlds(rank, size):
    store = current_store()
    before = None
    for n in range(2 * ROUNDS):
        dist.init_process_group("host", store=PrefixStore(f"world{n}", store), rank=rank, world_size=size)
        subgroup = dist.new_group([0, 1])
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        dist.all_reduce(torch.ones(2), group=subgroup)
        work.wait()
        dist.destroy_process_group()
        before = before or census()
    _nothing_is_left(before)


@pytest.mark.full
@placements
def test_nothing_is_left_of_worlds_made_and_destroyed(placement):
    run_ranks(_worlds, 2, placement=placement, isolated=True)


def _resident():
    """Returns the memory of this process in MiB, what it shares with other ranks included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) / 1024


def _memory(rank, size):
    """Returns what a group adds to this process after long operations of every kind."""
    count = 1 << 20
    whole, result, part = torch.ones(count), torch.ones(count), torch.ones(count // size)
    sent, received = (list(torch.ones(count).split(count // size)) for _ in range(2))
    store = current_store()
    store.check(["none"])
    before = _resident()
    group = ProcessGroupHost(store, rank, size, LIMIT)
    for asynchronous in (False, True):
        group.allreduce([whole], dist.AllreduceOptions(asyncOp=asynchronous)).wait()
        group.reduce([whole], dist.ReduceOptions(asyncOp=asynchronous)).wait()
        group.broadcast([whole], dist.BroadcastOptions(asyncOp=asynchronous)).wait()
        group.allgather([received], [part], dist.AllgatherOptions(asyncOp=asynchronous)).wait()
        group.reduce_scatter_single(part, whole, dist.ReduceScatterOptions(asyncOp=asynchronous)).wait()
        group.alltoall_base(result, whole, None, None, dist.AllToAllOptions(asyncOp=asynchronous)).wait()
    works = [group.recv([received[peer]], peer) for peer in range(size)]
    works += [group.send([sent[peer]], peer) for peer in range(size)]
    for work in works:
        work.wait()
    added = _resident() - before
    group.barrier().wait()
    group.shutdown()
    return added


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("placement", "limit"), [("aa", 16), ("ab", 16), ("aaaaaaaa", 64), ("aaaabbbb", 64), ("abcdefgh", 64)]
)
def test_memory_beyond_the_tensors_is_small(placement, limit):
    added = run_ranks(_memory, len(placement), placement=placement, isolated=True)
    assert 0 < max(added) < limit


# ---- signals, forks, the end of the interpreter ----------------------------------------------------------


def _script(tmp_path, body, size=2, **environment):
    """Runs a script on every rank; returns the finished processes by rank."""
    path = tmp_path / "script.py"
    preamble = """
        import os, signal, sys, threading, time
        from datetime import timedelta
        import torch
        import torch.distributed
        import collectives as dist
        from collectives.backends.host import ProcessGroupHost
        rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        store = torch.distributed.FileStore(store, size)
        group = ProcessGroupHost(store, rank, size, timedelta(seconds=30))
        group.barrier().wait()
    """
    path.write_text(textwrap.dedent(preamble) + textwrap.dedent(body))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-W", "error", str(path), str(r), str(size), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        for r in range(size)
    ]
    try:
        return [(*rank.communicate(timeout=60), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.full
def test_signal_ends_a_wait(tmp_path):
    body = """
        def raises(call, kind):
            try:
                call()
            except kind:
                store.add("interrupts", 1)
            else:
                raise AssertionError("not interrupted")

        def wait_for_interrupts(number):
            while store.add("interrupts", 0) < number:
                time.sleep(0.01)

        def soon():
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

        if rank == 0:
            tensor = torch.ones(1)
            soon()
            work = group.recv([tensor], 1)
            raises(work.wait, KeyboardInterrupt)
            work.wait()  # it went on
            soon()
            work = group.allreduce([tensor])
            raises(work.wait, KeyboardInterrupt)
            work.wait()
            soon()
            raises(lambda: group.allreduce([tensor], dist.AllreduceOptions(asyncOp=False)), KeyboardInterrupt)
            raises_now = False
            try:
                group.barrier().wait()
            except dist.GroupAbortedError as error:
                assert "rank 0 was interrupted" in str(error), error
                raises_now = True
            assert raises_now
        else:
            wait_for_interrupts(1)
            group.send([torch.ones(1)], 0).wait()
            wait_for_interrupts(2)
            group.allreduce([torch.ones(1)]).wait()
            wait_for_interrupts(3)
            try:
                group.allreduce([torch.ones(1)], dist.AllreduceOptions(asyncOp=False))
            except dist.GroupAbortedError as error:
                assert "rank 0 was interrupted" in str(error), error
            else:
                raise AssertionError("peers were not told")
        print("good")
    """
    for out, err, code in _script(tmp_path, body):
        assert (out, err, code) == ("good\n", "", 0)


@pytest.mark.full
def test_interpreter_ends_with_operations_outstanding(tmp_path):
    body = """
        works = [group.allreduce([torch.ones(1 << 20)]) for _ in range(3)]
        works.append(group.recv([torch.ones(1)], 1 - rank))
        works[-1].get_future()
        if rank == 0:  # the other one leaves before these can be done
            works += [group.allreduce([torch.ones(1 << 20)]) for _ in range(3)]
        print("good", flush=True)
    """
    begin = time.monotonic()
    for out, err, code in _script(tmp_path, body):
        assert (out, err, code) == ("good\n", "", 0)
    assert time.monotonic() - begin < 30


@pytest.mark.full
def test_fork_leaves_the_parents_group_alone(tmp_path):
    body = """
        group.allreduce([torch.ones(1)]).wait()  # there is a thread now
        group.recv([torch.empty(1)], rank).get_future()
        child = os.fork()
        if child == 0:
            try:
                group.barrier().wait()
            except dist.GroupAbortedError as error:
                assert "forked process" in str(error)
            else:
                os._exit(1)
            group.shutdown()
            del group
            sys.exit(0)  # with all its handlers
        assert os.waitpid(child, 0)[1] == 0
        tensor = torch.ones(100_000)
        group.allreduce([tensor]).wait()
        assert (tensor == size).all()
        group.send([torch.ones(1)], rank).wait()
        group.shutdown()
        print("good")
    """
    for out, err, code in _script(tmp_path, body):
        assert (out, err, code) == ("good\n", "", 0)
