"""Who is no rank of a group gets into none of its connections between machines."""

from __future__ import annotations

import os
import resource
import struct
import time

import pytest
import torch
from harness import current_store, run_ranks
from strangers import NOBODY, own_ports, silent_crowd, visit

from collectives import _native
from collectives.backends.host import ProcessGroupHost

SECRET = "a secret that all ranks of this job share"
MAGIC, VERSION, MAIL = 0x636F6C6C65637431, _native.LAYOUT_VERSION, 3


def hello(purpose: int, index: int, version: int = VERSION) -> bytes:
    """Returns what rank 1 says to rank 0 of 2, in clear, with a nonce."""
    return struct.pack("<QQiiiIiI", MAGIC, version, 1, 0, 2, purpose, index, 0) + bytes(1 + 32)


def former_hello(purpose: int, index: int) -> bytes:
    """Returns what was enough where the group's secret lay in the store."""
    return struct.pack("<QQ32siiIi", MAGIC, VERSION, b"0" * 32, 1, 2, purpose, index)


def _attacked(rank: int, size: int, user: int) -> list[bytes]:
    store = current_store()
    others = set(own_ports())
    group = ProcessGroupHost(store, rank, size)
    got = []
    if rank == 0:
        (port,) = set(own_ports()) - others
        attempts = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, hello(MAIL, 1) + bytes(32)]
        attempts += [former_hello(MAIL, 1), hello(MAIL, 1), hello(0, 0) + bytes(64)]
        attempts += [hello(MAIL, 1, VERSION - 1)]
        got = visit(port, *attempts, user=user)
        store.set("attacked", b"")
    store.wait(["attacked"])
    tensor = torch.full((3,), float(rank + 1))
    if rank == 0:  # over the connection that the stranger was after
        group.recv(tensor, 1).wait()
        assert tensor.tolist() == [2.0] * 3
    else:
        group.send(tensor, 0).wait()
    sums = torch.ones(100_000)
    group.allreduce(sums).wait()
    assert sums.eq(size).all()
    group.shutdown()
    return got


@pytest.mark.full
def test_a_stranger_learns_nothing_and_takes_no_slot() -> None:
    got = run_ranks(_attacked, 2, os.getuid(), placement="ab", env={"COLLECTIVES_SECRET": SECRET})[0]
    # A nonce for what looks like a hello, and never a proof.
    assert [len(answer) for answer in got] == [0, 0, 0, 32, 0, 32, 32, 0]
    assert len(set(got[3:4] + got[5:7])) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")
def test_without_a_secret_another_user_is_turned_away_at_once() -> None:
    got = run_ranks(_attacked, 2, NOBODY, placement="ab")[0]
    assert got == [b""] * 8


DESCRIPTORS = 128
CROWD = 200


def _crowded(rank: int, size: int) -> int:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, limits[1]))
    store = current_store()
    others = set(own_ports())
    group = ProcessGroupHost(store, rank, size)
    most = 0
    try:
        if rank == 0:
            (port,) = set(own_ports()) - others
            with silent_crowd(port, CROWD):
                end = time.monotonic() + 1.0  # within the 2 s that a stranger may stay
                while time.monotonic() < end:
                    opened = os.open("/dev/null", os.O_RDONLY)
                    os.close(opened)
                    most = max(most, opened)
                    time.sleep(0.01)
                store.set("crowded", b"")
                group.recv(torch.empty(3), 1).wait()  # on a connection that is made meanwhile
        else:
            store.wait(["crowded"])
            group.send(torch.ones(3), 0).wait()
        group.barrier().wait()
    finally:
        group.shutdown()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return most


def test_strangers_leave_descriptors_to_the_application() -> None:
    most = run_ranks(_crowded, 2, placement="ab", env={"COLLECTIVES_SECRET": SECRET})[0]
    # A quarter is the application's, less what the connection that is being judged takes for a moment: its
    # own descriptor, and the one it moves to where the application was first to take a closed stranger's.
    assert 0 < most <= DESCRIPTORS * 3 // 4 + 2


def _keys_after_forming(rank: int, size: int) -> list[str]:
    store = current_store()
    group = ProcessGroupHost(store, rank, size)
    group.barrier().wait()
    keys = [key for key in store.list_keys() if "host/" in key]
    group.barrier().wait()
    group.shutdown()
    return keys


@pytest.mark.parametrize("secret", [SECRET, None])
def test_neither_keys_nor_addresses_stay_in_the_store(secret: str | None) -> None:
    keys = run_ranks(_keys_after_forming, 3, placement="aab", env={"COLLECTIVES_SECRET": secret})
    assert keys == [[], [], []]
