"""Connections between machines that the network resets, as firewalls do, while both ranks live."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from conformance.test_works import gate
from harness import Died, current_store, run_ranks

import collectives as dist

PATIENCE = 15.0

_libc = ctypes.CDLL(None)
_UNSPECIFIED = bytes(16)
"""An address of no family: a socket that connects to it ends its connection with a reset."""


def reset_connections() -> int:
    """Resets this process's TCP connections, but for those with its stores; returns how many."""
    store = current_store()
    store.set("here", "")
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    count = 0
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        try:
            with socket.socket(fileno=os.dup(number)) as found:
                peer = found.getpeername() if found.type == socket.SOCK_STREAM else ()
        except OSError:
            continue
        if isinstance(peer, tuple) and len(peer) >= 2 and peer[1] != store.port:
            assert _libc.connect(number, _UNSPECIFIED, len(_UNSPECIFIED)) == 0, os.strerror(
                ctypes.get_errno()
            )
            count += 1
    return count


def adds_up(group: dist.ProcessGroup) -> None:
    for count in (3, 300_000):
        x = torch.full((count,), group.rank() + 1.0)
        group.allreduce(x).wait()
        assert x.unique().tolist() == [sum(range(1, group.size() + 1))]


def goes_on(group: dist.ProcessGroup, times: int, victim: int) -> float:
    """The control connection is reset and made again; it still tells of a rank that dies."""
    for turn in range(times):
        gate(f"before{turn}", group)
        if group.rank() == turn % group.size() and group.rank() in {0, 2}:  # the leaders
            assert reset_connections() >= 1  # two where both ends have made it again
        gate(f"after{turn}", group)
        time.sleep(1.5)
        assert group.lost_ranks() == []
    adds_up(group)
    if group.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(dist.PeerLostError) as info:
        group.barrier().wait()
    assert info.value.rank == victim, info.value
    return time.monotonic() - began


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", [0, 2, 3])
def test_a_control_connection_that_is_reset_is_made_again(victim: int) -> None:
    results = run_ranks(goes_on, 4, 3, victim, backend="host", isolated=True, lost=[victim], placement="aabb")
    assert results[victim] == Died(-signal.SIGKILL)
    assert max(took for rank, took in enumerate(results) if rank != victim) < PATIENCE


def loses_all(group: dist.ProcessGroup) -> str:
    """All connections are reset within an operation: that ends, and no rank is said to have died."""
    adds_up(group)
    gate("before", group)
    if group.rank() == 1:
        time.sleep(0.3)
        assert reset_connections() >= 2
        time.sleep(3.0)
    with contextlib.suppress(dist.DistError):  # what was sent before may complete it
        adds_up(group)
    with pytest.raises(dist.DistError) as info:
        adds_up(group)
    return f"{type(info.value).__name__}: {info.value}"


def test_a_reset_of_all_connections_is_told_as_such() -> None:
    for rank, text in enumerate(run_ranks(loses_all, 2, backend="host", isolated=True, placement="ab")):
        assert text.startswith(("DistNetworkError", "GroupAbortedError")), text
        assert "has lost its connection with rank" in text, text
        assert "has died" not in text, text
        assert f"[rank {rank}]" in text
