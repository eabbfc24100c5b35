"""Newcomers and members die, stop, come late or write nonsense while a world lets processes in."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from harness import current_store, run_ranks
from worlds import total

import collectives as dist
from collectives import _native
from collectives.api import reconfiguring
from collectives.backends.host import ProcessGroupHost
from collectives.secret import SECRET
from collectives.store.joining.newcomers import Newcomers

LONG = timedelta(seconds=30)


def form(rank, size, name="world"):
    dist.init_process_group("host", None, LONG, size, rank, dist.PrefixStore(name, current_store()))


def leave(rank, ranks):
    """Ends the world of the processes that are left."""
    dist.barrier()
    dist.destroy_process_group()
    leave_store(rank, ranks)


def leave_store(rank, ranks):
    store = current_store()
    store.set(f"left {rank}", "")
    store.wait([f"left {other}" for other in ranks], LONG)


def admit(count, limit_s=20.0):
    """Lets processes in until that many have come."""
    end = time.monotonic() + limit_s
    while count > 0:
        count -= dist.admit_newcomers(current_store(), LONG)
        assert time.monotonic() < end


def meets_nonsense(rank, size, nonsense):
    """Somebody has announced what is no newcomer, and ranks 2 and on join all the same."""
    store = current_store()
    newcomers = dist.PrefixStore("newcomers", store)
    if rank < 2:
        form(rank, 2)
        if rank == 0:
            nonsense(newcomers, dist.get_reconfigure_handle())
            store.set("nonsense", "")
        store.wait(["nonsense"], LONG)
        began = time.monotonic()
        assert dist.admit_newcomers(store, LONG) == 0
        assert time.monotonic() - began < 10
        assert total() == 2
        store.set(f"ready {rank}", "")
        admit(size - 2)
    else:
        store.wait(["ready 0", "ready 1"], LONG)
        dist.join_world(store, timeout=LONG)
    assert total() == size
    leave(rank, range(size))


def announce(newcomers, handle):
    from collectives.store.records import publish

    publish(newcomers, f"handle/{newcomers.add('count', 1)}", handle)


def announces_no_handle(newcomers, _):
    announce(newcomers, "collectives-1.no handle.")


def announces_a_members_handle(newcomers, handle):
    announce(newcomers, handle)


def announces_no_record(newcomers, _):
    newcomers.set(f"handle/{newcomers.add('count', 1)}", "no record")


def counts_on(newcomers, _):
    newcomers.add("count", 1000)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "nonsense", [announces_no_handle, announces_a_members_handle, announces_no_record, counts_on]
)
def test_what_is_no_newcomer_harms_nobody(nonsense) -> None:
    run_ranks(meets_nonsense, 3, nonsense, isolated=True)


def hears_of_the_store(rank, size):
    """What rank 0 finds in the store, all members hear; the world goes on."""
    store = current_store()
    form(rank, size)
    if rank == 0:
        store.set("newcomers/count", "no number")
        store.set("spoilt", "")
    store.wait(["spoilt"], LONG)
    with pytest.raises(dist.DistStoreError, match="count"):
        dist.admit_newcomers(store, LONG)
    assert total() == size


def test_all_members_hear_that_the_store_is_unusable() -> None:
    run_ranks(hears_of_the_store, 2, isolated=True)


def one_is_stopped(rank, size):
    """Rank 3 is stopped after it has announced itself; it gets in once it goes on."""
    store = current_store()
    if rank == 3:
        store.set("pid", str(os.getpid()))
        dist.join_world(store, timeout=LONG)
    elif rank == 2:
        store.wait(["newcomers/handle/1"], LONG)
        os.kill(int(store.get("pid")), signal.SIGSTOP)
        store.set("stopped", "")
        dist.join_world(store, timeout=LONG)
    else:
        form(rank, 2)
        store.wait(["stopped", "newcomers/handle/2"], LONG)
        began = time.monotonic()
        assert dist.admit_newcomers(store, LONG) == 1
        assert time.monotonic() - began < 10
    if rank < 3:
        assert total() == 3
        if rank == 0:
            os.kill(int(store.get("pid")), signal.SIGCONT)
        admit(1)
    assert total() == 4
    leave(rank, range(size))


def test_a_stopped_newcomer_keeps_nobody_waiting_and_gets_in_later() -> None:
    run_ranks(one_is_stopped, 4, isolated=True, env={SECRET: "a secret of the ranks of this test"})


def first_member_dies(rank, size, moment):
    """Rank 0 is killed while it lets rank 3 in; the others do so without it."""
    store = current_store()
    if rank == 3:
        dist.join_world(store, timeout=LONG)
    else:
        form(rank, 3)
        store.set(f"handle of {rank}", dist.get_reconfigure_handle())
        store.wait(["newcomers/handle/1", "handle of 1", "handle of 2"], LONG)
        if rank == 0:
            dies_at(moment)
        if moment == "before its plan":
            with pytest.raises(dist.PeerLostError):
                dist.admit_newcomers(store, LONG)
            dist.reconfigure_world("without", [store.get(f"handle of {other}").decode() for other in (1, 2)])
            admit(1)
        else:
            assert dist.admit_newcomers(store, LONG) == 1
    assert total() == 3
    leave(rank, [1, 2, 3])


def dies_at(moment):
    """Has this process die at a moment of letting newcomers in."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def connects_and_dies(*args):
        form(*args)
        die()

    form = ProcessGroupHost._form
    if moment == "before its plan":
        Newcomers.propose = die
    elif moment == "before the broadcast":
        reconfiguring.broadcast_object_list = die
    elif moment == "before the meeting":
        reconfiguring._change_members = die
    elif moment == "while it forms":
        ProcessGroupHost._form = die
    else:
        ProcessGroupHost._form = connects_and_dies


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "moment",
    [
        "before its plan",
        "before the broadcast",
        "before the meeting",
        "while it forms",
        "once it is connected",
    ],
)
def test_the_first_member_dies(moment) -> None:
    run_ranks(first_member_dies, 4, moment, isolated=True, lost=[0])


