"""A group that one rank broke is connected anew, in place, by all of its ranks."""

from __future__ import annotations

import contextlib

import pytest
import torch
from harness import current_store, run_ranks

from collectives import DistError, GroupAbortedError

ROUNDS = 3


def wait_for_sums(group, tensors, works):
    """Issues a sum of each tensor, as long as that is possible, and waits for them."""
    for tensor in tensors:
        works.append(group.allreduce([tensor]))
    for work in works:
        work.wait()
    group.to_host(tensors[0])


def broken_and_renewed(group):
    """Breaks the group on one rank, each time another, while the others wait in several operations."""
    rank, size = group.rank(), group.size()
    for number in range(ROUNDS):
        total = torch.ones(2000)
        group.allreduce([total]).wait()
        assert group.to_host(total).tolist() == [size] * 2000
        store = current_store()  # all have the sum before one of them breaks the group
        store.set(f"summed {number} {rank}", "")
        store.wait([f"summed {number} {other}" for other in range(size)])
        tensors, works = [torch.ones(1000) for _ in range(3)], []
        if rank == number % size:
            group._break_for(GroupAbortedError("gives up", rank, operation="communication_hook"))
        else:
            with pytest.raises(DistError, match="gives up"):
                wait_for_sums(group, tensors, works)
        cause = group._first_cause()
        assert (cause.operation, cause.rank) == ("communication_hook", number % size)
        with pytest.raises(GroupAbortedError):
            group.barrier().wait()
        group._renew()
        for work in works:  # of the time before
            with contextlib.suppress(DistError):
                work.wait()
        assert group._first_cause() is None
    outputs = [torch.zeros(1) for _ in range(size)]
    group.allgather([outputs], [torch.tensor([float(rank)])]).wait()
    assert [group.to_host(output).item() for output in outputs] == list(range(size))
    if not group.needs_batches:
        received = torch.zeros(1, dtype=torch.int64)
        works = [
            group.send([torch.tensor([rank])], (rank + 1) % size),
            group.recv([received], (rank - 1) % size),
        ]
        for work in works:
            work.wait()
        assert received.item() == (rank - 1) % size
    group.barrier().wait()


def test_a_broken_group_is_connected_anew(backend) -> None:
    run_ranks(broken_and_renewed, 3, backend=backend)
