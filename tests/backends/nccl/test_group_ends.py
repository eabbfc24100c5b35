"""How groups end: several of them, of other ranks, with messages, split off, broken by one; over the double.

NCCL's orderly end waits for all ranks of a communicator.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from conformance.test_works import eventually, gate
from harness import current_store
from nccl_double.groups import load, logged, make_group, register_over_double, run_over_double

import collectives
from collectives import DistBackendError, DistStoreError
from collectives.backends.nccl import communicators

LIMIT = timedelta(seconds=15)


def another(group: Any, path: Path, name: str) -> Any:
    """Returns a group of the same ranks that has a communicator of all of them and one for each pair."""
    rank, size = group.rank(), group.size()
    store = torch_dist.PrefixStore(name, group.get_group_store())
    made = make_group(path, "cupy", rank, size, store, group_name=name)
    made.allreduce(torch.ones(1)).wait()
    with made._together():
        sent = made.send(torch.ones(2), (rank + 1) % size)
        received = made.recv(torch.empty(2), (rank - 1) % size)
    received.wait()
    sent.wait()
    made.barrier().wait()
    return made


def ending() -> list[threading.Thread]:
    """Returns the threads that still end communicators."""
    return [thread for thread in threading.enumerate() if thread.name == "nccl destroy"]


def aborting() -> list[threading.Thread]:
    """Returns the threads that wait for a group to be aborted, and give its streams back at its end."""
    return [thread for thread in threading.enumerate() if thread.name == "nccl abort"]


def one_after_the_other(group: Any, path: Path) -> None:
    """No rank waits longer than until the last has come, and says nothing."""
    groups = [another(group, path, name) for name in ("first", "second", "third")]
    with logged(logging.WARNING) as told:
        for one in groups:
            one.shutdown()
        assert not ending()
    assert told == []
    assert load(path).communicators() == 0


def in_other_orders(group: Any, path: Path) -> None:
    """Each rank goes on with its next group after a while, so that all end."""
    before = len(aborting())
    groups = [another(group, path, name) for name in ("first", "second")]
    communicators._END_SECONDS = 0.5
    with logged(logging.WARNING) as told:
        for one in groups if group.rank() else reversed(groups):
            one.shutdown()
    store = group.get_group_store()
    if any("has not ended its communicators" in text for text in told):
        store.set(f"told/{group.rank()}", "")
    gate("ended", group)  # a rank that comes late may find all others on their way to its group
    keys = [f"told/{rank}" for rank in range(group.size())]
    assert any(store.check([key]) for key in keys), "the order is of no account"
    assert eventually(lambda: not ending() and load(path).communicators() == 0)
    assert eventually(lambda: len(aborting()) == before)


def beside_one_that_aborts(group: Any, path: Path) -> None:
    made = another(group, path, "aborted by rank 1")
    with logged(logging.WARNING) as told:
        made.abort() if group.rank() == 1 else made.shutdown()
        assert not ending()
    assert told == []
    assert load(path).communicators() == 0


def of_a_world(group: Any, path: Path) -> None:
    """Groups of other ranks, of which each ends by itself, and the rest with the world."""
    rank, size = group.rank(), group.size()

    register_over_double("nccl_over_double", path)
    for bound in (None, torch.device("cpu")):
        store = torch_dist.PrefixStore(f"world on {bound}", group.get_group_store())
        world = {"store": store, "rank": rank, "world_size": size, "device_id": bound}
        collectives.init_process_group("nccl_over_double", **world)
        pairs = [[one, other] for one in range(size) for other in range(one + 1, size)]
        groups = [collectives.new_group(ranks) for ranks in [list(range(size)), *pairs]]
        mine = [one for one in groups if one is not collectives.GroupMember.NON_GROUP_MEMBER]
        for one in mine:
            collectives.all_reduce(torch.ones(1), group=one)
        collectives.barrier()
        with logged(logging.WARNING) as told:
            if rank < 2:
                collectives.destroy_process_group(mine[1])  # that of ranks 0 and 1
            collectives.destroy_process_group()
            assert not ending()
        assert told == []
        assert load(path).communicators() == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "body", [one_after_the_other, in_other_orders, beside_one_that_aborts, of_a_world],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_groups_end(nccl_library: Path, body: Any, size: int) -> None:
    run_over_double(body, size, nccl_library, nccl_library, timeout=100)


def heard_of_before_the_abort(group: Any, path: Path) -> None:
    """The abort of this rank, which may take its time, holds back no news for the others."""
    double = load(path)
    group.allreduce(torch.ones(1)).wait()
    if group.rank() == 1:
        with pytest.raises(
            DistBackendError, match=r"rank 0 gave up: its all_reduce #2 failed.*ordered by a test"
        ):
            group.allreduce(torch.ones(3)).wait(LIMIT)
        current_store().set("heard", "")
        return
    communicators._END_SECONDS = 2 * LIMIT.total_seconds()
    (communicator,) = group._communicators.open()
    handle = communicator.handle
    double.hold_in_graph(handle, True)
    heard: list[bool] = []

    def let_go() -> None:
        with suppress(DistStoreError):
            current_store().wait(["heard"], LIMIT)
            heard.append(True)
        double.hold_in_graph(handle, False)

    waits = threading.Thread(target=let_go)
    waits.start()
    double.fail_next("ncclAllReduce", 3, "ordered by a test")
    with pytest.raises(DistBackendError, match="ordered by a test"):
        group.allreduce(torch.ones(3))
    waits.join()
    assert heard, "the other rank had not heard when the abort was let go"


def test_the_others_hear_before_the_abort(nccl_library: Path) -> None:
    run_over_double(heard_of_before_the_abort, 2, nccl_library, nccl_library)