def another_member_dies(rank, size, moment):
    """Rank 1 is killed while the world lets rank 3 in; the others do so without it, in the same call."""
    store = current_store()
    if rank == 3:
        dist.join_world(store, timeout=LONG)
    else:
        form(rank, 3)
        store.wait(["newcomers/handle/1"], LONG)
        if rank == 1:
            dies_at(moment)
        assert dist.admit_newcomers(store, LONG) == 1
    assert total() == 3
    leave(rank, [0, 2, 3])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "moment", ["before the broadcast", "before the meeting", "while it forms", "once it is connected"]
)
def test_another_member_dies(moment) -> None:
    run_ranks(another_member_dies, 4, moment, isolated=True, lost=[1])


def one_does_not_hear(rank, size):
    """The broadcast of what to do fails on rank 1 alone, which finds it in the store."""
    store = current_store()
    if rank == 3:
        dist.join_world(store, timeout=LONG)
    else:
        form(rank, 3)
        store.wait(["newcomers/handle/1"], LONG)
        if rank == 1:
            broadcast = reconfiguring.broadcast_object_list

            def fails(objects, src):
                broadcast([None] * len(objects), src)
                raise dist.PeerLostError("lost", 2)

            reconfiguring.broadcast_object_list = fails
        assert dist.admit_newcomers(store, LONG) == 1
    assert total() == size
    leave(rank, range(size))


def test_a_member_that_does_not_hear_the_plan_finds_it() -> None:
    run_ranks(one_does_not_hear, 4, isolated=True)


def one_cannot_listen(rank, size):
    """All members hear that rank 1 has no handle, for which nobody is asked while nobody waits."""
    store = current_store()
    if rank == 2:
        store.wait(["nobody waited"], LONG)
        with pytest.raises(dist.DistStoreError, match="let this process in"):
            dist.join_world(store, timeout=timedelta(seconds=6))
        return
    form(rank, 2)
    if rank == 1:
        type(dist.group.WORLD).reconfigure_handle = cannot_connect
    assert dist.admit_newcomers(store, LONG) == 0
    assert dist.group.WORLD._meeting_place is None
    store.set("nobody waited", "")
    store.wait(["newcomers/handle/1"], LONG)
    with pytest.raises(dist.DistNetworkError, match=rf"^\[rank {rank}\] .*no connection"):
        dist.admit_newcomers(store, LONG)
    assert (total(), dist.group.WORLD.generation) == (2, 0)


def test_all_members_hear_that_one_cannot_listen() -> None:
    run_ranks(one_cannot_listen, 3, isolated=True)


