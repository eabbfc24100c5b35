"""What users are told who start a job with a mistake: which one, on every rank, long before the limit."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from harness import run_ranks
from ports import free_port

import collectives
from collectives.store import TCPStore

SECRET, OTHER = "the secret of this job, for its processes", "the secret of quite another job"
FAR = 60.0
"""A limit that nobody should wait for."""
LATE = 0.7


def start(
    index: int,
    count: int,
    layer: str,
    port: int,
    limit: float,
    environments: Sequence[dict[str, str]],
    late: Sequence[int],
) -> tuple[str, str, float]:
    """Starts a process of a job; returns how it ended, and after how many seconds."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **environments[index])
    if index in late:
        time.sleep(LATE)
    began = time.monotonic()
    dist, backend = (collectives, "host") if layer == "ours" else (torch.distributed, "collectives")
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=limit))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - looked at by the test
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def started(
    layer: str, *environments: dict[str, str], limit: float = FAR, late: Sequence[int] = ()
) -> list[Any]:
    port = free_port()
    unset = dict.fromkeys(["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
    return run_ranks(
        start, len(environments), layer, port, limit, environments, late, isolated=True, env={**unset}
    )


def place(rank: int, size: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), **more}


@pytest.mark.parametrize(("layer", "late"), [("ours", (1, 2)), ("torch", (0,))])
def test_a_world_that_rank_0_takes_for_smaller(layer: str, late: Sequence[int]) -> None:
    for kind, text, _ in started(layer, place(0, 2), place(1, 3), place(2, 3), late=late):
        assert kind == "ValueError"
        assert "the ranks differ in world_size: rank 0 has 2, rank 1 has 3" in text


def test_a_world_that_rank_0_takes_for_larger() -> None:
    for kind, text, _ in started("ours", place(0, 4), place(1, 2)):
        assert kind == "ValueError"
        assert "the ranks differ in world_size: rank 0 has 4, rank 1 has 2" in text


@pytest.mark.parametrize("layer", ["ours", pytest.param("torch", marks=pytest.mark.full)])
def test_two_processes_of_one_rank(layer: str) -> None:
    ended = started(layer, place(0, 3), place(1, 3), place(1, 3), limit=6.0, late=(2,))
    for kind, text, _ in ended:
        assert re.search(r"two processes have come as rank 1: \S+ is taken for it, and \S+ refused", text)
        assert kind in {"ValueError", "DistStoreError"}
    refused = [seconds for kind, _, seconds in ended if kind == "ValueError"]
    assert len(refused) == 1
    assert refused[0] < 5.0
    assert sum("rank 2 did not come within 6 s" in text for _, text, _ in ended) == 2


def test_two_processes_of_rank_0() -> None:
    ended = started("ours", place(0, 2), place(0, 2), limit=3.0)
    assert sum("EADDRINUSE" in text and "another process with RANK=0" in text for _, text, _ in ended) == 1
    assert sum("rank 1 did not come within 3 s" in text for _, text, _ in ended) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layer", "others", "at"),
    [
        ("ours", {"COLLECTIVES_SECRET": OTHER}, 1),
        ("ours", {}, 0),
        ("torch", {"COLLECTIVES_SECRET": OTHER}, 0),
        ("torch", {}, 1),
    ],
)
def test_one_rank_with_another_secret_or_none(layer: str, others: dict[str, str], at: int) -> None:
    environments = [
        place(rank, 3, **({"COLLECTIVES_SECRET": SECRET} if rank != at else others)) for rank in range(3)
    ]
    # Our server lets no stranger end the job, so that those who are right wait for those who are not.
    ended = started(layer, *environments, limit=8.0 if layer == "ours" else FAR)
    for _, text, _ in ended:
        assert "COLLECTIVES_SECRET" in text, text
        assert "limit 0" not in text
        assert OTHER not in text
        assert SECRET not in text
    if layer == "ours":
        refused = [1, 2] if at == 0 else [at]
        assert max(ended[rank][2] for rank in refused) < 7.0
        assert re.search(r"It has refused .* from 127\.0\.0\.1, (without|of|or with)", ended[0][1])
        assert "did not come within 8 s" in ended[0][1]


def test_a_refusal_is_told_long_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    server = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("COLLECTIVES_SECRET", OTHER)
    began = time.monotonic()
    with pytest.raises(collectives.DistNetworkError, match="is not trusted: it closed the connection before"):
        join_as_rank_1(server.port, 20.0)
    assert time.monotonic() - began < 15.0
    server.close()


def test_a_server_that_never_comes_is_told_with_the_real_time() -> None:
    with pytest.raises(collectives.DistNetworkError) as caught:
        join_as_rank_1(free_port(), 1.5)
    found = re.search(r"gave up after ([\d.]+) s \(limit 1\.5 s\) and (\d+) attempts", str(caught.value))
    assert found is not None, caught.value
    assert float(found[1]) >= 1.4
    assert int(found[2]) >= 3


def test_a_server_that_ends_and_does_not_come_again() -> None:
    """The first cause is told, too."""
    server = TCPStore("127.0.0.1", 0, is_master=True)

    class Ends(threading.Thread):
        def run(self) -> None:
            server.wait(["collectives/join/attempt/1"])
            server.close()

    ends = Ends()
    ends.start()
    with pytest.raises(collectives.DistNetworkError) as caught:
        join_as_rank_1(server.port, 2.0)
    ends.join()
    text = str(caught.value)
    assert text.startswith("[rank 1] init_process_group: the store has failed before rank 0 has answered")
    assert "look at rank 0" in text
    assert text.endswith("no other server has come within the limit of 2 s")


