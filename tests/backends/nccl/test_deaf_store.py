"""Time limits over NCCL's double where the store does not answer."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from conformance.test_works import eventually, gate
from nccl_double.groups import make_group, run_over_double
from store_server import store_server

from collectives import CollectiveTimeoutError, GroupAbortedError, ProcessGroup
from collectives.store import TCPStore

PATIENCE = timedelta(minutes=10)  # of the store's client, beyond the limit of the test


def alone(group: ProcessGroup, path: Path, port: int, server: int) -> None:
    """An operation that the other rank does not take part in, while the store's process is stopped."""
    store = TCPStore("127.0.0.1", port, timeout=PATIENCE)
    rank = group.rank()
    other = make_group(path, "cupy", rank, 2, store, timeout=timedelta(seconds=2), group_name="deaf")
    other.allreduce(torch.ones(1)).wait()
    other.barrier().wait()
    gate("connected", group)
    if rank == 0:
        os.kill(server, signal.SIGSTOP)
        try:
            work = other.allreduce(torch.ones(2))
            assert eventually(lambda: work.exception() is not None), "the limit waits for the store"
            with pytest.raises(
                CollectiveTimeoutError, match=r"all_reduce #\d+ .*passed its time limit of 2 s"
            ):
                work.wait(timedelta(seconds=30))
            with pytest.raises(GroupAbortedError, match="first cause"):
                other.allreduce(torch.ones(1))
        finally:
            os.kill(server, signal.SIGCONT)
    gate("over", group)
    other.abort()


def test_time_limits_hold_without_the_store(nccl_library: Path) -> None:
    with store_server() as server:
        pid = int(server.evaluate("os.getpid()"))
        run_over_double(alone, 2, nccl_library, nccl_library, server.port, pid, timeout=60)
