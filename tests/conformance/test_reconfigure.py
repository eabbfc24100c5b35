"""A group takes other members: some leave, some come, whatever happened to it before."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import pytest
import torch
from harness import current_store, run_ranks
from machines import make_machines  # noqa: F401 - a fixture
from worlds import meet

import collectives as dist
from collectives.backends.host import rendezvous

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=0.3)


def handles_of(store, name, group, rank, members):
    """Returns the handles of the members, in their order; called by these."""
    store.set(f"{name}/{rank}", group.reconfigure_handle())
    return [store.get(f"{name}/{member}").decode() for member in members]


def total(group, count=1000):
    tensor = torch.full((count,), float(group.rank() + 1))
    group.allreduce([tensor]).wait()
    assert tensor.eq(tensor[0]).all()
    return tensor[0].item()


def uses_all(group):
    """Sums, gathers, sends and meets."""
    rank, size = group.rank(), group.size()
    assert total(group) == total(group, 1_000_000) == size * (size + 1) / 2
    gathered = [torch.zeros(1) for _ in range(size)]
    group.allgather([gathered], [torch.tensor([float(rank)])]).wait()
    assert [tensor.item() for tensor in gathered] == list(range(size))
    received = torch.zeros(1, dtype=torch.int64)
    works = [group.send([torch.tensor([rank])], (rank + 1) % size, 0)] if size > 1 else []
    if size > 1:
        works.append(group.recv([received], (rank - 1) % size, 0))
        for work in works:
            work.wait()
        assert received.item() == (rank - 1) % size
    group.monitored_barrier(LONG)
    group.barrier().wait()


def changes_members(group):
    rank, size, store = group.rank(), group.size(), current_store()
    handles = handles_of(store, "all", group, rank, range(size))
    uses_all(group)
    meet("begun", rank, range(size))
    if rank != 1:
        group.reconfigure("without 1", [handles[0], *handles[2:]])
        assert (group.rank(), group.size(), group.generation) == (max(rank - 1, 0), size - 1, 1)
        uses_all(group)
    meet("shrunk", rank, range(size))
    if rank == 1:
        with pytest.raises(dist.GroupAbortedError, match=r"rank \d reconfigures the group, as without 1"):
            total(group)
        group.reconfigure("alone", [handles[1]])
        uses_all(group)
    meet("alone", rank, range(size))
    group.reconfigure("turned", handles[::-1])
    assert (group.rank(), group.size()) == (size - 1 - rank, size)
    assert group.reconfigure_handle() == handles[rank]
    uses_all(group)
    # Each half is one of its own, and the two merge again. Who leaves breaks what others may still be in.
    meet("turned", rank, range(size))
    half = handles[: size // 2] if rank < size // 2 else handles[size // 2 :]
    group.reconfigure(f"half {rank // (size // 2)}", half)
    uses_all(group)
    group.reconfigure(7, handles)
    assert (group.rank(), group.size()) == (rank, size)
    uses_all(group)


@pytest.mark.parametrize("backend", ["host", "round_robin"])
def test_members_leave_and_come_back(backend) -> None:
    run_ranks(changes_members, 4, backend=backend)


def test_members_of_several_machines_leave_and_come_back() -> None:
    run_ranks(changes_members, 4, backend="host", placement="aabb")


def test_members_leave_and_come_back_where_calls_are_compared() -> None:
    run_ranks(changes_members, 4, backend="host", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


@pytest.mark.full
def test_members_of_machines_leave_and_come_back(make_machines) -> None:  # noqa: F811
    machines = make_machines(2, "1gbit")
    run_ranks(changes_members, 4, backend="host", isolated=True, machines=(machines, [0, 0, 1, 1]))


def a_set_of_handles(group):
    rank, size, store = group.rank(), group.size(), current_store()
    handles = handles_of(store, "all", group, rank, range(size))
    group.reconfigure(1, set(handles))
    assert group.rank() == sorted(handles).index(handles[rank])
    uses_all(group)


def test_the_order_of_a_set_is_chosen() -> None:
    run_ranks(a_set_of_handles, 3, backend="host")


def in_the_middle_of_operations(group):
    """Rank 0 reconfigures the group while the others wait for it."""
    rank, size, store = group.rank(), group.size(), current_store()
    handles = handles_of(store, "all", group, rank, range(size))
    if rank == 0:
        meet("about to wait", rank, range(size))
    else:
        works = [group.allreduce([torch.ones(100_000)]) for _ in range(3)]
        works.append(group.recv([torch.ones(5)], 0, 0))
        meet("about to wait", rank, range(size))
        with pytest.raises(dist.GroupAbortedError, match="rank 0 reconfigures the group, as now"):
            group.barrier().wait() if rank == 1 else works[0].wait()
        for work in works:
            with pytest.raises(dist.GroupAbortedError, match="rank 0 reconfigures the group, as now"):
                work.wait()
    group.reconfigure("now", handles)
    uses_all(group)


@pytest.mark.parametrize("placement", ["aaa", "aab"])
def test_operations_in_flight_raise_an_error_that_says_so(placement) -> None:
    run_ranks(in_the_middle_of_operations, 3, backend="host", placement=placement)


def whatever_happened(group):
    rank, size, store = group.rank(), group.size(), current_store()
    handles = handles_of(store, "all", group, rank, range(size))
    if rank == 0:
        group.abort()
    meet("aborted", rank, range(size))
    with pytest.raises(dist.GroupAbortedError):
        total(group)
    group.reconfigure("after an abort", handles)
    uses_all(group)
    group.set_timeout(SHORT)
    if rank != 1:
        with pytest.raises(dist.CollectiveTimeoutError):
            total(group)
    meet("timed out", rank, range(size))
    group.set_timeout(LONG)
    group.reconfigure("after a time limit", handles, LONG)
    uses_all(group)
    if rank != 1:
        with pytest.raises(dist.CollectiveTimeoutError, match="rank 1 did not come") as late:
            group.reconfigure("without rank 1, which does not know", handles, SHORT)
        assert late.value.missing_ranks == (1,)
        assert (group.rank(), group.size()) == (rank, size)
        with pytest.raises(dist.GroupAbortedError):
            total(group)
    meet("missed", rank, range(size))
    with contextlib.suppress(dist.DistError):
        total(group)
    group.reconfigure("after a failure to reconfigure", handles)
    uses_all(group)
    assert group.timeout == LONG


def test_a_group_is_usable_again_whatever_happened_to_it() -> None:
    run_ranks(whatever_happened, 3, backend="host")


def wrong_arguments(group):
    rank, size, store = group.rank(), group.size(), current_store()
    handles = handles_of(store, "all", group, rank, range(size))
    form, text, proof = handles[1].split(".")
    for error, words, arguments in (
        (TypeError, "uuid must be an int or a str, but is 1.5", (1.5, handles)),
        (TypeError, "uuid must be an int or a str, but is True", (True, handles)),
        (ValueError, "uuid must have 1 to 200 characters, but has 0", ("", handles)),
        (TypeError, "handles must be a list of str", (1, handles[0])),
        (TypeError, "handle 1 is 7", (1, [handles[0], 7])),
        (ValueError, "handles is empty", (1, [])),
        (ValueError, "is none of this version", (1, [*handles, "gloo:1:-1:1:"])),
        (ValueError, r"the handles \[0, 2\] are the same", (1, [handles[0], handles[1], handles[0]])),
        (ValueError, "is not part of the 1 handles", (1, [handles[1 - rank]])),
        (dist.DistBackendError, "handle 0 is not proved", (1, [f"{form}.{text}.{proof}0", handles[0]])),
        (ValueError, "handle 0 cannot be read", (1, [f"{form}.AAAA.", handles[0]])),
        (ValueError, "timeout", (1, handles, timedelta(0))),
    ):
        with pytest.raises(error, match=words):
            group.reconfigure(*arguments)
    uses_all(group)  # nothing has changed
    group.reconfigure(1, handles)
    with pytest.raises(dist.DistBackendError, match="the uuid 1 was already used"):
        group.reconfigure(1, handles)
    uses_all(group)


def test_wrong_arguments_change_nothing() -> None:
    run_ranks(wrong_arguments, 2, backend="host")


def different_handles(group):
    rank, size, store = group.rank(), group.size(), current_store()
    handles = handles_of(store, "all", group, rank, range(size))
    mine = handles if rank != 2 else [handles[0], handles[2], handles[1]]
    with pytest.raises(dist.CollectiveMismatchError, match="give all members the same list"):
        group.reconfigure(1, mine)
    group.reconfigure(2, handles)
    uses_all(group)


def test_members_that_were_given_different_handles_all_raise() -> None:
    """Rank 2 takes rank 1's place, where one of both is the last to come."""
    run_ranks(different_handles, 3, backend="host")


