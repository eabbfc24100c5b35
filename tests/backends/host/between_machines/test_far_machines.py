"""Machines that are far from each other, over IPv6: a round trip takes a tenth of a second."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from far_link import INTERFACE, NETWORK, far_link
from harness import Died, run_ranks
from machines import make_machines  # noqa: F401 - a fixture

import collectives as dist
from collectives.bench.core.namespaces import Machines

pytestmark = pytest.mark.full

ONE_WAY_S = 0.05
LAYOUT = [0, 0, 1, 1]
ENVIRONMENT = {"COLLECTIVES_SOCKET_IFNAME": INTERFACE}


def connections_over_ipv6() -> int:
    """Returns how many connections there are on the link, from this machine's side."""
    group = bytes.fromhex(NETWORK.replace(":", ""))
    begin = int.from_bytes(group, "big").to_bytes(4, "little").hex().upper()  # as the kernel writes words
    lines = Path("/proc/net/tcp6").read_text().splitlines()[1:]
    return sum(line.split()[1].startswith(begin) and line.split()[3] == "01" for line in lines)


def collectives_and_messages(group: dist.ProcessGroup) -> float:
    rank, size = group.rank(), group.size()
    assert connections_over_ipv6() > 0
    for length in (1, 1000, 100_000, 1 << 20):
        x = torch.full((length,), float(rank))
        group.allreduce([x]).wait()
        assert (x == sum(range(size))).all()
        group.broadcast([x.fill_(rank)], size - 1).wait()
        assert (x == size - 1).all()
    outputs = [torch.empty(50_000) for _ in range(size)]
    group.alltoall(outputs, [torch.full((50_000,), 10.0 * rank + other) for other in range(size)]).wait()
    assert [output[-1].item() for output in outputs] == [10.0 * other + rank for other in range(size)]
    sent, got = torch.full((1 << 18,), float(rank)), torch.empty(1 << 18)
    works = [group.send([sent], (rank + 2) % size, 0), group.recv([got], (rank + 2) % size, 0)]
    for work in works:
        work.wait()
    assert (got == (rank + 2) % size).all()
    group.barrier().wait()
    began = time.monotonic()
    group.barrier().wait()
    return time.monotonic() - began


def run_far(make: Callable[..., Machines], body: Callable[..., Any], **options: Any) -> list[Any]:
    machines = make(2)
    about = {"backend": "host", "isolated": True, "machines": (machines, LAYOUT), "env": ENVIRONMENT}
    with far_link(machines, ONE_WAY_S):
        return run_ranks(body, len(LAYOUT), **about, **options)


def test_results_are_right(make_machines):  # noqa: F811
    took = run_far(make_machines, collectives_and_messages)
    assert max(took) >= ONE_WAY_S, "the frames took another way"


def is_killed(group: dist.ProcessGroup) -> None:
    group.barrier().wait()
    if group.rank() == group.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLostError, match=r"rank 3 .*has died"):
        group.allreduce([torch.ones(1 << 20)]).wait()


def test_a_rank_that_dies_is_named(make_machines):  # noqa: F811
    results = run_far(make_machines, is_killed, lost=[3])
    assert isinstance(results[3], Died)


def waits_long(group: dist.ProcessGroup) -> None:
    """A machine that is only far is not taken for one that has gone."""
    x = torch.ones(3)
    for pause in (0.0, 4.0):
        if group.rank() == 0:
            time.sleep(pause)
        group.allreduce([x]).wait()
    assert (x == group.size() ** 2).all()


def test_a_machine_that_is_far_is_not_taken_for_one_that_is_gone(make_machines):  # noqa: F811
    run_far(make_machines, waits_long)
