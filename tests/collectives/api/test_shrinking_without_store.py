"""shrink_group after the death of the rank that served the store: the others serve another one."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
from harness import Died, current_store, run_ranks
from machines import make_machines  # noqa: F401 - a fixture
from ports import free_port
from worlds import total

import collectives as dist
from collectives.secret import SECRET

LONG = timedelta(seconds=30)


def after_deaths(rank, size, backend, url, deaths):
    """Makes a world of which rank 0 serves the store; at each turn a rank of the current world is killed."""
    dist.init_process_group(backend, url, LONG, size, rank)
    for dead in deaths:
        assert total() == dist.get_world_size()
        if dist.get_rank() == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistError):
            total()
        ranks = dist.get_world_size()
        made = dist.shrink_group([dead], shrink_flags=dist.SHRINK_ABORT)
        assert made is dist.group.WORLD
        assert (made.size(), dist.get_process_group_ranks(None)) == (ranks - 1, list(range(ranks - 1)))
    return goes_on()


def goes_on():
    """Uses the world and its store, makes a group in it, and ends it."""
    sums = total()
    part = dist.new_group([0], timeout=LONG)
    alone = total(part) if dist.get_rank() == 0 else 0
    store = dist.group.WORLD.get_group_store()
    store.add("came", 1)
    dist.barrier()
    result = dist.get_rank(), sums, alone, int(store.get("came"))
    dist.destroy_process_group()
    return result


def left(size):
    return [(rank, size, int(rank == 0), size) for rank in range(size)]


@pytest.mark.full
@pytest.mark.parametrize("backend", ["host", "gloo"])
def test_the_first_rank_that_is_left_serves_the_next_store(backend) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    killed, *others = run_ranks(after_deaths, 3, backend, url, [0], isolated=True, lost=[0])
    assert isinstance(killed, Died)
    assert others == left(2)


@pytest.mark.full
def test_every_server_may_die_in_its_turn() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    env = {SECRET: "a secret of the test's ranks"}
    # Rank 0; then the one that came after it; then one that serves nothing.
    deaths = [0, 0, 1]
    results = run_ranks(after_deaths, 5, "host", url, deaths, isolated=True, lost=[0, 1, 3], env=env)
    assert [results[2], results[4]] == left(2)


@pytest.mark.full
def test_the_others_may_be_on_other_machines(make_machines) -> None:  # noqa: F811
    machines = make_machines(2, "1gbit")
    url = f"tcp://{machines.address(0)}:29511"
    results = run_ranks(
        after_deaths, 4, "host", url, [0, 0], isolated=True, lost=[0, 1], machines=(machines, [0, 0, 1, 1])
    )
    assert results[2:] == left(2)


def leaves_out_a_living_server(rank, size, url):
    dist.init_process_group("host", url, LONG, size, rank)
    if rank == 0:
        current_store().wait(["gone on"], LONG)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.shrink_group([0])
    dist.barrier()
    current_store().set("gone on", "")
    return goes_on()


@pytest.mark.full
def test_a_server_that_is_left_out_while_it_lives_takes_its_store_along() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    _, *others = run_ranks(leaves_out_a_living_server, 3, url, isolated=True, lost=[0])
    assert others == left(2)


def keeps_its_store(rank, size, url):
    dist.init_process_group("host", url, LONG, size, rank)
    before = dist.group.WORLD.get_group_store()
    before.set(f"kept/{rank}", "")
    if rank == 1:
        return dist.destroy_process_group()
    dist.shrink_group([1])
    return before.check([f"kept/{rank}"]), goes_on()


def test_the_store_stays_with_a_server_that_stays(tmp_path) -> None:
    for url in (f"tcp://127.0.0.1:{free_port()}", f"file://{tmp_path}/store"):
        first, _, last = run_ranks(keeps_its_store, 3, url)
        assert [first, last] == [(True, one) for one in left(2)]


def next_server_has_died(rank, size, url):
    dist.init_process_group("host", url, LONG, size, rank)
    assert total() == size
    if rank < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLostError):
        total()
    with pytest.raises(dist.PeerLostError, match="rank 1, which was to serve the store"):
        dist.shrink_group([0], shrink_flags=dist.SHRINK_ABORT)
    dist.shrink_group([0, 1], shrink_flags=dist.SHRINK_ABORT)
    return goes_on()


@pytest.mark.full
def test_a_next_server_that_has_died_is_named() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    results = run_ranks(next_server_has_died, 4, url, isolated=True, lost=[0, 1])
    assert results[2:] == left(2)


def a_part_without_its_store(rank, size, url):
    dist.init_process_group("host", url, LONG, size, rank)
    part = dist.new_group([1, 2, 3])
    assert total() == size
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLostError):
        total()
    if rank < 3:
        with pytest.raises(dist.DistError, match="shrink the default group first"):
            dist.shrink_group([2], part)
    dist.destroy_process_group()


@pytest.mark.full
def test_a_part_cannot_shrink_without_the_store() -> None:
    run_ranks(a_part_without_its_store, 4, f"tcp://127.0.0.1:{free_port()}", isolated=True, lost=[0])


def serves_for_all(rank, size):
    """A store of the user's own, which one of the ranks serves."""
    shared = current_store()
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(shared.get("port")), wait_for_workers=False)
    dist.init_process_group("host", None, LONG, size, rank, dist.PrefixStore("mine", store))
    if rank == 1:
        shared.wait(["gone on"], LONG)
        dist.destroy_process_group()
        store.close()
        shared.set("closed", "")
        return None
    dist.shrink_group([1])
    if rank == 0:
        shared.set("gone on", "")
    shared.wait(["closed"], LONG)
    return goes_on()


def test_a_store_of_the_users_own_moves_from_the_rank_that_serves_it() -> None:
    first, _, last = run_ranks(serves_for_all, 3)
    assert [first, last] == left(2)
