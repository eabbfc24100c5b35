"""The world grows, heals, splits and merges while its processes live."""

from __future__ import annotations

import gc
import os
import signal
import time
from datetime import timedelta

import pytest
from harness import Died, current_store, run_ranks, run_world
from machines import make_machines  # noqa: F401 - a fixture
from worlds import handles_of, meet, total

import collectives as dist
from collectives.cli.ps import running_jobs
from collectives.secret import SECRET
from collectives.store.joining import agreement

LONG = timedelta(seconds=30)


def lives(size):
    """Uses the world, its store and groups made in it."""
    rank = dist.get_rank()
    assert (dist.get_world_size(), total()) == (size, size)
    assert dist.get_process_group_ranks(None) == list(range(size))
    dist.group.WORLD.get_group_store().set(f"here {rank}", "")
    dist.group.WORLD.get_group_store().wait([f"here {other}" for other in range(size)], LONG)
    part = dist.new_group(list(range(0, size, 2)), timeout=LONG)
    if rank % 2 == 0:
        assert total(part) == (size + 1) // 2
    gathered = [None] * size
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(size))
    dist.barrier()


def turns(rank, size):
    world, before = dist.group.WORLD, dist.group.WORLD.get_group_store()
    pair = dist.new_group([0, 1])
    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle())
    before.set(f"kept {rank}", "")
    assert dist.reconfigure_world("turned", handles[::-1]) is world is dist.group.WORLD
    assert dist.get_rank() == size - 1 - rank
    assert before.check([f"kept {rank}"])
    if rank < 2:
        with pytest.raises(dist.GroupAbortedError, match="ends all other groups; make them again"):
            total(pair)
        with pytest.raises(ValueError, match="is not registered here"):
            dist.get_process_group_ranks(pair)
    lives(size)


@pytest.mark.parametrize("backend", ["host", "round_robin", "cpu:host"])
def test_the_world_stays_the_same_object_and_its_other_groups_end(backend) -> None:
    run_world(turns, 3, backend=backend)


def grows_from_one(rank, size, backend):
    """Processes come one after another; the first has a world of one, the others have none."""
    if rank == 0:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        assert total() == 1
    for count in range(max(rank + 1, 2), size + 1):
        handles = handles_of(f"for {count}", rank, range(count))
        dist.reconfigure_world(count, handles, backend, LONG)
        assert dist.get_rank() == rank
        lives(count)
    meet("grown", rank, range(size))
    dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["host", "round_robin"])
def test_a_world_of_one_grows(backend) -> None:
    run_ranks(grows_from_one, 4, backend)


def without_a_world_before(rank, size):
    handles = handles_of("all", rank, range(size))
    assert dist.get_reconfigure_handle() == handles[rank]
    with pytest.raises(ValueError, match="is not part of the 1 handles"):
        dist.reconfigure_world(1, handles[:rank] + handles[rank + 1 :] if size == 2 else handles[:1])
    assert not dist.is_initialized()
    dist.reconfigure_world(1, handles)
    assert dist.get_reconfigure_handle() == handles[rank]
    lives(size)
    dist.destroy_process_group()
    assert handles_of("again", rank, range(size))[rank] != handles[rank]


def test_processes_without_a_world_make_one() -> None:
    run_ranks(without_a_world_before, 2)


def splits_and_merges(rank, size):
    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle())
    meet("gathered", rank, range(size))  # who leaves breaks what others may still be in
    half = size // 2
    mine = handles[:half] if rank < half else handles[half:]
    dist.reconfigure_world(f"half {rank // half}", mine)
    lives(half)
    assert dist.get_rank() == rank % half
    dist.reconfigure_world("whole", handles)
    lives(size)


def test_a_world_splits_and_merges() -> None:
    run_world(splits_and_merges, 4)


