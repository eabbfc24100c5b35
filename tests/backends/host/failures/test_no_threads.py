"""Operations that need a thread which the system does not give."""

from __future__ import annotations

import pytest
import torch
from harness import current_store, run_world
from no_threads import no_threads

import collectives as dist

COUNT = 2_000_000
"""More than a ring holds, so that a message of it cannot leave at once."""


def refused(rank: int, size: int, placement: str) -> None:
    """They have not begun, and begin once there is one."""
    store = current_store()
    x = torch.full((COUNT,), 1.0 + rank)
    if rank == 0:
        store.wait(["refused"])
    else:
        with no_threads():
            for operation in (
                lambda: dist.all_reduce(x, async_op=True),
                lambda: dist.irecv(x, 0),
                lambda: dist.isend(x, 0),
            ):
                with pytest.raises(dist.DistBackendError, match=r"no thread could be started.*ulimit -u"):
                    operation()
            x.fill_(7.0)
        store.set("refused", "x")
    if rank == 0:
        if placement == "aa":  # a part had left; between machines, there is no connection yet
            got = torch.empty(COUNT)
            dist.recv(got, 1)
            assert got.eq(2.0).all()
        dist.isend(x, 1).wait()
    else:
        dist.irecv(x, 0).wait()
        assert x.eq(1.0).all()
    dist.all_reduce(x, async_op=True).wait()
    assert x.eq(2.0).all()


@pytest.mark.parametrize("placement", ["aa", "ab"])
def test_asynchronous_operations_without_a_thread(placement: str) -> None:
    run_world(refused, 2, placement, isolated=True, placement=placement)


def blocking(rank: int, size: int) -> None:
    """Blocking messages need no thread."""
    x = torch.full((COUNT,), 1.0 + rank)
    got = torch.empty(COUNT)
    with no_threads():
        if rank == 0:
            dist.send(x, 1)
            dist.recv(got, 1)
        else:
            dist.recv(got, 0)
            dist.send(x, 0)
        dist.all_reduce(x)
    assert got.eq(2.0 - rank).all()
    assert x.eq(3.0).all()


def test_blocking_operations_without_a_thread() -> None:
    run_world(blocking, 2, isolated=True)
