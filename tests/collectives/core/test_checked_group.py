"""A group that compares calls, whose store hangs."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
from harness import current_store, run_ranks

import collectives as dist
from collectives.backends.host import ProcessGroupHost
from collectives.core.checked_group import CheckedGroup

LONG = timedelta(seconds=30)


def aborts_while_the_store_hangs(rank, size, function):
    store = current_store()
    if rank == 2:
        served = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        store.set("port", str(served.port))
        store.set("pid", str(os.getpid()))
        store.wait(["done 0", "done 1"], LONG)
        return
    used = dist.TCPStore("localhost", int(store.get("port")), wait_for_workers=False)
    group = CheckedGroup(ProcessGroupHost(used, rank, 2, LONG))
    group.barrier().wait()
    store.set(f"met {rank}", "")
    store.wait(["met 0", "met 1"], LONG)
    server = int(store.get("pid"))
    if rank == 0:
        os.kill(server, signal.SIGSTOP)
        began = time.monotonic()
        try:
            for _ in range(5):
                function(group)
            assert time.monotonic() - began < 3
        finally:
            os.kill(server, signal.SIGCONT)
    else:
        with pytest.raises(dist.GroupAbortedError):
            group.barrier().wait()
    store.set(f"done {rank}", "")


def aborts(group):
    group.abort()


def is_broken(group):
    group._break_for(dist.GroupAbortedError("for this test"))


@pytest.mark.parametrize("function", [aborts, is_broken])
def test_an_abort_does_not_wait_for_the_store(function) -> None:
    run_ranks(aborts_while_the_store_hangs, 3, function, isolated=True, timeout=40.0)