def two_worlds_merge(rank, size, urls):
    dist.init_process_group("host", urls[rank // 2], LONG, 2, rank % 2)
    assert total() == 2
    dist.reconfigure_world("both", handles_of("all", rank, range(size)))
    lives(size)
    dist.destroy_process_group()


def test_two_worlds_merge(tmp_path) -> None:
    run_ranks(two_worlds_merge, 4, [f"file://{tmp_path}/{world}" for world in "ab"])


def replaces_a_dead_rank(rank, size, url):
    """Rank 3 comes later, in the place of rank 1, which is killed in an all-reduce."""
    if rank < 3:
        dist.init_process_group("host", url, LONG, 3, rank)
        handles = handles_of("first", rank, range(3))
        assert total() == 3
        if rank == 1:
            current_store().wait(["waiting 0", "waiting 2"])
            os.kill(os.getpid(), signal.SIGKILL)
        current_store().set(f"waiting {rank}", "")
        with pytest.raises(dist.PeerLostError) as lost:
            total()
        assert lost.value.rank == 1
        dist.reconfigure_world("without 1", [handles[0], handles[2]])
        lives(2)
    handles = handles_of("healed", rank, [0, 3, 2])
    dist.reconfigure_world("healed", handles, timeout=LONG)
    assert dist.get_rank() == {0: 0, 3: 1, 2: 2}[rank]
    lives(3)
    dist.destroy_process_group()


@pytest.mark.full
def test_a_new_process_takes_the_place_of_a_dead_one(tmp_path) -> None:
    killed = run_ranks(replaces_a_dead_rank, 4, f"file://{tmp_path}/store", isolated=True, lost=[1])[1]
    assert isinstance(killed, Died)


@pytest.mark.full
def test_it_may_come_from_another_machine(make_machines) -> None:  # noqa: F811
    machines = make_machines(2, "1gbit")
    url = f"tcp://{machines.address(0)}:29513"
    run_ranks(replaces_a_dead_rank, 4, url, isolated=True, lost=[1], machines=(machines, [0, 0, 0, 1]))


def a_stranger(rank, size):
    """Rank 1 has another secret."""
    store = current_store()
    if rank == 1:
        os.environ[SECRET] = "a secret of another job, which it is not"
    store.set(f"handle {rank}", dist.get_reconfigure_handle())
    handles = [store.get(f"handle {other}").decode() for other in range(size)]
    with pytest.raises(dist.DistBackendError, match=f"handle {1 - rank} is not proved by this process's job"):
        dist.reconfigure_world(1, handles, timeout=LONG)
    assert not dist.is_initialized()


def test_a_stranger_without_the_secret_cannot_join() -> None:
    run_ranks(a_stranger, 2, isolated=True, env={SECRET: "a secret of the ranks of this test"})


def is_recorded(rank, size):
    """What tells of a group follows: messages, dumps, and what other processes see."""
    total()
    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle())
    dist.reconfigure_world("turned", handles[::-1])
    for _ in range(3):
        total()
    world = dist.group.WORLD
    assert world.describe() == f"host group '0' (default_pg) of {size}, generation 1"
    (record,) = [one for one in dist.flight_record()["groups"] if one["name"] == "0"]
    assert (record["rank"], record["size"], record["generation"]) == (size - 1 - rank, size, 1)
    counted = [(one["generation"], one["number"]) for one in record["operations"]]
    assert counted[0] == (0, 1)
    assert counted[-3:] == [(1, 1), (1, 2), (1, 3)]
    (job,) = [job for job in running_jobs() if os.getpid() in job.processes()]
    (shown,) = [group for group in job.groups if group.label.startswith("host group '0'")]
    assert shown.label == world.describe()
    assert shown.ranks[size - 1 - rank].process.pid == os.getpid()
    meet("looked", rank, range(size))
    world.abort()
    with pytest.raises(dist.GroupAbortedError, match="generation 1"):
        total()


def test_records_and_ps_follow() -> None:
    run_world(is_recorded, 2, isolated=True)


def lanes_are_recorded(rank, size):
    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle())
    dist.reconfigure_world("again", handles)
    for _ in range(6):
        total()
    for lane in dist.flight_record()["groups"]:
        assert (lane["generation"], lane["operations"][-1]["generation"]) == (1, 1)
        assert lane["operations"][-1]["number"] == 2


