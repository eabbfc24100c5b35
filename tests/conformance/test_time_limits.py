"""Numbers are no time limits, of operations, waits and groups; each refusal comes before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from harness import run_ranks

from collectives import ProcessGroup, Work
from collectives.core.types import AllreduceOptions

WRONG = (5, 0, 2.5, float("inf"), True, "5", torch.ones(1))


def works(group: ProcessGroup) -> list[Work]:
    """Works of every kind that a group has, done or about to be."""
    me, size = group.rank(), group.size()
    begun = [
        group.allreduce(torch.ones(4)),
        group.allreduce(torch.ones(4, 4)[:, 1]),
        group.allgather([torch.empty(4) for _ in range(size)], torch.ones(4)),
        group.allreduce_coalesced([torch.ones(2), torch.ones(3, dtype=torch.float64)]),
        group.barrier(),
        group.allreduce([torch.ones(4)], AllreduceOptions(asyncOp=False)),
    ]
    if not group.needs_batches:
        begun.append(group.send(torch.ones(2), (me + 1) % size))
        begun.append(group.recv(torch.empty(2), (me - 1) % size))
    return begun


def numbers(group: ProcessGroup) -> None:
    x = torch.ones(2)
    begun = works(group)
    takers: list[Callable[[Any], object]] = [
        lambda limit: group.allreduce(x, timeout=limit),
        lambda limit: group.allreduce([x], AllreduceOptions(timeout=limit)),
        lambda limit: group.barrier(timeout=limit),
        group.monitored_barrier,
        group.set_timeout,
        *(work.wait for work in begun),
    ]
    before = group.timeout
    for turn, take in enumerate(takers):
        for wrong in WRONG:
            if turn % group.size() == group.rank() or turn > 4:
                with pytest.raises(TypeError, match=r"timeout must be a datetime\.timedelta, but is "):
                    take(wrong)
    with pytest.raises(ValueError, match="timeout must be positive, but is -1"):
        group.set_timeout(timedelta(seconds=-1))
    for work in begun:
        assert work.wait(timedelta(0))
    for work in begun:
        assert work.wait(timedelta(minutes=1))  # on a device, wait(0) waits for no end
        for limit in (timedelta(seconds=-1), timedelta.max, None):
            assert work.wait(limit)
    assert group.timeout == before
    group.set_timeout(timedelta.max)
    group.allreduce(x, timeout=timedelta.max).wait()
    group.monitored_barrier()
    group.set_timeout(before)
    assert x.tolist() == [group.size()] * 2


def test_numbers(backend: str) -> None:
    run_ranks(numbers, 2, backend=backend)
