"""Functions and stores take a ``timedelta`` as their time limit, as ``torch.distributed``, and no number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from harness import run_world
from torch_world import run_torch

import collectives as dist
from collectives import dist2
from collectives.store import rendezvous

WRONG = (5, 2.5, True, "5", b"")
WORDS = r"timeout must be a datetime\.timedelta, but is "

Taker = Callable[[Any], object]


def refuse(takers: dict[str, Taker], *wrong: object) -> None:
    """Checks that each refuses numbers with TypeError, and ``wrong`` with ValueError."""
    for name, take in takers.items():
        for limit in WRONG:
            with pytest.raises(TypeError, match=WORDS):
                pytest.fail(f"{name} takes {limit!r}: {take(limit)}")
        for limit in wrong:
            with pytest.raises(ValueError, match=r"timeout must be positive, but is (0|-1) s"):
                pytest.fail(f"{name} takes {limit!r}: {take(limit)}")


NEVER = (timedelta(0), timedelta(seconds=-1))


def functions(rank: int, size: int) -> None:
    x = torch.ones(2)
    halves = [[0], [1]]
    refuse(
        {
            "new_group": lambda limit: dist.new_group([0, 1], timeout=limit),
            "new_group of one": lambda limit: dist.new_group([rank], timeout=limit),
            "new_subgroups": lambda limit: dist.new_subgroups(1, timeout=limit),
            "by enumeration": lambda limit: dist.new_subgroups_by_enumeration(halves, timeout=limit),
            "split_group": lambda limit: dist.split_group(split_ranks=halves, timeout=limit),
            "barrier": lambda limit: dist.barrier(timeout=limit),
        },
        *NEVER,
    )
    for limit in (5, True, "5"):  # a float is seconds, with a warning, as torch.distributed has it
        with pytest.raises(TypeError, match=WORDS):
            dist.monitored_barrier(timeout=limit)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"timeout is 30\.5, taken as seconds"):
        dist.monitored_barrier(timeout=30.5)
    dist.all_reduce(x)
    assert x.tolist() == [2, 2]
    assert dist.new_group([0, 1], timeout=timedelta.max) is not None


def test_functions() -> None:
    run_world(functions, 2)


def test_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # nobody serves it
    place = f"file://{tmp_path}/world"
    refuse(
        {
            "init_process_group": lambda limit: dist.init_process_group("host", timeout=limit),
            "of gloo": lambda limit: dist.init_process_group("gloo", timeout=limit),
            "at a file": lambda limit: dist.init_process_group(
                "host", place, rank=1, world_size=2, timeout=limit
            ),
            "dist2": lambda limit: dist2.new_group("host", limit, "cpu"),
        }
    )
    refuse({"init_process_group": lambda limit: dist.init_process_group("host", timeout=limit)}, *NEVER)
    refuse({"dist2": lambda limit: dist2.new_group("host", limit, "cpu")}, *NEVER)
    urls = ("env://", f"{place}?rank=0&world_size=1", "tcp://127.0.0.1:1?rank=1&world_size=2")
    refuse({url: lambda limit, url=url: next(rendezvous(url, timeout=limit)) for url in urls})
    assert not dist.is_initialized()


@pytest.fixture(params=["tcp", "file", "hash", "prefix", "torch's"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dist.Store]:
    made: dist.Store
    if request.param == "tcp":
        made = dist.TCPStore("127.0.0.1", 0, 1, True)
    elif request.param == "file":
        made = dist.FileStore(str(tmp_path / "store"))
    elif request.param == "hash":
        made = dist.HashStore()
    else:
        made = dist.PrefixStore("a", torch_dist.HashStore() if "torch" in request.param else dist.HashStore())
    yield made
    made.close()


def test_stores(store: dist.Store) -> None:
    store.set("key", "value")
    refuse(
        {
            "wait": lambda limit: store.wait(["key"], limit),
            "barrier": lambda limit: store.barrier("barrier", 1, limit),
            "set_timeout": store.set_timeout,
        }
    )
    refuse({"TCPStore": lambda limit: dist.TCPStore("127.0.0.1", 1, 1, False, limit)})
    for limit in (*NEVER, timedelta.max, None):
        store.wait(["key"], limit)


def through_torch(rank: int, size: int) -> None:
    x = torch.ones(2)
    group = torch_dist.group.WORLD
    assert group is not None
    works = [torch_dist.all_reduce(x.clone(), async_op=True), torch_dist.barrier(async_op=True)]
    other = torch.ones(2)
    ops = [
        torch_dist.P2POp(torch_dist.isend, x, 1 - rank),
        torch_dist.P2POp(torch_dist.irecv, other, 1 - rank),
    ]
    works += torch_dist.batch_isend_irecv(ops)
    refuse({f"wait of {work!r}": work.wait for work in works if work is not None})
    refuse({"set_timeout": group.set_timeout}, *NEVER)  # type: ignore[attr-defined]
    refuse({"monitored_barrier": group.monitored_barrier})
    with pytest.raises(TypeError, match="timedelta"):  # by torch itself
        torch_dist.new_group([0, 1], timeout=5)  # type: ignore[arg-type]
    for limit in (*NEVER, timedelta.max, None):
        for work in works:
            assert work.wait(*([] if limit is None else [limit]))
    torch_dist.all_reduce(x)
    assert x.tolist() == [2, 2]


def test_through_torch() -> None:
    run_torch(through_torch, 2)