def cannot(group):
    for call in (group.reconfigure_handle, lambda: group.reconfigure(1, ["a handle"])):
        with pytest.raises(
            dist.UnsupportedOperationError, match="cannot give a group other members, as host and round_robin"
        ):
            call()
    assert not group.supports_reconfigure
    group.barrier().wait()


def test_a_backend_that_cannot_says_so() -> None:
    run_ranks(cannot, 2, backend="gloo")
    run_ranks(cannot, 2, backend="round_robin", pg_options={"backend": "gloo"})


def fails_halfway(group):
    """Rank 1 fails in its second lane, when the first one has its new members."""
    rank, size, store = group.rank(), group.size(), current_store()
    handles = handles_of(store, "all", group, rank, range(size))
    share_memory, formed = rendezvous._Forming.share_memory, []

    def fails(forming):
        formed.append(forming)
        if len(formed) == 2:
            raise OSError("the second lane")
        return share_memory(forming)

    if rank == 1:
        rendezvous._Forming.share_memory = fails
    with pytest.raises(OSError if rank == 1 else dist.DistError, match="the second lane"):
        group.reconfigure("in part", handles[::-1])
    rendezvous._Forming.share_memory = share_memory
    for one in (group, *group.inner_groups):
        assert (one.rank(), one.size(), one.generation) == (rank, size, 0)
        with pytest.raises(dist.GroupAbortedError, match="reconfigure"):
            total(one)
    group.reconfigure("whole", handles[::-1])
    assert {one.generation for one in (group, *group.inner_groups)} == {1}
    uses_all(group)


def test_a_change_that_fails_halfway_leaves_no_lane_in_use() -> None:
    run_ranks(fails_halfway, 2, backend="round_robin", isolated=True)
