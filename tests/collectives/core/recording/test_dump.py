"""What dumps of the flight record hold, and when they are written."""

from __future__ import annotations

import gc
import json
import os
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from harness import current_store, run_ranks

import collectives as dist
from collectives.core.recording.dump import dump_at_error
from collectives.core.types import AllreduceOptions
from collectives.registry.backends import GroupOptions, create_group


def alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def pending_and_done(rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=current_store(), rank=rank, world_size=size)
    pair = dist.new_group([1, 2])
    dist.all_reduce(torch.ones(2, 3), dist.ReduceOp.MAX)
    if rank:
        assert isinstance(pair, dist.ProcessGroup)
        assert pair.global_ranks == (1, 2)
        dist.send(torch.ones(5), 2, pair, tag=7) if rank == 1 else dist.recv(torch.ones(5), 1, pair, tag=7)
    store = current_store()
    if rank == 2:
        store.wait(["seen 0", "seen 1"])
    work = dist.broadcast(torch.ones(4, dtype=torch.int16), 2, async_op=True)
    assert work is not None
    dumped = dist.flight_record()
    world = dumped["groups"][0]
    assert (dumped["rank"], dumped["process"]) == (rank, os.getpid())
    assert (world["backend"], world["rank"], world["global_ranks"]) == ("gloo", rank, [0, 1, 2])
    first, last = world["operations"][0], world["operations"][-1]
    assert (first["number"], first["name"], first["detail"]) == (1, "all_reduce", "MAX")
    assert (first["shape"], first["dtype"], first["bytes"]) == ([2, 3], "float32", 24)
    assert first["state"] == "done"
    assert first["began_ns"] < first["ended_ns"] <= last["began_ns"] <= dumped["monotonic_ns"]
    assert (last["name"], last["detail"], last["bytes"]) == ("broadcast", "root 2", 8)
    if rank < 2:
        assert (last["state"], last["ended_ns"]) == ("pending", None)
    store.set(f"seen {rank}", "")
    work.wait()
    assert dist.flight_record()["groups"][0]["operations"][-1]["state"] == "done"
    if rank:
        message = dumped["groups"][1]["operations"][-1]
        name, detail = ("send", "to rank 1, tag 7") if rank == 1 else ("recv", "from rank 0, tag 7")
        assert (message["name"], message["detail"], message["state"]) == (name, detail, "done")
    dist.destroy_process_group()
    del pair, work
    gc.collect()
    assert dist.flight_record()["groups"] == []


def test_operations_of_all_groups_are_shown() -> None:
    run_ranks(pending_and_done, 3, isolated=True)


def first_error(rank: int, size: int, prefix: str, backend: str) -> None:
    dist.init_process_group(backend, store=current_store(), rank=rank, world_size=size)
    dist.barrier()
    if rank == 0:
        late = dist.group.WORLD.allreduce(torch.ones(3), AllreduceOptions(timedelta(milliseconds=200), True))
        with pytest.raises(dist.CollectiveTimeoutError):
            late.wait()
        dumped = json.loads(Path(f"{prefix}0.json").read_text())
        failed = dumped["groups"][0]["operations"][-1]
        assert (failed["name"], failed["state"]) == ("all_reduce", "failed")
        assert failed["error"].startswith(f"CollectiveTimeoutError: [rank 0] {backend} group")
        assert dumped["reason"] == failed["error"]
        assert dist.group.WORLD.stats()["all_reduce"]["errors"] == 1
        current_store().set("seen", "")
    else:
        current_store().wait(["seen"])
        assert not Path(f"{prefix}1.json").exists()  # no operation of it has failed


@pytest.mark.parametrize("backend", ["gloo", "host"])
def test_the_first_error_writes_a_file(backend: str, tmp_path: Path) -> None:
    prefix = str(tmp_path / "flight")
    run_ranks(first_error, 2, prefix, backend, isolated=True, env={"COLLECTIVES_FLIGHT_RECORD_FILE": prefix})


def test_a_file_that_cannot_be_written_changes_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COLLECTIVES_FLIGHT_RECORD_FILE", str(tmp_path / "missing" / "flight"))
    dump_at_error("a test")
    assert "could not be written" in caplog.text


def test_files_are_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone()
    try:
        dist.all_reduce(torch.ones(3))
        file = tmp_path / "record.json"
        file.write_text("x" * 100_000)
        assert dist.dump_flight_record(file) == file
        assert json.loads(file.read_text())["groups"][-1]["operations"][0]["name"] == "all_reduce"
        monkeypatch.setenv("COLLECTIVES_FLIGHT_RECORD_FILE", str(tmp_path / "of_rank_"))
        assert dist.dump_flight_record() == tmp_path / "of_rank_0.json"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["of_rank_0.json", "record.json"]
        monkeypatch.delenv("COLLECTIVES_FLIGHT_RECORD_FILE")
        with pytest.raises(ValueError, match="pass one, or set COLLECTIVES_FLIGHT_RECORD_FILE"):
            dist.dump_flight_record()
        with pytest.raises(FileNotFoundError):
            dist.dump_flight_record(tmp_path / "missing" / "record.json")
    finally:
        dist.destroy_process_group()


def test_tensors_are_not_kept() -> None:
    alone()
    try:
        tensor = torch.ones(3)
        watched = weakref.ref(tensor)
        dist.all_reduce(tensor)
        dist.all_gather([tensor], torch.ones(3))
        del tensor
        gc.collect()
        assert watched() is None
        assert len(dist.flight_record()["groups"][-1]["operations"]) == 2
    finally:
        dist.destroy_process_group()


def test_prometheus_gets_counters() -> None:
    options = GroupOptions(dist.HashStore(), 0, 1, group_name='of "all"')
    group = create_group("gloo", options)
    for _ in range(3):
        group.allreduce(torch.ones(4)).wait()
    lines = dist.prometheus_text().splitlines()
    group.shutdown()
    labels = '{group="of \\"all\\"",backend="gloo",rank="0",operation="all_reduce"}'
    assert f"collectives_operations_total{labels} 3" in lines
    assert f"collectives_bytes_total{labels} 48" in lines
    assert f"collectives_errors_total{labels} 0" in lines
    assert "# TYPE collectives_seconds_total counter" in lines
    assert [line for line in lines if line.startswith(f"collectives_seconds_total{labels} 0.")]


def sums_of_lanes(group: dist.ProcessGroup) -> None:
    for _ in range(3):
        group.allreduce(torch.ones(4)).wait()
    assert group.stats()["all_reduce"]["count"] == 3
    shown = [one["name"] for one in dist.flight_record()["groups"] if one["operations"]]
    assert [name.rpartition("/")[2] for name in shown] == ["lane0", "lane1"]


@pytest.mark.parametrize("backend", ["gloo", "host"])
def test_compositions_show_as_their_lanes(backend: str) -> None:
    options = {"lanes": 2, "backend": backend}
    run_ranks(sums_of_lanes, 2, backend="round_robin", pg_options=options, isolated=True)


def test_a_group_that_takes_members_is_dumped() -> None:
    group = create_group("host", GroupOptions(dist.HashStore(), 0, 1))
    group._count_as(2, 3, 1)  # as before it is connected with them
    assert dist.flight_record()["rank"] == 2
    group._count_as(0, 1, 0)
    group.shutdown()