def first_member_sleeps(rank, size):
    """Rank 0 is stopped before the meeting: the others go on without it, and it makes no world of its own."""
    store, limit = current_store(), timedelta(seconds=3)
    if rank == 3:
        dist.join_world(store, timeout=LONG)
    else:
        form(rank, 3)
        store.wait(["newcomers/handle/1"], LONG)
        if rank == 0:
            change_members = reconfiguring._change_members

            def stops_before(*args):
                reconfiguring._change_members = change_members
                store.set("pid", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
                change_members(*args)

            reconfiguring._change_members = stops_before
            with pytest.raises(dist.GroupAbortedError, match="gone on without this process"):
                dist.admit_newcomers(store, limit)
        else:
            assert dist.admit_newcomers(store, limit) == 1
    if rank:
        assert total() == 3
        if rank == 1:
            os.kill(int(store.get("pid")), signal.SIGCONT)
    leave_store(rank, range(size))
    if rank == 1:
        left = [key.removeprefix("newcomers/") for key in store.list_keys() if key.startswith("newcomers/")]
        assert sorted(left) == ["admitted", "count"]


@pytest.mark.full
def test_a_first_member_that_was_stopped_makes_no_world_alone() -> None:
    run_ranks(first_member_sleeps, 4, isolated=True)


def waits_long(rank, size):
    """The rest of the newcomer's limit is for the meeting; the world has the whole."""
    store = current_store()
    if rank == 1:
        limit = timedelta(seconds=6)
        dist.join_world(store, timeout=limit)
        assert dist.group.WORLD.timeout == limit
    else:
        form(0, 1)
        store.wait(["newcomers/handle/1"], LONG)
        time.sleep(3)
        assert dist.admit_newcomers(store, LONG) == 1
    assert total() == size
    leave(rank, range(size))


def does_not_meet(rank, size):
    """The members do not come after they have invited the newcomer, which goes on for its limit only."""
    store = current_store()
    if rank == 1:
        began = time.monotonic()
        with pytest.raises(dist.DistStoreError, match="let this process in within 4 s"):
            dist.join_world(store, timeout=timedelta(seconds=4))
        assert time.monotonic() - began < 6
        store.set("given up", "")
    else:
        form(0, 1)
        store.wait(["newcomers/handle/1"], LONG)
        time.sleep(2)
        asked = []

        def waits(*args):
            asked.append(args)
            store.wait(["given up"], LONG)

        reconfiguring._change_members = waits
        dist.admit_newcomers(store, LONG)
        assert asked
        dist.destroy_process_group()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("function", [waits_long, does_not_meet])
def test_the_limit_of_a_newcomer_counts_from_its_call(function) -> None:
    run_ranks(function, 2, isolated=True)


def is_invited_in_vain(rank, size):
    """The members give up after they have invited rank 2, which waits for them, and then call again."""
    store = current_store()
    if rank == 2:
        dist.join_world(store, timeout=LONG)
    else:
        form(rank, 2)
        store.wait(["newcomers/handle/1"], LONG)
        change_members, reconfiguring._change_members = reconfiguring._change_members, gives_up
        with pytest.raises(RuntimeError, match="no reconfiguration"):
            dist.admit_newcomers(store, LONG)
        reconfiguring._change_members = change_members
        admit(1)
    assert total() == size
    leave(rank, range(size))


def gives_up(*_, **__):
    time.sleep(1)
    raise RuntimeError("no reconfiguration")


def test_a_newcomer_that_was_invited_in_vain_gets_in_later() -> None:
    run_ranks(is_invited_in_vain, 3, isolated=True)


def would_form_another_world(rank, size, difference):
    """Rank 2 is refused before the members' world breaks."""
    store = current_store()
    if rank == 2:
        backend = "host"
        if difference == "backend":
            backend = "round_robin"
        elif difference == "calls":
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        else:
            _native.LAYOUT_VERSION += 1
        with pytest.raises(dist.CollectiveMismatchError, match=r"the members (form|have the lay)"):
            dist.join_world(store, backend, LONG)
        assert not dist.is_initialized()
    else:
        form(rank, 2)
        store.wait(["newcomers/handle/1"], LONG)
        assert dist.admit_newcomers(store, LONG) == 0
        assert (dist.group.WORLD.generation, total()) == (0, 2)
    leave_store(rank, range(size))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("difference", ["backend", "calls", "layout"])
def test_a_newcomer_that_would_form_another_world_is_refused(difference) -> None:
    run_ranks(would_form_another_world, 3, difference, isolated=True)


def fails_after_its_answer(rank, size):
    """The members wait for rank 2 no longer than until its call has failed, though its process lives."""
    store = current_store()
    if rank == 2:
        reconfiguring._begin_world = cannot_connect
        with pytest.raises(dist.DistNetworkError, match="no connection"):
            dist.join_world(store, timeout=LONG)
    else:
        form(rank, 2)
        store.wait(["newcomers/handle/1"], LONG)
        began = time.monotonic()
        assert dist.admit_newcomers(store, LONG) == 0
        assert time.monotonic() - began < 10
        assert total() == 2
    leave_store(rank, range(size))


def cannot_connect(*_):
    raise dist.DistNetworkError("no connection")


def test_a_newcomer_that_fails_keeps_nobody_waiting() -> None:
    run_ranks(fails_after_its_answer, 3, isolated=True)


def by_a_store_of_torch(rank, size, path):
    """Two come at once; the store is torch's."""
    store = torch.distributed.FileStore(path, size)
    if rank < 2:
        form(rank, 2)
        current_store().wait(["comes 2", "comes 3"], LONG)
    else:
        current_store().set(f"comes {rank}", "")
        dist.join_world(store, timeout=LONG)
    end = time.monotonic() + 20
    while dist.get_world_size() < 4:  # who has come lets the other one in
        dist.admit_newcomers(store, LONG)
        assert time.monotonic() < end
    assert total() == 4
    assert dist.get_rank() == rank or rank > 1
    leave(rank, range(size))


def test_newcomers_come_by_a_store_of_torch(tmp_path) -> None:
    run_ranks(by_a_store_of_torch, 4, f"{tmp_path}/store", isolated=True)
