"""What the host backend does when ranks disagree, die, leave, hang, are interrupted, or never come."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
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
from collectives.types import make_premul_sum

LIMIT = timedelta(seconds=20)
SYNCHRONOUS = dist.AllreduceOptions(asyncOp=False)


def _group(rank, size, timeout=LIMIT):
    return ProcessGroupHost(current_store(), rank, size, timeout, group_name="test")


# ---- ranks that disagree ---------------------------------------------------------------------------------


def _disagree(group, asynchronous):
    rank = group.rank()
    ones = torch.ones(4)

    def reduce(tensor, op=dist.ReduceOp.SUM):
        group.allreduce([tensor], dist.AllreduceOptions(asyncOp=asynchronous, reduceOp=op)).wait()

    def broadcast(root):
        group.broadcast([ones], dist.BroadcastOptions(asyncOp=asynchronous, rootRank=root)).wait()

    def gather(*lengths):
        group.allgather([[torch.empty(n) for n in lengths]], [torch.ones(lengths[rank])]).wait()

    def exchange(sent, expected):
        inputs = [torch.ones(sent if r != rank else 0) for r in range(2)]
        outputs = [torch.ones(expected if r != rank else 0) for r in range(2)]
        group.alltoall(outputs, inputs).wait()

    cases = [
        (
            lambda: reduce([ones, torch.ones(5)][rank]),
            [r"all_reduce\(SUM, float32, 4", "float32, 5 elements"],
        ),
        (lambda: reduce([ones, ones.int()][rank]), ["float32", "int32"]),
        (lambda: reduce(ones, [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank]), ["SUM", "MAX"]),
        (lambda: reduce(ones, make_premul_sum(rank + 2)), ["another factor"]),
        (lambda: reduce(ones) if rank else broadcast(0), ["all_reduce", "broadcast"]),
        (lambda: broadcast(rank), ["root 0", "root 1"]),
        (lambda: reduce(torch.ones(400_000 + rank)), ["400000 elements", "400001 elements"]),
        (lambda: reduce(torch.ones([1, 400_000][rank])), [", 1 elements", "400000 elements"]),
        (lambda: gather(2, 2 + rank), ["other part sizes"]),
        (lambda: exchange(3, 3 + rank), [r"rank 0 sends 12 bytes to rank 1, which expects 16"]),
    ]
    for call, words in cases:
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            call()
        for word in (*words, "rank 0: ", "rank 1: ", "number"):
            caught.match(word)
        assert torch.equal(ones, torch.ones(4))
        tensor = torch.ones(3)
        reduce(tensor)  # the group is as good as before
        assert tensor[0] == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_disagree_all_raise_before_anything_is_written(asynchronous):
    run_ranks(_disagree, 2, asynchronous, backend="host")


# ---- ranks that are late, dead or gone -------------------------------------------------------------------


def _late(rank, size, asynchronous):
    group = _group(rank, size)
    group.barrier().wait()
    if rank == 2:
        time.sleep(1.5)
        with pytest.raises(dist.GroupAbortedError, match="broken since an earlier error"):
            group.allreduce([torch.ones(1)], SYNCHRONOUS)
    else:
        options = dist.AllreduceOptions(timedelta(seconds=0.6), asynchronous)
        begin = time.monotonic()
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            group.allreduce([torch.ones(5)], options).wait()
        assert 0.5 < time.monotonic() - begin < 1.1
        caught.match(r"rank 0: in all_reduce\(SUM, float32, 5 elements\) number 2")
        caught.match(r"rank 2: finished barrier number 1")
        if not asynchronous:
            caught.match(r"test_host_failures.py:\d+ in _late")
        with pytest.raises(dist.GroupAbortedError, match="number 2 was not done"):
            group.barrier().wait()
    group.shutdown()


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
        time.sleep(0.2)
        current_store().set("died", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    calls = {
        "busy": lambda: _victim(group),
        "receive": lambda: group.recv([torch.empty(1)], 1).wait(),
        "asynchronous": lambda: group.allreduce([torch.ones(1)]).wait(),
        "synchronous": lambda: group.allreduce([torch.ones(1)], SYNCHRONOUS),
    }
    with pytest.raises(dist.PeerLostError, match="rank 1") as caught:
        calls[what]()
    if what != "busy":
        assert time.time() - float(current_store().get("died")) < 1.0
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
    group = _group(rank, size)
    group.barrier().wait()
    if rank == 0:
        threading.Timer(0.3, group.abort).start()
    options = dist.AllreduceOptions(asyncOp=what == "asynchronous")
    begin = time.monotonic()
    if rank == 2:  # comes too late
        time.sleep(0.5)
    receives = what == "receive" and rank < 2
    call = (
        (lambda: group.recv([torch.empty(1)], 2))
        if receives
        else (lambda: group.allreduce([torch.ones(1)], options))
    )
    with pytest.raises(dist.GroupAbortedError, match="rank 0 aborted it"):
        call().wait()
    assert time.monotonic() - begin < 0.9
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
        released.append(time.monotonic())

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
    begin = time.monotonic()
    group.abort()
    for thread in threads:
        thread.join(10)
    assert len(released) == len(calls)
    assert max(released) - begin < 0.1
    tensor = torch.ones(2)
    other.allreduce([tensor]).wait()  # another group of the process is as good as before
    other.shutdown()
    current_store().set("aborted", "")


@pytest.mark.parametrize("placement", ["aa", "ab"])
def test_abort_releases_every_kind_of_waiter_at_once(placement):
    run_ranks(_abort_all, 2, placement=placement)


# ---- forming a group -------------------------------------------------------------------------------------


def _incomplete(rank, size):
    if rank == 2:
        return
    begin = time.monotonic()
    with pytest.raises(dist.DistError, match="rank 2 did not come within 0:00:01"):
        _group(rank, size, timedelta(seconds=1))
    assert time.monotonic() - begin < 2


def test_rank_that_does_not_come_is_named():
    run_ranks(_incomplete, 3)


def _without_first(rank, size):
    if rank > 0:
        with pytest.raises(dist.CollectiveTimeoutError, match="rank 0 did not publish its address"):
            _group(rank, size, timedelta(seconds=0.5))


def test_missing_rank_0_is_named():
    run_ranks(_without_first, 2)


def _left_over(rank, size):
    store = current_store()
    if rank == 0:
        store.set("host/address", store.get("old").decode() if store.check(["old"]) else _stale_address())
        return
    store.wait(["host/address"])
    with pytest.raises(dist.DistNetworkError, match="left over from another run"):
        ProcessGroupHost(store, rank, size, LIMIT)


def _stale_address():
    from collectives.backends.host_bootstrap import _place

    return json.dumps({"place": _place(), "address": f"collectives-{'0' * 32} {'0' * 32}"})


def test_address_of_a_dead_run_is_recognised():
    run_ranks(_left_over, 2)


def _census():
    """Counts what a group could leave behind in this process."""
    lists = {name: Path(f"/proc/self/{name}") for name in ("fd", "task")}
    counts = {name: len(list(path.iterdir())) for name, path in lists.items()}
    counts["segments"] = Path("/proc/self/maps").read_text().count("memfd:collectives")
    counts["children"] = sum(len(task.read_text().split()) for task in lists["task"].glob("*/children"))
    links = [str(link.readlink()) for link in lists["fd"].iterdir() if link.is_symlink()]
    counts["sockets"] = sum(link.startswith("socket:") for link in links)
    return counts


def _await_census(expected):
    deadline = time.monotonic() + 5
    while _census() != expected and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel shows a thread for a moment after it was joined
    assert _census() == expected


ROUNDS = {"aa": 200, "ab": 40}


def _rounds(rank, size, rounds):
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
    before = _census()
    for _ in range(rounds):
        once()
    _await_census(before)
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
    _await_census(before)


@pytest.mark.parametrize("placement", ["aa", "ab"])
def test_nothing_is_left_of_groups_made_and_ended(placement):
    run_ranks(_rounds, 2, ROUNDS[placement], placement=placement, isolated=True)


def _worlds(rank, size, rounds):
    store = current_store()
    before = None
    for n in range(rounds // 4):
        dist.init_process_group("host", store=PrefixStore(f"world{n}", store), rank=rank, world_size=size)
        subgroup = dist.new_group([0, 1])
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        dist.all_reduce(torch.ones(2), group=subgroup)
        work.wait()
        dist.destroy_process_group()
        before = before or _census()
    _await_census(before)


@pytest.mark.parametrize("placement", ["aa", "ab"])
def test_nothing_is_left_of_worlds_made_and_destroyed(placement):
    run_ranks(_worlds, 2, ROUNDS[placement], placement=placement, isolated=True)


def _memory(group):
    tensor = torch.ones(8 << 20)
    group.allreduce([tensor]).wait()
    received = torch.empty(8 << 20)
    works = [group.send([tensor], 1 - group.rank()), group.recv([received], 1 - group.rank())]
    for work in works:
        work.wait()
    text = Path("/proc/self/smaps").read_text()
    segments = [part for part in text.split("VmFlags") if "memfd:collectives" in part]
    resident = sum(
        int(line.split()[1]) for part in segments for line in part.splitlines() if line[:4] == "Rss:"
    )
    return resident / 1024


def test_memory_beyond_the_tensors_is_small():
    shared = run_ranks(_memory, 2, backend="host")  # both ranks map the same pages
    assert 0 < max(shared) < 2 * 16


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


def test_signal_ends_a_wait(tmp_path):
    body = """
        def raises(call, kind):
            begin = time.monotonic()
            try:
                call()
            except kind:
                assert 0.2 < time.monotonic() - begin < 1.5, time.monotonic() - begin
            else:
                raise AssertionError("not interrupted")

        def soon():
            threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()

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
            time.sleep(0.8)
            group.send([torch.ones(1)], 0).wait()
            time.sleep(0.8)
            group.allreduce([torch.ones(1)]).wait()
            time.sleep(0.9)
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
