"""The host backend between machines: ranks with different labels share no memory and talk over loopback.

A *layout* such as ``"aab"`` gives each rank's label, so that ranks 0 and 1 are one machine and rank 2
another.
"""

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
from harness import Died, current_store, run_ranks, run_world
from machines import make_machines  # noqa: F401 - a fixture
from torch.distributed import PrefixStore

import collectives as dist
from collectives import _native
from collectives.backends.host import ProcessGroupHost
from collectives.bench.core.namespaces import INTERFACE

LIMIT = timedelta(seconds=20)
SYNCHRONOUS = dist.AllreduceOptions(asyncOp=False)
LAYOUTS = ["ab", "aabb", "abc", "abbb", "abab"]


@pytest.fixture(autouse=True)
def _no_label_left():
    yield
    assert "COLLECTIVES_HOST_MACHINE" not in os.environ


def _group(rank, layout, name="test", timeout=LIMIT, **environment):
    """Makes a group whose ranks have these labels."""
    names = {"COLLECTIVES_HOST_MACHINE": layout[rank], **environment}
    os.environ.update(names)
    try:
        store = PrefixStore(name, current_store())
        return ProcessGroupHost(store, rank, len(layout), timeout, group_name=name)
    finally:
        for variable in names:
            del os.environ[variable]


# ---- short operations ------------------------------------------------------------------------------------


def _values(rank, count):
    return torch.arange(count, dtype=torch.int64) * 7 + 1000 * rank


