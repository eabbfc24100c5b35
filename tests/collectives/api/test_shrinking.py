"""shrink_group: the ranks that are left go on, in the world's place or beside it."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
from harness import Died, current_store, run_ranks, run_world
from worlds import total

import collectives as dist

SHORT = timedelta(seconds=2)


def shrinks_the_world(rank, size, flags):
    old = dist.group.WORLD
    pair = dist.new_group([0, 1])
    dist.new_group([0, 2] if rank != 1 else [1], use_local_synchronization=True)
    if rank == 1:
        return None
    made = dist.shrink_group([1], shrink_flags=flags)
    assert dist.group.WORLD is made is not old
    assert (dist.get_rank(), dist.get_world_size()) == (rank // 2, 2)
    assert total() == 2
    if rank == 0:
        with pytest.raises(dist.GroupAbortedError):
            total(pair)
    both = dist.new_group([0, 1])
    alike = dist.new_group([0, 1], use_local_synchronization=True)
    return total(both), total(alike), dist.get_process_group_ranks(both)


@pytest.mark.parametrize(("backend", "flags"), [("host", dist.SHRINK_ABORT), ("gloo", dist.SHRINK_DEFAULT)])
def test_the_new_group_takes_the_place_of_the_world(backend, flags) -> None:
    first, _, last = run_world(shrinks_the_world, 3, flags, backend=backend, isolated=True)
    assert first == last == (2, 2, [0, 1])


def shrinks_a_part(rank, size):
    part = dist.new_group([0, 2, 3])
    if rank in (0, 3):
        made = dist.shrink_group([1], part)
        assert dist.get_process_group_ranks(made) == [0, 3]
        assert total(made) == 2
    if rank != 1:
        assert total(part) == 3
    assert total() == 4


def test_another_group_goes_on_beside_the_new_one() -> None:
    run_world(shrinks_a_part, 4)


def goes_on_after_a_death(rank, size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLostError) as caught:
        total()
    dist.shrink_group([caught.value.rank], shrink_flags=dist.SHRINK_ABORT)
    return total()


@pytest.mark.full
def test_a_death_leaves_a_world_of_the_others() -> None:
    first, killed, last = run_world(goes_on_after_a_death, 3, isolated=True, lost=[1])
    assert isinstance(killed, Died)
    assert first == last == 2


def refusals(rank, size):
    for error, words, arguments in (
        (TypeError, "must be a list of int", ((1,),)),
        (TypeError, "must be a list of int", (["1"],)),
        (ValueError, "has 2, but the ranks are 0 to 1", ([2],)),
        (ValueError, "names a rank twice", ([1, 1],)),
        (ValueError, "some of the 2 ranks, but not all", ([],)),
        (ValueError, "some of the 2 ranks, but not all", ([0, 1],)),
        (ValueError, "shrink_flags is 2", ([1 - rank], None, 2)),
        (RuntimeError, "this rank is in ranks_to_exclude", ([rank],)),
    ):
        with pytest.raises(error, match=words):
            dist.shrink_group(*arguments)
    assert total() == 2


def test_wrong_arguments_change_nothing() -> None:
    run_world(refusals, 2)


def calls_again(rank, size):
    dist.init_process_group("host", store=current_store(), rank=rank, world_size=size, timeout=SHORT)
    if rank:
        current_store().wait(["shrunk"], timedelta(seconds=60))
        dist.group.WORLD.abort()
        return None
    with pytest.raises(dist.DistStoreError):
        dist.shrink_group([2])  # rank 1 does not come
    left = dist.shrink_group([1, 2]).size()
    current_store().set("shrunk", "")
    return left


def test_a_call_without_one_more_rank_is_not_held_up_by_the_one_before() -> None:
    assert run_ranks(calls_again, 3, isolated=True)[0] == 1