def test_a_service_that_is_no_store_is_told_from_nobody_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(collectives.DistNetworkError, match="what listens there does not answer: another"):
            join_as_rank_1(port, 0.6)


@pytest.mark.parametrize("address", ["http://127.0.0.1", "127.0.0.1:29500", "[::1]", "host/"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_with_more_than_the_address(
    address: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match="MASTER_ADDR must be a name or an address alone, is '"):
        collectives.init_process_group("host", rank=rank, world_size=2)


def test_a_url_without_a_scheme() -> None:
    with pytest.raises(ValueError, match=r"No rendezvous handler .* Is tcp://127\.0\.0\.1:29500 meant\?"):
        collectives.init_process_group("host", "127.0.0.1:29500", rank=0, world_size=2)


def test_where_ranks_that_are_missing_should_have_come(tmp_path: Path) -> None:
    short = timedelta(milliseconds=100)
    url = f"tcp://192.0.2.7:{free_port()}"
    with pytest.raises(collectives.DistStoreError, match="which is no address of rank 0's machine"):
        collectives.init_process_group("host", url, short, world_size=2, rank=0)
    with pytest.raises(collectives.DistStoreError, match=r"The store is the file /.*/store, which all ranks"):
        collectives.init_process_group("host", f"file://{tmp_path}/store", short, world_size=2, rank=0)
    for store in (collectives.HashStore(), torch.distributed.HashStore()):
        with pytest.raises(collectives.DistStoreError, match="HashStore, which no other process reaches"):
            collectives.init_process_group("host", None, short, world_size=2, rank=0, store=store)


def join_as_rank_1(port: int, limit: float) -> None:
    collectives.init_process_group(
        "host", f"tcp://127.0.0.1:{port}", timedelta(seconds=limit), world_size=2, rank=1
    )


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("collectives", "host"),
        ("cpu:Collectives", "host"),
        ("collectives_mpi", "mpi"),
        ("collectives_round_robin", "round_robin"),
    ],
)
def test_the_name_of_torch_for_a_backend_is_refused_with_its_own(name: str, own: str) -> None:
    with pytest.raises(ValueError, match=f"is what torch.distributed calls '{own}', its name here"):
        collectives.init_process_group(name, store=collectives.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("name", ["collectives_round_robin:3", "round_robin:3"])
def test_the_number_of_lanes_in_a_name_is_refused_with_the_option(name: str) -> None:
    with pytest.raises(ValueError, match=r"with the number of lanes as pg_options=\{'lanes': 3\}"):
        collectives.init_process_group(name, store=collectives.HashStore(), rank=0, world_size=1)
    options = {"lanes": 3}
    store = collectives.HashStore()
    collectives.init_process_group("round_robin", store=store, rank=0, world_size=1, pg_options=options)
    collectives.destroy_process_group()


def ask_torch_for(rank: int, size: int, name: str) -> str:
    assert not torch.distributed.is_backend_available("host")
    store = torch.distributed.HashStore()
    with pytest.raises(ValueError, match=r"is known to collectives\.init_process_group") as caught:
        torch.distributed.init_process_group(name, store=store, rank=rank, world_size=size)
    assert not torch.distributed.is_initialized()
    torch.distributed.init_process_group("collectives", store=store, rank=rank, world_size=size)
    torch.distributed.destroy_process_group()
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Device capability of")
@pytest.mark.parametrize(
    ("name", "in_torch"),
    [
        ("host", "collectives"),
        ("cpu:host,cuda:nccl", "collectives"),
        ("ROUND_ROBIN", "collectives_round_robin"),
    ],
)
def test_a_name_of_ours_is_refused_by_torch_with_its_own(name: str, in_torch: str) -> None:
    (text,) = run_ranks(ask_torch_for, 1, name, isolated=True)
    assert text.endswith(f"torch.distributed calls it {in_torch!r}")


def use_the_world_of_torch(rank: int, size: int, backend: str) -> list[str]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    told = []
    for function in (
        lambda: collectives.all_reduce(torch.ones(2)),
        collectives.get_rank,
        collectives.barrier,
        lambda: collectives.new_group([0]),
        lambda: collectives.all_gather_object([None], 1),
    ):
        with pytest.raises(ValueError, match=r"is no default process group; torch\.distributed") as caught:
            function()
        told.append(str(caught.value))
    if backend == "collectives":
        collectives.all_reduce(torch.ones(2), group=torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()
    with pytest.raises(ValueError, match="there is no default process group; call init_process_group first"):
        collectives.barrier()
    return told


@pytest.mark.parametrize(
    ("backend", "way_out"),
    [
        ("collectives", "with 'collectives': pass group=torch.distributed.group.WORLD, or call its own"),
        ("gloo", "with 'gloo': call torch.distributed.init_process_group(\"collectives\") instead"),
    ],
)
def test_without_a_world_of_ours_the_way_to_that_of_torch_is_told(backend: str, way_out: str) -> None:
    (told,) = run_ranks(use_the_world_of_torch, 1, backend, isolated=True)
    for text in told:
        assert way_out in text