def test_records_of_lanes_follow() -> None:
    run_world(lanes_are_recorded, 2, backend="round_robin", isolated=True)


def forks(rank, size):
    """A forked child is not its parent: neither in its group, nor by the handle that it had before."""
    handle = dist.get_reconfigure_handle()
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, dist.get_reconfigure_handle().encode())
        os._exit(0)
    os.wait()
    theirs = os.read(read, 10_000).decode()
    assert theirs.startswith("collectives-1.")
    assert theirs != handle
    dist.reconfigure_world(1, handles_of("all", rank, range(size)))
    group = dist.group.WORLD
    child = os.fork()
    if child == 0:
        with pytest.raises(dist.GroupAbortedError, match="belongs to the parent"):
            group.reconfigure(2, [handle])
        with pytest.raises(dist.GroupAbortedError, match="belongs to the parent"):
            dist.reconfigure_world(2, [handle])
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    lives(size)
    dist.destroy_process_group()


def test_a_forked_child_is_another_process() -> None:
    run_ranks(forks, 2, isolated=True)


def waits_in_a_monitored_barrier(rank, size):
    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle())
    if rank == 1:
        with pytest.raises(dist.GroupAbortedError, match="rank 0 reconfigures the group") as raised:
            dist.monitored_barrier(timeout=LONG)
        assert raised.value.operation == "reconfigure"
    dist.reconfigure_world("again", handles)
    dist.monitored_barrier(timeout=LONG)
    lives(size)


def test_who_waits_in_a_monitored_barrier_is_told() -> None:
    run_world(waits_in_a_monitored_barrier, 2)


def a_part_takes_members(rank, size):
    part = dist.new_group([0, 1, 2])
    handles = [None] * size
    mine = "" if rank == 3 else dist.get_reconfigure_handle(part)
    dist.all_gather_object(handles, mine)
    meet("gathered", rank, range(size))
    if rank in (0, 2):
        part.reconfigure(1, [handles[2], handles[0]])
        assert dist.get_process_group_ranks(part) == [2, 0]
        assert (dist.get_group_rank(part, rank), part.generation) == (1 - rank // 2, 1)
        assert total(part) == 2
    assert total() == size
    dist.barrier()


def test_a_group_of_some_of_the_ranks_takes_members_of_the_world() -> None:
    run_world(a_part_takes_members, 4)


def is_admitted(rank, size):
    """Ranks 2 and 3 join a world of two; a third newcomer dies before it is let in."""
    store = current_store()
    if rank < 2:
        dist.init_process_group("host", store=dist.PrefixStore("world", store), rank=rank, world_size=2)
        assert dist.admit_newcomers(store) == 0
        store.set("nobody waited", "")
        with pytest.raises(ValueError, match="this process has a world already; members call admit"):
            dist.join_world(store)
        store.wait(["dead", "newcomers/handle/2", "newcomers/handle/3"], LONG)
        assert dist.admit_newcomers(store, LONG) == 2
    elif rank == 2:
        store.wait(["nobody waited"], LONG)
        if os.fork() == 0:
            dist.join_world(store_of_child(), timeout=LONG)
            os._exit(1)
        store.wait(["newcomers/handle/1"], LONG)
        os.kill(int(store.get("child")), signal.SIGKILL)
        os.wait()
        store.set("dead", "")
        dist.join_world(store, timeout=LONG)
    else:
        store.wait(["dead"], LONG)
        with pytest.raises(dist.DistStoreError, match=r"no members have let this process in within 0\.2 s"):
            dist.join_world(dist.PrefixStore("elsewhere", store), timeout=timedelta(seconds=0.2))
        dist.join_world(store, timeout=LONG)
    lives(4)
    assert dist.get_rank() == rank if rank < 2 else dist.get_rank() in (2, 3)
    assert dist.admit_newcomers(store) == 0
    dist.barrier()
    dist.destroy_process_group()
    return sorted(
        key for key in store.list_keys() if key.startswith(("newcomers/invitation", "newcomers/handle"))
    )


def store_of_child():
    """Returns the store of the test in a child, which says there who it is."""
    store = current_store()
    store.set("child", str(os.getpid()))
    return store


def test_newcomers_are_let_in_by_a_store() -> None:
    assert run_ranks(is_admitted, 4, isolated=True)[0] == []


def shrinks_after_that(rank, size):
    """Handles and generation go on where a world that was reconfigured shrinks."""
    handles = handles_of("all", rank, range(size))
    dist.reconfigure_world(1, handles)
    meet("met", rank, range(size))
    if rank == 0:
        current_store().wait(["shrunk"])
        return
    before = dist.group.WORLD
    after = dist.shrink_group([0])
    assert (after is before, after.generation, after.rank()) == (False, 2, rank - 1)
    assert dist.get_reconfigure_handle() == handles[rank]
    lives(size - 1)
    dist.reconfigure_world(2, handles[:0:-1])
    lives(size - 1)
    current_store().set("shrunk", "")


def test_shrink_group_rests_on_it() -> None:
    run_world(shrinks_after_that, 3)


def cannot(rank, size):
    with pytest.raises(dist.UnsupportedOperationError, match="gloo cannot give a group other members"):
        dist.reconfigure_world(1, ["a handle"])
    assert total() == size


def test_a_backend_that_cannot_says_so() -> None:
    run_world(cannot, 2, backend="gloo")
    with pytest.raises(dist.UnsupportedOperationError, match="a world over gloo cannot change its members"):
        dist.reconfigure_world(1, ["a handle"], "gloo")


def keeps_what_the_others_write(rank, size):
    """Rank 0 brings its world up to date only after rank 1 has written to the new store."""
    from collectives.api import groups

    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle())
    register = groups.register

    def waits_first(*args):
        current_store().wait([f"written {dist.group.WORLD.generation}"], LONG)
        register(*args)

    if rank == 0:
        groups.register = waits_first
    for number in range(1, 4):
        dist.reconfigure_world(number, handles, timeout=LONG)
        store = dist.group.WORLD.get_group_store()
        if rank == 1:
            store.set("of rank 1", "")
            current_store().set(f"written {number}", "")
        else:
            assert store.check(["of rank 1"])
        dist.barrier()