def _all_collectives(rank, size, layout):
    group = _group(rank, layout)
    everyone = range(size)
    for number, count in enumerate((0, 1, 11, 12, 300, 4000 // size)):
        root = number % size
        for asynchronous in (False, True):
            total = sum(_values(r, count) for r in everyone)
            tensor = _values(rank, count)
            group.allreduce([tensor], dist.AllreduceOptions(asyncOp=asynchronous)).wait()
            assert torch.equal(tensor, total)
            group.barrier(dist.BarrierOptions(asyncOp=asynchronous)).wait()
        tensor = _values(rank, count)
        group.reduce([tensor], dist.ReduceOptions(rootRank=root)).wait()
        assert torch.equal(tensor, total if rank == root else _values(rank, count))
        tensor = _values(rank, count)
        group.broadcast([tensor], dist.BroadcastOptions(rootRank=root)).wait()
        assert torch.equal(tensor, _values(root, count))
        outputs = [torch.empty(count + r, dtype=torch.int64) for r in everyone]
        group.allgather([outputs], [_values(rank, count + rank)]).wait()
        assert all(torch.equal(outputs[r], _values(r, count + r)) for r in everyone)
        outputs = [torch.empty(count, dtype=torch.int64) for _ in everyone]
        group.gather(
            [outputs] if rank == root else [], [_values(rank, count)], dist.GatherOptions(rootRank=root)
        ).wait()
        assert rank != root or all(torch.equal(outputs[r], _values(r, count)) for r in everyone)
        inputs = [_values(r, count) + 5 * root for r in everyone]
        output = torch.empty(count, dtype=torch.int64)
        group.scatter([output], [inputs] if rank == root else [], dist.ScatterOptions(rootRank=root)).wait()
        assert torch.equal(output, _values(rank, count) + 5 * root)
        inputs = [_values(rank, count // size) + r for r in everyone]
        output = torch.empty(count // size, dtype=torch.int64)
        group.reduce_scatter([output], [inputs]).wait()
        assert torch.equal(output, sum(_values(r, count // size) + rank for r in everyone))
        inputs = [_values(rank, 3 * rank + r) for r in everyone]
        outputs = [torch.empty(3 * r + rank, dtype=torch.int64) for r in everyone]
        group.alltoall(outputs, inputs).wait()
        assert all(torch.equal(outputs[r], _values(r, 3 * r + rank)) for r in everyone)
    report = group.report()
    assert all(f"rank {r} on {socket.gethostname()!r}: " in report for r in everyone)
    group.shutdown()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_short_collectives_between_machines(layout):
    run_ranks(_all_collectives, len(layout), layout)


def _in_flight(rank, size, layout):
    group = _group(rank, layout)
    tensors = [torch.full((5,), float(rank + i)) for i in range(200)]
    works = [group.allreduce([tensor]) for tensor in tensors]
    group.shutdown()  # finishes what was issued
    assert all(work.is_completed() and work.exception() is None for work in works)
    for i, tensor in enumerate(tensors):
        assert tensor[0] == sum(r + i for r in range(size))


def test_many_operations_in_flight_between_machines():
    run_ranks(_in_flight, 4, "aabb")


def _same_machine(rank, size):
    before = len(list(Path("/proc/self/task").iterdir()))
    listening = {port for port in _sockets().values() if port}
    group = _group(rank, "aa")
    group.allreduce([torch.ones(3)], SYNCHRONOUS)
    assert len(list(Path("/proc/self/task").iterdir())) == before
    assert {port for port in _sockets().values() if port} == listening
    assert "on" not in group.report()
    group.shutdown()


def _sockets():
    """Returns the TCP sockets of this process by inode: the port where it listens, else ``None``."""
    own = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(link.readlink()))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in own:
                found[fields[9]] = int(fields[1].rpartition(":")[2], 16) if fields[3] == "0A" else None
    return found


def test_groups_of_one_machine_have_no_thread_and_no_socket():
    run_ranks(_same_machine, 2, isolated=True)


# ---- ranks that disagree ---------------------------------------------------------------------------------


def _disagree(rank, size, layout):
    group = _group(rank, layout)
    ones = torch.ones(4)
    odd = rank == size - 1

    def reduce(tensor, op=dist.ReduceOp.SUM):
        group.allreduce([tensor], dist.AllreduceOptions(asyncOp=False, reduceOp=op)).wait()

    def exchange():
        inputs = [torch.ones(3) for _ in range(size)]
        outputs = [torch.ones(3 + (odd and r == 0)) for r in range(size)]
        group.alltoall(outputs, inputs).wait()

    cases = [
        (lambda: reduce(torch.ones(5) if odd else ones), ["float32, 4 elements", "float32, 5 elements"]),
        (lambda: reduce(torch.ones(300_000 if odd else 4)), ["4 elements", "300000 elements"]),
        (lambda: reduce(ones, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM), ["SUM", "MAX"]),
        (
            lambda: group.broadcast([ones], dist.BroadcastOptions(rootRank=int(odd))).wait(),
            ["root 0", "root 1"],
        ),
        (lambda: group.barrier().wait() if odd else reduce(ones), ["all_reduce", "barrier"]),
        (exchange, [rf"rank 0 sends 12 bytes to rank {size - 1}, which expects 16"]),
    ]
    for call, words in cases:
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            call()
        for word in (*words, *(rf"rank {r} on '.*': " for r in range(size))):
            caught.match(word)
        assert torch.equal(ones, torch.ones(4))
        tensor = torch.ones(3)
        reduce(tensor)  # the group is as good as before
        assert tensor[0] == size
    group.shutdown()


@pytest.mark.parametrize("layout", ["ab", "aabb", "abc"])
def test_ranks_that_disagree_all_raise_a_table_of_all_machines(layout):
    run_ranks(_disagree, len(layout), layout)


# ---- ranks that are late, dead, stopped or gone ----------------------------------------------------------


def _late(rank, size, layout, late):
    group = _group(rank, layout)
    group.barrier().wait()
    if rank == late:
        time.sleep(1.8)
        with pytest.raises(dist.GroupAbortedError, match="broken since an earlier error"):
            group.allreduce([torch.ones(1)], SYNCHRONOUS)
    else:
        options = dist.AllreduceOptions(timedelta(seconds=0.5), False)
        begin = time.monotonic()
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            group.allreduce([torch.ones(5)], options).wait()
        assert 0.45 < time.monotonic() - begin < 1.0
        caught.match(rf"waited for rank {late}")
        for r in range(size):
            doing = (
                r"finished barrier number 1" if r == late
                else r"in all_reduce\(SUM, float32, 5 elements\) number 2, waits for .* in _late"
            )  # fmt: skip
            caught.match(rf"rank {r} on '.*': {doing}")
    group.shutdown()


@pytest.mark.parametrize(("layout", "late"), [("aabb", 2), ("aabb", 3), ("abc", 1)])
@pytest.mark.sampled(1)
def test_time_limit_tells_where_every_rank_of_every_machine_is(layout, late):
    run_ranks(_late, len(layout), layout, late)


def _killed(rank, size, layout, victim, asynchronous):
    group = _group(rank, layout)
    group.barrier().wait()
    store = current_store()
    if rank == victim:
        time.sleep(0.3)
        store.set("died", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(
        dist.PeerLostError, match=rf"rank {victim} on '.*' \(process \d+\) has died"
    ) as caught:
        group.allreduce([torch.ones(1)], dist.AllreduceOptions(asyncOp=asynchronous)).wait()
    passed = time.time() - float(store.get("died"))
    assert passed < (1.0 if layout[rank] == layout[victim] else 3.0)
    assert caught.value.rank == victim
    begin = time.monotonic()
    group.shutdown()
    assert time.monotonic() - begin < 1
    return passed


@pytest.mark.parametrize(
    ("layout", "victim", "asynchronous"),
    [("aabb", 0, False), ("aabb", 1, True), ("aabb", 2, True), ("aabb", 3, False), ("abc", 1, False)],
)
def test_killed_rank_is_named_on_all_machines(layout, victim, asynchronous):
    results = run_ranks(_killed, len(layout), layout, victim, asynchronous, isolated=True, lost=[victim])
    assert results[victim] == Died(-signal.SIGKILL)


def _killed_with_children(rank, size):
    group = _group(rank, "ab")
    group.barrier().wait()
    if rank == 1:
        child = os.fork()
        if child == 0:  # as a data loader's worker does, it holds copies of all that was open
            time.sleep(30)
            os._exit(0)
        current_store().set("child", str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        begin = time.monotonic()
        with pytest.raises(dist.PeerLostError) as caught:
            group.barrier().wait()
        assert caught.value.rank == 1
        assert time.monotonic() - begin < 3
    finally:
        os.kill(int(current_store().get("child")), signal.SIGKILL)


def test_killed_rank_is_noticed_although_its_children_live():
    run_ranks(_killed_with_children, 2, isolated=True, lost=[1])


def _stopped(rank, size):
    group = _group(rank, "abb")
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
    assert tensor[0] == size
    if rank == 0:
        assert time.monotonic() - begin > 4
    group.shutdown()


@pytest.mark.full
def test_stopped_rank_is_not_taken_for_a_dead_one():
    run_ranks(_stopped, 3)


def _leaves(rank, size, layout, leaver):
    group = _group(rank, layout)
    group.barrier().wait()
    if rank == leaver:
        group.shutdown()
        group.shutdown()
        return
    with pytest.raises(dist.PeerLostError, match=rf"rank {leaver} on .* has left the group") as caught:
        group.allreduce([torch.ones(1)], SYNCHRONOUS)
    assert caught.value.rank == leaver
    begin = time.monotonic()
    group.shutdown()
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("leaver", [2, 3])
def test_rank_that_left_is_named_on_all_machines(leaver):
    run_ranks(_leaves, 4, "aabb", leaver)


def _abort(rank, size, aborter):
    group = _group(rank, "aabb")
    group.barrier().wait()
    if rank == aborter:
        threading.Timer(0.3, group.abort).start()
    begin = time.monotonic()
    if rank == 2 and aborter != 2:  # comes too late
        time.sleep(0.6)
    with pytest.raises(dist.GroupAbortedError, match=f"rank {aborter} aborted it"):
        group.allreduce([torch.ones(1)], SYNCHRONOUS if rank % 2 else None).wait()
    passed = time.monotonic() - begin
    assert passed < 0.9
    if rank == aborter:
        assert passed < 0.4
    group.abort()
    group.shutdown()


@pytest.mark.parametrize("aborter", [0, 1])
def test_abort_releases_the_ranks_of_all_machines(aborter):
    run_ranks(_abort, 4, aborter)


# ---- forming and ending a group --------------------------------------------------------------------------


def _census():
    lists = {name: Path(f"/proc/self/{name}") for name in ("fd", "task")}
    counts = {name: len(list(path.iterdir())) for name, path in lists.items()}
    counts["maps"] = Path("/proc/self/maps").read_text().count("memfd:collectives")
    return counts


def _rounds(rank, size, layout, rounds):
    def once(number):
        group = _group(rank, layout, str(number))
        works = [group.allreduce([torch.ones(10)]), group.barrier()]
        for work in works:
            work.wait()
        current_store().set(f"done/{number}/{rank}", "")
        if number % 3 == 2:
            current_store().wait([f"done/{number}/{r}" for r in range(size)])
            group.abort()
        group.shutdown()

    once(-1)
    before = _census()
    for number in range(rounds):
        once(number)
    deadline = time.monotonic() + 5
    while _census() != before and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel shows a thread for a moment after it was joined
    assert _census() == before
    assert before["maps"] == 0


def test_nothing_is_left_of_groups_of_several_machines():
    run_ranks(_rounds, 3, "aab", 12)


def _incomplete(rank, size, layout):
    if rank == 2:
        return
    begin = time.monotonic()
    with pytest.raises(dist.DistError, match="rank 2 did not come within 0:00:01"):
        _group(rank, layout, timeout=timedelta(seconds=1))
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize("layout", ["aab", "abb", "aba"])
def test_rank_that_does_not_come_is_named_on_all_machines(layout):
    run_ranks(_incomplete, 3, layout)


def _strangers(rank, size):
    group = _group(rank, "ab")
    ports = [port for port in _sockets().values() if port]
    assert len(ports) == 1
    before = _census()["fd"]
    for noise in (b"", b"x", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), bytes(64), os.urandom(5000)):
        with socket.create_connection(("127.0.0.1", ports[0])) as knock:
            knock.sendall(noise)
            if len(noise) >= 64:
                knock.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert knock.recv(1) == b""  # turned away without a word
    silent = [socket.create_connection(("127.0.0.1", ports[0])) for _ in range(20)]
    tensor = torch.ones(3)
    group.allreduce([tensor], SYNCHRONOUS)
    assert tensor[0] == 2
    for knock in silent:
        knock.settimeout(5)
        assert knock.recv(1) == b""  # nor does anybody wait for their hello
        knock.close()
    assert _census()["fd"] - before <= 1  # the connection of the meeting
    group.allreduce([tensor], SYNCHRONOUS)
    group.shutdown()


def test_strangers_are_dropped_without_harm():
    run_ranks(_strangers, 2)


# ---- groups within groups --------------------------------------------------------------------------------


def _subgroups(rank, size):
    os.environ["COLLECTIVES_HOST_MACHINE"] = "aabb"[rank]
    try:
        everyone = torch.full((2,), float(rank))
        dist.all_reduce(everyone)
        assert everyone[0] == 6
        across = dist.new_group([1, 2])
        pairs, _ = dist.new_subgroups(2)
        for group, members in ((across, [1, 2]), (pairs, [rank // 2 * 2, rank // 2 * 2 + 1])):
            if rank in members:
                tensor = torch.full((2,), float(rank))
                dist.all_reduce(tensor, group=group)
                assert tensor[0] == sum(members)
        odd = dist.split_group(split_ranks=[[0, 2], [1, 3]])
        tensor = torch.full((2,), float(rank))
        dist.all_reduce(tensor, group=odd)
        assert tensor[0] == (2 if rank % 2 == 0 else 4)
        dist.destroy_process_group()
    finally:
        del os.environ["COLLECTIVES_HOST_MACHINE"]


def test_groups_of_some_ranks_of_some_machines():
    run_world(_subgroups, 4)


# ---- separate networks -----------------------------------------------------------------------------------


def _apart(rank, size):
    group = ProcessGroupHost(current_store(), rank, size, LIMIT, group_name="test")
    tensor = torch.full((7,), float(rank))
    group.allreduce([tensor], SYNCHRONOUS)
    assert tensor[0] == sum(range(size))
    with pytest.raises(dist.CollectiveMismatchError, match=rf"rank {size - 1} on .*: all_reduce"):
        group.allreduce([torch.ones(1 + rank)], SYNCHRONOUS)
    addresses = {address for _, address, loopback in _native.interfaces() if not loopback}
    group.shutdown()
    return sorted(addresses)


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 2)])
def test_machines_with_networks_of_their_own(make_machines, placement):  # noqa: F811
    machines = make_machines(max(placement) + 1)
    size = len(placement)
    addresses = run_ranks(_apart, size, isolated=True, machines=(machines, list(placement)))
    for rank, machine in enumerate(placement):
        assert machines.address(machine) in addresses[rank]


def _vanishes(rank, size):
    group = ProcessGroupHost(current_store(), rank, size, LIMIT, group_name="test")
    group.barrier().wait()
    cut = None
    if rank == 2:
        time.sleep(0.5)
        subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True)
        cut = time.time()
    with contextlib.suppress(dist.PeerLostError):  # what the others sent before may complete it
        group.allreduce([torch.ones(1)], SYNCHRONOUS if rank % 2 else None).wait()
    with pytest.raises(dist.PeerLostError, match=r"rank . on .* cannot be reached any more") as caught:
        group.allreduce([torch.ones(1)], SYNCHRONOUS if rank % 2 else None).wait()
    noticed = time.time()
    assert caught.value.rank == (2 if rank < 2 else 0)
    begin = time.monotonic()
    group.shutdown()
    assert time.monotonic() - begin < 1
    return cut, noticed


@pytest.mark.full
def test_machine_that_vanishes_is_noticed_on_both_sides(make_machines):  # noqa: F811
    machines = make_machines(2)
    results = run_ranks(_vanishes, 4, isolated=True, machines=(machines, [0, 0, 1, 1]))
    cut = results[2][0]
    assert all(noticed - cut < 3 for _, noticed in results)
