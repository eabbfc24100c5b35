"""What a world that takes other members withstands: deaths at any moment, many of them, and sleepers."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from census import census, growth, memory_mib
from harness import current_store, run_ranks
from machines import make_machines  # noqa: F401 - a fixture
from worlds import handles_of, meet, total

import collectives as dist
from collectives.backends.host import ProcessGroupHost
from collectives.secret import SECRET
from collectives.store.joining import meeting_place

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=1)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dies(rank, size, victim, moment):
    """A rank dies in a reconfiguration; the others have the same error, and go on without it."""
    handles = handles_of("all", rank, range(size))
    dist.reconfigure_world("first", handles, timeout=LONG)
    assert total() == size
    meet("begun", rank, range(size))
    if rank == victim:
        if moment == "before":
            current_store().wait([f"about to {other}" for other in range(size) if other != rank], LONG)
            time.sleep(0.05)
            die()
        elif moment == "meeting":
            meeting_place.exchange = lambda *_, **__: die()
        elif moment == "forming":
            ProcessGroupHost._form = lambda *_: die()
        else:
            ProcessGroupHost._form = dies_after(ProcessGroupHost._form)
    current_store().set(f"about to {rank}", "")
    with pytest.raises(dist.DistError) as raised:
        dist.reconfigure_world("second", handles, timeout=LONG)
    assert isinstance(raised.value, (dist.PeerLostError, dist.DistNetworkError)), raised.value
    assert raised.value.rank in ((victim, -1) if victim == 0 else (victim,)), raised.value
    with pytest.raises(dist.GroupAbortedError):
        total()
    left = [handle for other, handle in enumerate(handles) if other != victim]
    dist.reconfigure_world("third", left, timeout=LONG)
    assert (total(), total(count=100_000)) == (size - 1, size - 1)
    dist.barrier()
    dist.destroy_process_group()


def dies_after(form):
    def forms_and_dies(*args):
        form(*args)
        die()

    return forms_and_dies


@pytest.mark.full
@pytest.mark.parametrize("moment", ["before", "meeting", "forming", "formed"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_while_the_world_is_reconfigured(victim, moment) -> None:
    run_ranks(dies, 3, victim, moment, isolated=True, lost=[victim])


def fails_once_connected(rank, size, backend):
    """Rank 1 fails, after the others have returned from connecting: all fail, and mend it together."""
    handles = handles_of("all", rank, range(size))
    dist.reconfigure_world("first", handles, backend, LONG)
    form = ProcessGroupHost._form

    def forms_in_vain(*args):
        form(*args)
        current_store().wait([f"formed {other}" for other in range(size) if other != rank], LONG)
        raise dist.DistBackendError("no use", rank)

    def forms(*args):
        form(*args)
        current_store().set(f"formed {rank}", "")

    ProcessGroupHost._form = forms_in_vain if rank == 1 else forms
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="no use") as raised:
        dist.reconfigure_world("second", handles[::-1], timeout=LONG)
    assert raised.value.rank == 1
    assert time.monotonic() - began < 20
    assert (dist.get_rank(), dist.get_world_size(), dist.group.WORLD.generation) == (rank, size, 1)
    for _ in range(2):
        with pytest.raises(dist.GroupAbortedError):
            total()
    ProcessGroupHost._form = form
    dist.reconfigure_world("third", handles[::-1], timeout=LONG)
    assert (total(), dist.get_rank()) == (size, size - 1 - rank)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["host", "round_robin"])
def test_all_members_fail_where_one_fails_once_it_is_connected(backend) -> None:
    run_ranks(fails_once_connected, 3, backend, isolated=True)


def loses_a_machine(rank, size, url, lost):
    dist.init_process_group("host", url, LONG, size, rank)
    handles = handles_of("all", rank, range(size))
    dist.reconfigure_world("first", handles)
    assert total(count=100_000) == size
    meet("begun", rank, range(size))
    if rank in lost:
        current_store().wait([f"waits {other}" for other in range(size) if other not in lost], LONG)
        die()
    current_store().set(f"waits {rank}", "")
    with pytest.raises(dist.PeerLostError) as raised:
        total(count=100_000)
    assert raised.value.rank in lost
    left = [handle for other, handle in enumerate(handles) if other not in lost]
    dist.reconfigure_world("without a machine", left, timeout=LONG)
    assert (total(), total(count=100_000)) == (size - len(lost),) * 2
    part = dist.new_group([0, size - len(lost) - 1], timeout=LONG)  # in the new store
    assert part is dist.GroupMember.NON_GROUP_MEMBER or part.size() == 2
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize("machine", [0, 2])
def test_a_world_loses_a_machine_at_once(make_machines, machine) -> None:  # noqa: F811
    """The first one has the rank that serves every store."""
    machines = make_machines(4, "1gbit")
    url, lost = f"tcp://{machines.address(0)}:29515", [2 * machine, 2 * machine + 1]
    placed = (machines, [0, 0, 1, 1, 2, 2, 3, 3])
    run_ranks(loses_a_machine, 8, url, lost, isolated=True, lost=lost, machines=placed, timeout=100.0)


def sleeps(rank, size, sleeper):
    handles = handles_of("all", rank, range(size))
    dist.reconfigure_world("first", handles, timeout=LONG)
    assert total() == size
    store, others = current_store(), [other for other in range(size) if other != sleeper]
    meet("begun", rank, range(size))
    if rank == sleeper:
        store.set("pid", str(os.getpid()))
        store.wait([f"late {other}" for other in others], LONG)  # in which it is stopped
        for _ in range(2):
            with pytest.raises(dist.GroupAbortedError, match="reconfigures the group"):
                total()
        with pytest.raises(dist.DistError) as late:
            dist.reconfigure_world("all of us", handles, timeout=SHORT)
        assert isinstance(late.value, (dist.GroupAbortedError, dist.CollectiveTimeoutError)), late.value
        store.set("refused", "")
    else:
        if rank == others[0]:
            os.kill(int(store.get("pid")), signal.SIGSTOP)
        meet("stopped", rank, others)
        with pytest.raises(dist.CollectiveTimeoutError) as late:
            dist.reconfigure_world("all of us", handles, timeout=SHORT)
        assert late.value.missing_ranks == (sleeper,)
        dist.reconfigure_world("without it", [handles[other] for other in others], timeout=LONG)
        assert total() == size - 1
        if rank == others[0]:
            os.kill(int(store.get("pid")), signal.SIGCONT)
        store.set(f"late {rank}", "")
        refused = torch.zeros(1)
        while not refused:
            refused = torch.tensor([float(store.check(["refused"]))])
            dist.all_reduce(refused, dist.ReduceOp.MIN)
    meet("awake", rank, range(size))
    dist.reconfigure_world("together", handles, timeout=LONG)
    assert total() == size
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize("sleeper", [0, 1])
def test_a_stopped_rank_that_wakes_gets_an_error_and_harms_nobody(sleeper) -> None:
    run_ranks(sleeps, 3, sleeper, isolated=True)


def newcomer(store, number):
    """A forked process that comes, and is killed while the others wait for it in an all-reduce."""
    store.set(f"newcomer/{number}", dist.get_reconfigure_handle())
    handles = [store.get(f"member/{number}/{rank}").decode() for rank in range(2)]
    dist.reconfigure_world(f"with {number}", [*handles, dist.get_reconfigure_handle()], timeout=LONG)
    assert total() == 3
    threading.Timer(0.002, die).start()
    dist.recv(torch.ones(1), 0)


def nursery(rounds):
    """Forks a process for each round, and keeps none."""
    for number in range(rounds):
        child = os.fork()
        if child == 0:
            try:
                from harness import current_store as of_child

                newcomer(of_child(), number)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def comes_and_goes(rank, size, rounds):
    store = current_store()
    if rank == 2:
        nursery(rounds)
        meet("done", rank, range(size))
        return None
    mine = dist.get_reconfigure_handle()
    before, keys, used = None, 0, 0.0
    for number in range(rounds):
        store.set(f"member/{number}/{rank}", mine)
        handles = [store.get(f"member/{number}/{other}").decode() for other in range(2)]
        handles.append(store.get(f"newcomer/{number}").decode())
        dist.reconfigure_world(f"with {number}", handles, timeout=LONG)
        assert total() == 3
        with pytest.raises(dist.PeerLostError) as lost:
            total(count=100_000)
        assert lost.value.rank == 2
        del lost
        dist.reconfigure_world(f"without {number}", handles[:2], timeout=LONG)
        assert total() == 2
        for other in range(2):
            store.delete_key(f"member/{number}/{other}")
        gc.collect()
        if number == rounds // 4:
            dist.barrier()
            before, keys = census(), dist.group.WORLD.get_group_store().num_keys()
            used = memory_mib()
            dist.barrier()
    dist.barrier()
    now = dist.group.WORLD.get_group_store().num_keys()
    dist.barrier()
    assert now <= keys, (now, keys)
    assert not growth(before), growth(before)
    assert memory_mib() < used + 20, (memory_mib(), used)
    assert dist.group.WORLD.generation == 2 * rounds
    meet("done", rank, range(size))
    dist.destroy_process_group()
    return used


@pytest.mark.full
def test_two_hundred_deaths_and_newcomers_leave_nothing() -> None:
    run_ranks(
        comes_and_goes, 3, 200, isolated=True, timeout=110.0, env={SECRET: "a secret of this test's ranks"}
    )
