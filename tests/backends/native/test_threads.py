"""Threads of one process that use the core at the same time, which without a GIL they really do."""

from __future__ import annotations

import socket
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from harness import run_world

import collectives as dist
from collectives import _native
from collectives.store import TCPStore

LIMIT = timedelta(seconds=60)
GROUPS = 4
ROUNDS = 150


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this interpreter has a GIL")
def test_the_core_leaves_the_gil_off():
    program = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("_native", {_native.__file__!r})
spec.loader.exec_module(module_from_spec(spec))
assert not sys._is_gil_enabled()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def _all_operations(group, lane):
    """Issues operations of all paths into the core, and compares what comes of them."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for turn in range(ROUNDS):
        mine = torch.full((64,), float(rank + lane + turn))
        expected = [torch.full((64,), float(r + lane + turn)) for r in range(size)]
        gathered = [torch.empty(64) for _ in range(size)]
        work = dist.all_gather(gathered, mine, group=group, async_op=True)
        total = mine.clone()
        dist.all_reduce(total, group=group)
        work.wait()
        assert torch.equal(total, torch.stack(expected).sum(0))
        assert all(map(torch.equal, gathered, expected))
        dist.all_gather(gathered, mine, group=group)
        assert all(map(torch.equal, gathered, expected))
        came = torch.empty(64)
        receive = dist.irecv(came, (rank - 1) % size, group=group)
        dist.send(mine, (rank + 1) % size, group=group)
        receive.wait()
        assert torch.equal(came, expected[(rank - 1) % size])


def _operations_of_all_groups(rank, size):
    groups = [dist.new_group() for _ in range(GROUPS)]
    with ThreadPoolExecutor(GROUPS) as threads:
        list(threads.map(_all_operations, groups, range(GROUPS)))


def test_each_thread_has_a_group():
    run_world(_operations_of_all_groups, 2)


def test_two_threads_end_a_server_that_others_use():
    """Without its lock the two would wait for one thread's end, and one of them for ever."""
    for _ in range(20):
        server = _native.StoreServer([socket.create_server(("127.0.0.1", 0)).detach()], 1 << 20)
        begun = threading.Barrier(4)

        def use(ends, server=server, begun=begun):
            begun.wait()
            while server.running:
                if ends:
                    server.stop()
                assert server.connections >= 0
                assert server.waiting >= 0
                _native.StoreLocalConnection(server)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(use, [False, False, True, True]))


def test_threads_count_in_one_store():
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT)
    client = TCPStore("127.0.0.1", store.port, timeout=LIMIT)

    users, times = [store] * 8 + [client], 10_000

    def count(user):
        return [user.add("n", 1) for _ in range(times)]

    with ThreadPoolExecutor(len(users)) as threads:
        counted = [one for some in threads.map(count, users) for one in some]
    assert sorted(counted) == list(range(1, len(users) * times + 1))
    client.close()
    store.close()
