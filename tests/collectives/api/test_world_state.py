"""The world's life: beginning, groups of some ranks, end, and the next beginning."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from harness import current_store, run_ranks, run_world
from ports import free_port
from worlds import sum_of_ranks

import collectives as dist
from collectives.store.joining import world_rendezvous

LONG = timedelta(seconds=30)


def one_life_after_another(rank: int, size: int, kind: str, place: str) -> list[float]:
    if kind == "file":
        store: object = torch_dist.FileStore(place, size)
    else:
        store = current_store()
    sums = []
    for life in range(3):
        dist.init_process_group("host", store=store, rank=rank, world_size=size, timeout=LONG)
        if rank == 0:
            dist.group.WORLD.get_group_store().set("life", str(life))
        dist.barrier()
        assert dist.group.WORLD.get_group_store().get("life") == str(life).encode()
        half = dist.new_group([0, 1])
        sums.append(sum_of_ranks() + (sum_of_ranks(half) if rank < 2 else 0))
        dist.destroy_process_group()
        assert not dist.is_initialized()
        assert dist.get_pg_count() == 0
    return sums


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_one_store_serves_several_lives(kind: str, tmp_path: Path) -> None:
    results = run_ranks(one_life_after_another, 3, kind, str(tmp_path / "store"))
    assert results == [[4.0] * 3, [4.0] * 3, [3.0] * 3]


def lives_at_one_address(rank: int, size: int, init_method: str, port: int) -> list[float]:
    sums = []
    for _ in range(3):
        if init_method == "env://":
            os.environ.update(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size)
            )
            dist.init_process_group(timeout=LONG)
        else:
            dist.init_process_group("host", init_method, LONG, size, rank)
        sums.append(sum_of_ranks())
        dist.destroy_process_group()
    return sums


@pytest.mark.parametrize("scheme", ["env", "tcp"])
def test_second_life_at_the_same_address(scheme: str) -> None:
    port = free_port()
    url = "env://" if scheme == "env" else f"tcp://127.0.0.1:{port}"
    env = dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    assert run_ranks(lives_at_one_address, 3, url, port, env=env) == [[3.0] * 3] * 3


def rendezvous_by_file(rank: int, size: int, path: str) -> float:
    sums = 0.0
    for _ in range(2):
        dist.init_process_group("host", f"file://{path}", LONG, size, rank)
        sums += sum_of_ranks()
        dist.destroy_process_group()
    return sums


def test_rendezvous_by_a_file(tmp_path: Path) -> None:
    assert run_ranks(rendezvous_by_file, 2, str(tmp_path / "store")) == [2.0, 2.0]
    # A later run uses the same path.
    assert run_ranks(rendezvous_by_file, 2, str(tmp_path / "store"), isolated=True) == [2.0, 2.0]


def starts_as_it_should(rank: int, size: int) -> None:
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    assert dist.GroupMember.WORLD is None
    dist.destroy_process_group()  # nothing to end
    for function in (dist.get_rank, dist.get_world_size, dist.get_backend, dist.barrier):
        with pytest.raises(ValueError, match="no default process group; call init_process_group first"):
            function()
    with pytest.raises(ValueError, match="there is no default process group"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(ValueError, match="there is no default process group"):
        dist.new_group([0])


def test_before_the_beginning() -> None:
    run_ranks(starts_as_it_should, 1)


def looks_around(rank: int, size: int) -> None:
    world = dist.group.WORLD
    assert dist.is_initialized()
    assert dist.GroupMember.WORLD is world
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size) == (world.rank(), world.size())
    assert dist.get_backend() == "host"
    assert dist.get_backend_config() == "cpu:host"
    assert dist.get_process_group_ranks(None) == list(range(size))
    assert dist.get_pg_count() == 1
    assert world.group_desc == "default_pg"
    assert world.timeout == timedelta(minutes=30)
    with pytest.raises(ValueError, match=r"there is a default process group already .* call destroy_"):
        dist.init_process_group("host", store=current_store(), rank=rank, world_size=size)
    assert sum_of_ranks() == sum(range(size))


def test_probes() -> None:
    run_world(looks_around, 2)


def default_backend(rank: int, size: int, arguments: dict[str, object]) -> tuple[str, str]:
    dist.init_process_group(store=current_store(), rank=rank, world_size=size, **arguments)  # type: ignore[arg-type]
    names = dist.get_backend(), dist.get_backend_config()
    dist.destroy_process_group()
    return names


@pytest.mark.parametrize("arguments", [{}, {"device_id": torch.device("cpu")}])
def test_default_backend_of_the_cpu_is_host(arguments: dict[str, object]) -> None:
    if torch.accelerator.current_accelerator() is not None and not arguments:
        pytest.skip("this machine has an accelerator, which has a backend of its own")
    assert run_ranks(default_backend, 1, arguments) == [("host", "cpu:host")]


# ---- beginnings that fail ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"store": 1, "init_method": "env://"}, "init_method or store, not both"),
        ({"store": 1}, "world_size must be positive, but is -1, and must be given with a store"),
        ({"store": 1, "world_size": 2}, "rank must not be negative, but is -1, and must be given"),
        ({"store": 1, "world_size": 2, "rank": 2}, "rank is 2, but world_size 2 has the ranks 0 to 1"),
        ({"world_size": 0}, "world_size must be positive, but is 0"),
        ({"rank": -2}, "rank must not be negative, but is -2"),
        ({"backend": "hots"}, "unknown backend 'hots'; known are"),
        ({"timeout": timedelta(0)}, "timeout must be positive"),
        ({"device_id": torch.device("cuda")}, "device_id is cuda, but (this machine has|must have an index)"),
    ],
)
def test_wrong_arguments_end_before_anything_is_sent(arguments: dict[str, object], reason: str) -> None:
    if "store" in arguments:
        arguments = {**arguments, "store": torch_dist.HashStore()}
    with pytest.raises(ValueError, match=reason):
        dist.init_process_group(**arguments)  # type: ignore[arg-type]
    assert not dist.is_initialized()


def test_wrong_types_end_before_anything_is_sent() -> None:
    with pytest.raises(TypeError, match=r"store must be a torch.distributed.Store, but is of type dict"):
        dist.init_process_group(store={}, rank=0, world_size=1)
    with pytest.raises(TypeError, match=r"init_method must be a str, but is PosixPath\('/tmp/store'\)"):
        dist.init_process_group(init_method=Path("/tmp/store"), rank=0, world_size=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"timeout must be a datetime.timedelta, but is '1'"):
        dist.init_process_group("host", timeout="1", rank=0, world_size=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"world_size must be an int, but is 1\.0"):
        dist.init_process_group("host", rank=0, world_size=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"device_id must be a torch.device or an int, but is 'cpu'"):
        dist.init_process_group("host", rank=0, world_size=1, device_id="cpu")  # type: ignore[arg-type]


def numbers_of_other_libraries(rank: int, size: int) -> list[int]:
    store = current_store()
    dist.init_process_group("host", store=store, rank=np.int64(rank), world_size=np.int32(size), timeout=LONG)
    # The group's name is made of its members, on each rank from its own list.
    members = np.arange(size) if rank == 0 else list(range(size))
    group = dist.new_group(members, timeout=LONG, use_local_synchronization=True)
    ranks = dist.get_process_group_ranks(group)
    dist.destroy_process_group()
    return ranks


def test_ranks_are_integers_of_any_library() -> None:
    assert run_ranks(numbers_of_other_libraries, 2) == [[0, 1]] * 2


def disagrees(rank: int, size: int) -> str:
    backend = "gloo" if rank == 1 else "host"
    store = current_store()
    with pytest.raises(ValueError, match="the ranks differ in") as caught:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LONG)
    assert not dist.is_initialized()
    # Nothing of the failed try is in the way of the next.
    dist.init_process_group("host", store=store, rank=rank, world_size=size, timeout=LONG)
    assert sum_of_ranks() == sum(range(size))
    dist.destroy_process_group()
    return str(caught.value)


def test_ranks_that_disagree_all_hear_why() -> None:
    for rank, message in enumerate(run_ranks(disagrees, 3)):
        assert message == (
            f"[rank {rank}] init_process_group: the ranks differ in backend: "
            "rank 0 has 'cpu:host', rank 1 has 'cpu:gloo,cuda:gloo'"
        )


def comes_alone(rank: int, size: int) -> tuple[str, float]:
    store = current_store()
    begin = time.monotonic()
    if rank != 2:
        with pytest.raises(dist.DistStoreError) as caught:
            dist.init_process_group("host", None, timedelta(seconds=1), size, rank, store)
        message = str(caught.value)
    else:
        message = ""
    waited = time.monotonic() - begin
    store.set(f"tried{rank}", "")
    store.wait([f"tried{r}" for r in range(size)])
    dist.init_process_group("host", store=store, rank=rank, world_size=size, timeout=LONG)
    total = sum_of_ranks()
    dist.destroy_process_group()
    assert total == sum(range(size))
    return message, waited


def test_rank_that_does_not_come_is_named_and_may_come_later() -> None:
    results = run_ranks(comes_alone, 3)
    for rank in (0, 1):
        message, waited = results[rank]
        assert message.startswith(f"[rank {rank}] init_process_group: rank 2 did not come within 1 s")
        assert waited < 10


def waits_for_rank_0(rank: int, size: int) -> str:
    world_rendezvous._ANSWER_GRACE = timedelta(seconds=0.2)  # how long it listens whether rank 0 says why
    with pytest.raises(dist.DistStoreError) as caught:
        dist.init_process_group(
            "host", store=current_store(), rank=1, world_size=2, timeout=timedelta(milliseconds=100)
        )
    assert not dist.is_initialized()
    return str(caught.value)


def test_rank_0_that_does_not_come() -> None:
    (message,) = run_ranks(waits_for_rank_0, 1, isolated=True)
    assert message.startswith("[rank 1] init_process_group: rank 0 did not answer within 0.1 s")


def comes_twice(rank: int, size: int) -> str:
    store = current_store()
    if rank == 0:
        store.wait(["second"])
        time.sleep(1.5)  # both have asked to join by now, so that the newer one is known
    if rank == 2:
        store.wait(["first"])
    if rank == 1:
        store.set("first", "")
        time.sleep(0.3)
    try:
        if rank == 2:
            time.sleep(0.6)
            store.set("second", "")
        dist.init_process_group("host", store=store, rank=min(rank, 1), world_size=2, timeout=LONG)
    except ValueError as error:
        return str(error)
    total = sum_of_ranks()
    dist.destroy_process_group()
    return str(total)


@pytest.mark.full
def test_two_processes_as_one_rank() -> None:
    first, second, third = run_ranks(comes_twice, 3)
    assert first == "1.0"
    refused = [text for text in (second, third) if "two processes have come as rank 1" in text]
    assert len(refused) == 1
    assert min((second, third), key=len) == "1.0"
