"""The host backend between machines: ranks with different labels share no memory and talk over loopback.

A layout such as ``"aab"`` is the placement of :func:`harness.run_ranks`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from census import census, growth
from harness import current_store, run_ranks, run_world
from machines import make_machines  # noqa: F401 - a fixture
from strangers import own_ports
from torch.distributed import PrefixStore

import collectives as dist
from collectives import _native
from collectives.backends.host import ProcessGroupHost

LIMIT = timedelta(seconds=20)
SYNCHRONOUS = dist.AllreduceOptions(asyncOp=False)


def _group(rank, size, name="test", timeout=LIMIT):
    return ProcessGroupHost(PrefixStore(name, current_store()), rank, size, timeout, group_name=name)


# ---- short operations ------------------------------------------------------------------------------------


def _in_flight(rank, size):
    group = _group(rank, size)
    report = group.report()
    assert all(f"rank {r} on {socket.gethostname()!r}: " in report for r in range(size))
    tensors = [torch.full((5,), float(rank + i)) for i in range(200)]
    works = [group.allreduce([tensor]) for tensor in tensors]
    group.shutdown()  # finishes what was issued
    assert all(work.is_completed() and work.exception() is None for work in works)
    for i, tensor in enumerate(tensors):
        assert tensor[0] == sum(r + i for r in range(size))


def test_many_operations_in_flight_between_machines():
    run_ranks(_in_flight, 4, placement="aabb")


def _same_machine(rank, size):
    before = len(list(Path("/proc/self/task").iterdir()))
    listening = {port for port in _sockets().values() if port}
    group = _group(rank, size)
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
    run_ranks(_same_machine, 2, isolated=True, placement="aa")


# ---- forming and ending a group --------------------------------------------------------------------------


def _rounds(rank, size, rounds):
    def once(number):
        group = _group(rank, size, str(number))
        works = [group.allreduce([torch.ones(10)]), group.barrier()]
        for work in works:
            work.wait()
        current_store().set(f"done/{number}/{rank}", "")
        if number % 3 == 2:
            current_store().wait([f"done/{number}/{r}" for r in range(size)])
            group.abort()
        group.shutdown()

    once(-1)
    before = census()
    for number in range(rounds):
        once(number)

    assert not growth(before)
    assert before["segments"] == 0


def test_nothing_is_left_of_groups_of_several_machines():
    run_ranks(_rounds, 3, 12, placement="aab")


def _incomplete(rank, size):
    if rank != 2:
        with pytest.raises(dist.DistError, match="rank 2 did not come within 1 s"):
            _group(rank, size, timeout=timedelta(seconds=1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["aaa", "aab", "abb", "aba"])
def test_rank_that_does_not_come_is_named_on_all_machines(layout):
    run_ranks(_incomplete, 3, placement=layout)


def _strangers(rank, size):
    others = set(own_ports())  # of groups before, which a Python without a GIL may collect later
    group = _group(rank, size)
    (port,) = set(own_ports()) - others
    before = census()["descriptors"]
    for noise in (b"", b"x", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), bytes(64), os.urandom(5000)):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(noise)
            if len(noise) >= 64:
                stranger.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""  # turned away without a word
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    tensor = torch.ones(3)
    group.allreduce([tensor], SYNCHRONOUS)
    assert tensor[0] == 2
    for stranger in silent:
        stranger.settimeout(5)
        assert stranger.recv(1) == b""  # nor does anybody wait for their hello
        stranger.close()
    assert census()["descriptors"] - before <= 1  # the connection of the rendezvous
    group.allreduce([tensor], SYNCHRONOUS)
    group.shutdown()


def test_strangers_are_dropped_without_harm():
    run_ranks(_strangers, 2, placement="ab")


# ---- groups within groups --------------------------------------------------------------------------------


def _subgroups(rank, size):
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


def test_groups_of_some_ranks_of_some_machines():
    run_world(_subgroups, 4, placement="aabb")


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
