"""What the flight record shows of operations that the C++ core carries out by itself, here of ``host``."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from harness import Died, current_store, run_ranks
from waiting import until

import collectives as dist
from collectives.core.operations import ALL_REDUCE
from collectives.core.recording.dump import FILE_VARIABLE
from collectives.core.types import AllreduceOptions
from collectives.registry.backends import GroupOptions, create_group


def alone(name: str = "alone") -> dist.ProcessGroup:
    options = GroupOptions(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60), group_name=name)
    return create_group("host", options)


def many_kinds(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    before = time.monotonic_ns()
    group.allreduce(torch.ones(2, 3), dist.ReduceOp.MAX).wait()
    group.reduce(torch.ones(5, dtype=torch.int16), root=1).wait()
    group.broadcast(torch.ones(4), root=1).wait()
    group.allgather([[torch.ones(3) for _ in range(size)]], [torch.ones(3)]).wait()
    group.all_gather_single(torch.ones(4 * size), torch.ones(4)).wait()
    group.reduce_scatter_single(torch.ones(2), torch.ones(2 * size)).wait()
    group.barrier().wait()
    queued = [group.allreduce(torch.ones(7), AllreduceOptions(asyncOp=True)) for _ in range(2)]
    for work in queued:
        work.wait()
    if rank == 0:
        group.send([torch.ones(6)], 1, 7).wait()
    elif rank == 1:
        group.recv([torch.ones(6)], 0, 7).wait()
    kept = group.flight_record.operations()
    shown = [(one.number, one.name, one.detail, one.shape, one.dtype, one.tensors) for one in kept]
    message = ("send", "to rank 1, tag 7") if rank == 0 else ("recv", "from rank 0, tag 7")
    assert shown == [
        (1, "all_reduce", "MAX", (6,), "float32", 1),
        (2, "reduce", "SUM, root 1", (5,), "int16", 1),
        (3, "broadcast", "root 1", (4,), "float32", 1),
        (4, "all_gather", "", (3,), "float32", size),
        (5, "all_gather", "", (4,), "float32", size),
        (6, "reduce_scatter", "SUM", (2,), "float32", 1),
        (7, "barrier", "", None, "", 0),
        (8, "all_reduce", "SUM", (7,), "float32", 1),
        (9, "all_reduce", "SUM", (7,), "float32", 1),
        *([(1, *message, (6,), "float32", 1)] if rank < 2 else []),
    ]
    assert {one.state for one in kept} == {"done"}
    assert {one.timeout for one in kept} == {timedelta(seconds=60)}
    assert [one.nbytes for one in kept[:5]] == [24, 10, 16, 12 * size, 16 * size]
    moments = [before, *(moment for one in kept for moment in (one.began, one.ended)), time.monotonic_ns()]
    assert moments == sorted(moments)
    assert "test_core_operations.py" in kept[7].site  # of those that the caller did not wait in
    totals = group.stats()
    assert {name: values["count"] for name, values in totals.items() if name not in {"send", "recv"}} == {
        "all_reduce": 3,
        "reduce": 1,
        "broadcast": 1,
        "all_gather": 2,
        "reduce_scatter": 1,
        "barrier": 1,
    }
    assert (totals["all_reduce"]["bytes"], totals["all_reduce"]["errors"]) == (24 + 2 * 28, 0)
    assert totals["all_reduce"]["seconds"] > 0
    assert group.flight_record.begun == len(kept)


def test_operations_of_all_kinds_are_shown() -> None:
    run_ranks(many_kinds, 3, backend="host", group_timeout=timedelta(seconds=60))


def test_fast_calls_are_shown_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_FLIGHT_RECORD", "4")
    dist.init_process_group("host", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(3):
            dist.barrier()
        dist.all_reduce(torch.ones(3))
        work = dist.broadcast(torch.ones(2, dtype=torch.int64), 0, async_op=True)
        assert work is not None
        work.wait()
        group = dist.flight_record()["groups"][-1]
        assert (group["backend"], group["begun"]) == ("host", 5)
        shown = [(one["number"], one["name"], one["shape"], one["state"]) for one in group["operations"]]
        assert shown == [
            (2, "barrier", None, "done"),
            (3, "barrier", None, "done"),
            (4, "all_reduce", [3], "done"),
            (5, "broadcast", [2], "done"),
        ]
        assert group["stats"]["barrier"]["count"] == 3
        assert 'backend="host",rank="0",operation="barrier"} 3' in dist.prometheus_text()
    finally:
        dist.destroy_process_group()


def test_none_are_kept_where_none_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_FLIGHT_RECORD", "0")
    group = alone()
    group.barrier().wait()
    assert group.flight_record.operations() == []
    assert group.flight_record.begun == 1
    assert group.stats()["barrier"]["count"] == 1
    group.shutdown()


def test_the_record_outlives_its_group() -> None:
    group = alone()
    group.barrier().wait()
    group.shutdown()
    with pytest.raises(dist.DistError):
        group.barrier()
    assert [one.name for one in group.flight_record.operations()] == ["barrier"]


def test_the_first_error_of_a_message_writes_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "flight_"))
    monkeypatch.setenv("COLLECTIVES_FLIGHT_RECORD", "0")  # the text of the error is known all the same
    group = alone("in vain")
    group.set_timeout(timedelta(milliseconds=20))
    for _ in range(2):
        with pytest.raises(dist.CollectiveTimeoutError):
            group.recv([torch.ones(3)], 0, 5).wait()
        [file] = tmp_path.iterdir()
        told = json.loads(file.read_text())["reason"]
        assert told.startswith("CollectiveTimeoutError: [rank 0] host group 'in vain' of 1")
        file.write_text(json.dumps({"reason": told}))  # only the first error writes
    assert group.stats()["recv"]["errors"] == 2
    group.shutdown()


def dies(group: dist.ProcessGroup, prefix: str) -> None:
    group.allreduce(torch.ones(3)).wait()
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLostError):
        group.fast_collective(ALL_REDUCE.opcode, torch.ones(3))
    dumped = json.loads(Path(f"{prefix}0.json").read_text())
    failed = dumped["groups"][0]["operations"][-1]
    assert (failed["number"], failed["name"], failed["state"]) == (2, "all_reduce", "failed")
    assert failed["error"].startswith("PeerLostError: [rank 0] host group")
    assert dumped["reason"] == failed["error"]


def test_the_death_of_a_rank_writes_a_file(tmp_path: Path) -> None:
    prefix = str(tmp_path / "flight_")
    env = {FILE_VARIABLE: prefix}
    results = run_ranks(dies, 2, prefix, backend="host", isolated=True, lost=[1], env=env)
    assert results[1] == Died(-signal.SIGKILL)


def late(group: dist.ProcessGroup) -> None:
    store = current_store()
    if group.rank() == 0:
        work = group.allreduce(torch.ones(3), AllreduceOptions(asyncOp=True))
        second = group.allreduce(torch.ones(4), AllreduceOptions(asyncOp=True))
        until(group.flight_record.operations)
        [one] = group.flight_record.operations()  # the second has not begun
        assert (one.name, one.state, one.ended) == ("all_reduce", "pending", 0)
        assert group.stats()["all_reduce"]["count"] == 1
        receive = group.recv([torch.ones(2)], 1, 9)
        assert [one.state for one in group.flight_record.operations()] == ["pending"] * 2
        store.set("seen", "")
        for each in (work, second, receive):
            each.wait()
        assert [one.state for one in group.flight_record.operations()] == ["done"] * 3
    else:
        store.wait(["seen"])
        for count in (3, 4):
            group.allreduce(torch.ones(count)).wait()
        group.send([torch.ones(2)], 0, 9).wait()


def test_what_waits_is_pending() -> None:
    run_ranks(late, 2, backend="host")