def test_what_others_write_to_the_new_store_stays() -> None:
    run_world(keeps_what_the_others_write, 2, isolated=True)


def keeps_a_former_store(rank, size):
    """The store of an earlier world stays as long as the process that serves it holds it."""
    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle())
    dist.reconfigure_world("first", handles, timeout=LONG)
    former = dist.group.WORLD.get_group_store()
    former.set(f"of {rank}", "")
    for number in range(3):
        dist.reconfigure_world(number, handles, timeout=LONG)
        assert former.check([f"of {other}" for other in range(size)])
        dist.barrier()
    if rank == 0:
        del former
    gc.collect()
    for number in range(3, 5):
        dist.reconfigure_world(number, handles, timeout=LONG)
        dist.barrier()
    assert rank == 0 or not former.list_keys()
    return dist.group.WORLD.get_group_store().num_keys()


def test_a_former_store_stays_while_its_server_holds_it() -> None:
    run_world(keeps_a_former_store, 2, isolated=True)


def meets_after_failures(rank, size, failures):
    """Meetings that rank 0 begins in vain leave nothing once the world has changed."""
    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle())
    for number in range(failures):
        if rank == 0:
            with pytest.raises(dist.CollectiveTimeoutError):
                dist.reconfigure_world(f"in vain {number}", handles, timeout=timedelta(milliseconds=100))
    for number in range(3):
        dist.reconfigure_world(number, handles, timeout=LONG)
        dist.barrier()
    keys = dist.group.WORLD.get_group_store().num_keys()
    dist.barrier()
    return keys


def test_meetings_that_fail_leave_no_keys() -> None:
    without, after = (run_world(meets_after_failures, 2, failures, isolated=True)[0] for failures in (0, 3))
    assert after == without


