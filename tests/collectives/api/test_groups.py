"""Groups of some ranks: made, split, ended, and called by those who are not in them."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from harness import run_ranks, run_world
from ports import free_port
from worlds import sum_of_ranks

import collectives as dist

LONG = timedelta(seconds=30)


def makes_groups(rank: int, size: int) -> None:
    odd = dist.new_group([3, 1], group_desc="the odd ones", timeout=timedelta(seconds=9))
    assert dist.get_pg_count() == 2
    if rank in (1, 3):
        assert (dist.get_rank(odd), dist.get_world_size(odd)) == (rank // 2, 2)
        assert dist.get_process_group_ranks(odd) == [1, 3]
        assert dist.get_group_rank(odd, 3) == 1
        assert dist.get_global_rank(odd, 1) == 3
        assert (odd.group_desc, odd.timeout) == ("the odd ones", timedelta(seconds=9))
        assert dist.get_backend(odd) == "host"
        assert sum_of_ranks(odd) == 4
        with pytest.raises(
            ValueError, match=r"is global rank 0, but the group has the global ranks \[1, 3\]$"
        ):
            dist.get_group_rank(odd, 0)
        with pytest.raises(ValueError, match="group_rank is 2, but the ranks of this group are 0 to 1"):
            dist.get_global_rank(odd, 2)
    else:
        assert odd == dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(odd) == dist.get_world_size(odd) == -1
        with pytest.raises(ValueError, match="this rank is not in the given group"):
            dist.get_backend(odd)
    turned = dist.new_group([3, 2, 1, 0], sort_ranks=False)
    assert dist.get_rank(turned) == 3 - rank
    assert dist.get_process_group_ranks(turned) == [3, 2, 1, 0]
    everyone = dist.new_group()
    assert everyone is not dist.group.WORLD
    assert sum_of_ranks(everyone) == 6
    single = dist.new_group([2], backend="gloo")
    if rank == 2:
        assert dist.get_backend(single) == "gloo"
        assert sum_of_ranks(single) == 2
    assert dist.get_group_rank(dist.group.WORLD, 2) == dist.get_global_rank(dist.group.WORLD, 2) == 2


def test_groups_of_some_ranks() -> None:
    run_world(makes_groups, 4)


def makes_parts(rank: int, size: int) -> None:
    own, parts = dist.new_subgroups(2)
    assert dist.get_process_group_ranks(own) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert [part is own for part in parts] == [rank < 2, rank >= 2]
    assert sum_of_ranks(own) == (1 if rank < 2 else 5)
    own, parts = dist.new_subgroups_by_enumeration([[0, 3], [1]])
    assert len(parts) == 2
    assert (own is None) == (rank == 2)
    with pytest.raises(ValueError, match="group_size is 3, which does not divide the 4 ranks"):
        dist.new_subgroups(3)
    with pytest.raises(ValueError, match="group_size must be positive, but is 0"):
        dist.new_subgroups(0)
    with pytest.raises(ValueError, match=r"rank 1 is in \[0, 1\] and in \[1, 2\]"):
        dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="the list of groups is empty"):
        dist.new_subgroups_by_enumeration([])
    made = dist.get_pg_count()
    with pytest.raises(ValueError, match=r"ranks has \[99\]"):
        dist.new_subgroups_by_enumeration([[0, 1], [99]])
    assert dist.get_pg_count() == made
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="group_size must be given"):
            dist.new_subgroups()


def test_parts() -> None:
    run_world(makes_parts, 4)


def splits(rank: int, size: int) -> None:
    big = dist.new_group([1, 2, 3])
    if rank == 0:
        return
    part = dist.split_group(big, [[0, 2]])
    if rank == 2:
        assert part is None
    else:
        assert dist.get_process_group_ranks(part) == [1, 3]
        assert sum_of_ranks(part) == 4
        assert part.group_desc == ":split:0"
    again = dist.split_group(big, [[0], [2, 1]], group_desc="again", backend="cpu:host")
    assert again.size() == (1 if rank == 1 else 2)
    assert again.group_desc == "again"
    where = r"\[rank \d\] split_group on host group '1' of 3: "
    for ranks, reason in (
        (None, "split_ranks must be given"),
        ([[]], "at least one rank"),
        ([[0, 1], [1]], "named twice"),
        ([[3]], r"split_ranks is \[\[3\]\], but the ranks are 0 to 2"),
    ):
        with pytest.raises(ValueError, match=where + ".*" + reason):
            dist.split_group(big, ranks)
    with pytest.raises(ValueError, match="backend asks for gloo on cpu, but this group has cpu:host"):
        dist.split_group(big, [[0]], backend="cpu:gloo")
    if rank > 1:
        time.sleep(0.3)  # so that rank 1 is the first and waits for the others
    with pytest.raises(dist.CollectiveMismatchError, match=r"rank 1 asks for split \[\[0, 1\]\]"):
        dist.split_group(big, [[0, 1]] if rank == 1 else [[1, 2]], timeout=LONG)


def test_split_by_members_only() -> None:
    run_world(splits, 4)


def makes_local_groups(rank: int, size: int) -> None:
    if rank == 1:
        assert dist.new_group([0, 2], use_local_synchronization=True) == dist.GroupMember.NON_GROUP_MEMBER
        return  # and need not have called at all
    names = set()
    for _ in range(2):
        pair = dist.new_group([0, 2], use_local_synchronization=True)
        names.add(pair.group_name)
        assert sum_of_ranks(pair) == 2
    assert len(names) == 2
    assert dist.get_pg_count() == 1


def test_groups_made_by_members_only() -> None:
    run_world(makes_local_groups, 3)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([], "ranks is empty"),
        ([0, 0], r"ranks must be different, but are \[0, 0\]"),
        ([0, 5], r"ranks has \[5\], but the ranks of the default group are 0 to 0"),
        ([-1], r"ranks has \[-1\]"),
        ([0.0], r"ranks must be a list of int, but is \[0.0\]"),
    ],
)
def test_wrong_members(ranks: list[int], reason: str) -> None:
    run_world(wrong_members, 1, ranks, reason)


def wrong_members(rank: int, size: int, ranks: list[int], reason: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"\[rank 0\] new_group: {reason}"):
        dist.new_group(ranks)
    assert dist.get_pg_count() == 1


def makes_groups_in_another_order(rank: int, size: int) -> str:
    lists = [[0, 1], [0, 1, 2]] if rank == 1 else [[0, 1, 2], [0, 1]]
    if rank == 1:
        time.sleep(0.3)  # so that rank 1 is not the first
    with pytest.raises(dist.CollectiveMismatchError) as caught:
        dist.new_group(lists[0], timeout=LONG)
    return str(caught.value)


def test_groups_in_another_order_are_found_on_all_members() -> None:
    for rank, message in enumerate(run_world(makes_groups_in_another_order, 3)):
        assert message.startswith(f"[rank {rank}] new_group: rank ")
        assert (
            " asks for group 1 of ranks [0, 1, 2] on cpu:host, but rank 1 for group 1 of ranks [0, 1] "
            in message
        )


def member_that_does_not_come(rank: int, size: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(dist.DistStoreError) as caught:
        dist.new_group([0, 1, 2], timeout=timedelta(milliseconds=300))
    return str(caught.value)


def test_member_that_does_not_come_is_named() -> None:
    results = run_world(member_that_does_not_come, 3)
    for rank in (0, 2):
        assert results[rank].startswith(f"[rank {rank}] new_group: rank 1 did not come within 0.3 s")


def destroys_one(rank: int, size: int) -> None:
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    if rank < 2:
        for function in (dist.get_backend, dist.get_process_group_ranks, dist.destroy_process_group):
            with pytest.raises(ValueError, match="is not registered here: it was destroyed"):
                function(group)
        with pytest.raises(dist.GroupAbortedError):
            dist.all_reduce(torch.ones(1), group=group)
    assert sum_of_ranks() == sum(range(size))
    again = dist.new_group([0, 1])
    if rank < 2:
        assert sum_of_ranks(again) == 1


def test_one_group_ends_alone() -> None:
    run_world(destroys_one, 3)


def ends_a_pending_group(rank: int, size: int) -> None:
    group = dist.new_group()
    tensors = [torch.full((1000,), float(rank)) for _ in range(5)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.destroy_process_group()
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert tensor[0] == sum(range(size))


def test_the_end_finishes_what_was_issued() -> None:
    run_world(ends_a_pending_group, 2)


def ends_with_a_failure(rank: int, size: int, whole: bool) -> None:
    group = dist.new_group()

    def fail() -> None:
        raise dist.DistBackendError("cannot end")

    group.shutdown = fail
    with pytest.raises(dist.DistBackendError, match="cannot end"):
        dist.destroy_process_group(None if whole else group)
    with pytest.raises(dist.GroupAbortedError):
        dist.all_reduce(torch.ones(1), group=group)
    assert dist.is_initialized() is not whole


@pytest.mark.parametrize("whole", [False, True], ids=["group", "world"])
def test_a_group_that_cannot_be_ended_is_broken(whole: bool) -> None:
    run_world(ends_with_a_failure, 1, whole)


def interrupted_at_the_end(rank: int, size: int, port: int) -> float:
    for _ in range(2):
        dist.init_process_group("host", f"tcp://127.0.0.1:{port}", LONG, size, rank)
        default, group = dist.group.WORLD, dist.new_group()

        def interrupt() -> None:
            raise KeyboardInterrupt

        group.shutdown = interrupt
        with pytest.raises(KeyboardInterrupt):
            dist.destroy_process_group()
        assert not dist.is_initialized()
        for broken in (group, default):
            with pytest.raises(dist.GroupAbortedError):
                dist.all_reduce(torch.ones(1), group=broken)
    # Nor does the store keep its address.
    dist.init_process_group("host", f"tcp://127.0.0.1:{port}", LONG, size, rank)
    total = sum_of_ranks()
    dist.destroy_process_group()
    return total


def test_an_interrupt_at_the_end_leaves_no_group_behind() -> None:
    assert run_ranks(interrupted_at_the_end, 2, free_port()) == [1, 1]


def calls_outside(rank: int, size: int) -> None:
    group = dist.new_group([1])
    if rank == 1:
        return
    tensor = torch.ones(2)
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "broadcast": lambda: dist.broadcast(tensor, 0, group),
        "reduce": lambda: dist.reduce(tensor, 0, group=group),
        "all_gather": lambda: dist.all_gather([tensor], tensor, group),
        "all_gather_single": lambda: dist.all_gather_single(tensor, tensor, group),
        "gather": lambda: dist.gather(tensor, group=group),
        "scatter": lambda: dist.scatter(tensor, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(tensor, [tensor], group=group),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(tensor, tensor, group=group),
        "all_to_all": lambda: dist.all_to_all([tensor], [tensor], group),
        "all_to_all_single": lambda: dist.all_to_all_single(tensor, tensor, group=group),
        "barrier": lambda: dist.barrier(group),
        "monitored_barrier": lambda: dist.monitored_barrier(group),
        "send": lambda: dist.send(tensor, 0, group),
        "isend": lambda: dist.isend(tensor, 0, group),
        "irecv": lambda: dist.irecv(tensor, 0, group),
        "all_gather_object": lambda: dist.all_gather_object([None], 1, group),
        "gather_object": lambda: dist.gather_object(1, group=group),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0, group),
        "scatter_object_list": lambda: dist.scatter_object_list([None], [1], 0, group),
        "send_object_list": lambda: dist.send_object_list([1], 0, group),
    }
    for name, call in calls.items():
        with pytest.warns(UserWarning, match=f"{name} on global rank 0 does nothing") as warned:
            assert call() is None
        assert warned[0].filename == __file__, name
    for receive in (lambda: dist.recv(tensor, 1, group), lambda: dist.recv_object_list([None], 1, group)):
        with pytest.warns(UserWarning, match="does nothing"):
            assert receive() == -1
    assert tensor.tolist() == [1, 1]


def test_calls_of_ranks_outside_do_nothing() -> None:
    run_world(calls_outside, 2)


def wrong_groups(rank: int, size: int) -> None:
    foreign = object()
    for call in (
        lambda: dist.all_reduce(torch.ones(1), group=foreign),
        lambda: dist.barrier(foreign),
        lambda: dist.get_rank(foreign),
        lambda: dist.isend(torch.ones(1), 0, foreign),
    ):
        with pytest.raises(
            TypeError, match=r"group must be a collectives.ProcessGroup, but is .*builtins.object"
        ):
            call()


def test_group_of_another_kind() -> None:
    run_world(wrong_groups, 1)


def wrong_splits(rank: int, size: int) -> None:
    with pytest.raises(TypeError, match="pg_options"):
        dist.split_group(split_ranks=[[0]], pg_options=5)
    for wrong in ([0], [[0.0]]):
        with pytest.raises(TypeError, match="split_ranks must be a list of lists of int"):
            dist.split_group(split_ranks=wrong)


def test_wrong_splits() -> None:
    run_world(wrong_splits, 1, backend="cpu:host,cuda:gloo")