def the_first_leaves_at_once(rank, size):
    """Rank 0 ends its group while rank 1 has not read yet that all are connected."""
    part = dist.new_group([0, 1])
    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle(part))
    if rank == 1:
        fetch = agreement.fetch

        def fetches_late(store, key, check):
            if key == "connected/outcome":
                time.sleep(0.5)
            return fetch(store, key, check)

        agreement.fetch = fetches_late
    began = time.monotonic()
    part.reconfigure("again", handles, LONG)
    dist.destroy_process_group(part)
    assert time.monotonic() - began < 10
    assert total() == size


def test_a_first_member_may_leave_at_once() -> None:
    run_world(the_first_leaves_at_once, 2, isolated=True)


def the_first_dies_while_ranks_connect(rank, size):
    """Rank 0, whose process serves the meeting, dies once connected; returns how rank 1 breaks its group."""
    part = dist.new_group([0, 1])
    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle(part))
    form, broken = type(part)._form, []

    def connects(self, store, limit, look):
        form(self, store, limit, look)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # until the store has gone
            store.set("alive", "")
            time.sleep(0.01)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(part), "_form", connects)
        patch.setattr(type(part), "_break_for", lambda self, cause: broken.append(cause))
        with pytest.raises(dist.PeerLostError) as lost:
            part.reconfigure("again", handles, LONG)
    assert lost.value.rank == 0
    return type(broken[-1]), broken[-1].rank


def test_ranks_that_connect_are_told_of_a_first_member_that_died() -> None:
    """Those who wait for the one that lost the store with it hear of the death, too."""
    _, told = run_world(the_first_dies_while_ranks_connect, 2, isolated=True, lost=[0])
    assert told == (dist.PeerLostError, 0)


def the_first_changes(rank, size):
    """What rank 0 has served goes once others meet elsewhere."""
    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle())
    if rank == 0:
        with pytest.raises(dist.CollectiveTimeoutError):
            dist.reconfigure_world("in vain", handles, timeout=timedelta(milliseconds=100))
    for number in range(2):
        dist.reconfigure_world(number, handles, timeout=LONG)
        dist.barrier()
    served = dist.group.WORLD._meeting_place._listener.served
    for number in range(2, 5):
        dist.reconfigure_world(number, handles[::-1], timeout=LONG)
        dist.barrier()
    assert (served is None) == (rank > 0)
    return 0 if rank else served.num_keys()


def test_a_first_member_that_is_another_one_later_keeps_no_keys() -> None:
    past = 1
    assert run_world(the_first_changes, 2, isolated=True)[0] <= past


def has_a_member_twice(rank, size):
    """Rank 1 says that it is rank 0 of the world."""
    part = dist.new_group([0, 1])
    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle(part))
    if rank == 1:
        part.set_global_ranks([0, 0])
    with pytest.raises(
        dist.CollectiveMismatchError, match=r"the members \[0, 1\] all say that they are rank 0"
    ):
        part.reconfigure(1, handles)
    assert total() == size


def test_a_group_of_some_ranks_has_none_of_them_twice() -> None:
    run_world(has_a_member_twice, 2, isolated=True)


def grows_after_it_shrank(rank, size, url):
    if rank < 2:
        dist.init_process_group("host", url, LONG, 2, rank)
        dist.barrier()
    if rank == 1:
        current_store().wait(["grown"], LONG)
        dist.destroy_process_group()
        return
    if rank == 0:
        dist.shrink_group([1])
        assert total() == 1
    dist.reconfigure_world("with rank 2", handles_of("all", rank, [0, 2]), timeout=LONG)
    lives(2)
    current_store().set("grown", "")
    dist.destroy_process_group()


def test_a_world_that_has_shrunk_takes_other_members(tmp_path) -> None:
    run_ranks(grows_after_it_shrank, 3, f"file://{tmp_path}/store", isolated=True)


def test_a_world_that_cannot_listen_is_none(monkeypatch) -> None:
    def refuse(*_, **__):
        raise dist.DistNetworkError("no socket, ordered by a test")

    monkeypatch.setattr("collectives.api.reconfiguring.MeetingPlace", refuse)
    with pytest.raises(dist.DistNetworkError, match="ordered by a test"):
        dist.reconfigure_world("u", ["x"])
    assert not dist.is_initialized()
