"""What is made of the flight records of several ranks."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import table
from harness import current_store, run_ranks
from torch_analyzer import analyzed

import collectives as dist
from collectives.cli import main
from collectives.cli.trace import chrome_trace, clock_offsets, read_files, write_for_torch
from collectives.core.operations import ALL_REDUCE_COALESCED, BARRIER, OPERATIONS
from collectives.core.types import AllreduceOptions

SECOND = 1_000_000_000


def operation(number: int, began: int, ended: int | None, name: str = "all_reduce", **more: Any) -> Any:
    return {
        "number": number,
        "name": name,
        "detail": "SUM",
        "shape": [4],
        "dtype": "float32",
        "tensors": 1,
        "bytes": 16,
        "timeout_seconds": 1800.0,
        "site": "",
        "state": "pending" if ended is None else "done",
        "began_ns": began,
        "ended_ns": ended,
        "error": "",
        **more,
    }


def write(folder: Path, rank: int, operations: Sequence[Any], **more: Any) -> Path:
    """Writes a file as a rank of two would, ten seconds after its machine has started."""
    values = {
        "format": "collectives flight record 1",
        "reason": "a test",
        "rank": rank,
        "process": 100 + rank,
        "host": "node",
        "boot": "one",
        "monotonic_ns": 10 * SECOND,
        "time_ns": 1000 * SECOND,
        "groups": [
            {
                "name": "0",
                "description": "default_pg",
                "backend": "gloo",
                "rank": rank,
                "global_ranks": [0, 1],
                "begun": len(operations),
                "stats": {},
                "operations": operations,
            }
        ],
        **more,
    }
    path = folder / f"flight_{rank}.json"
    path.write_text(json.dumps(values), "utf-8")
    return path


def printed(*words: str, status: int = 0) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["trace", *words]) == status
    return out.getvalue() + err.getvalue()


def events(trace: dict[str, Any]) -> list[tuple[int, int, str, float, float]]:
    return [
        (event["pid"], event["tid"], event["name"], event["ts"], event["dur"])
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]


def test_ranks_of_one_machine_share_its_clock(tmp_path: Path) -> None:
    files = read_files(
        [
            write(tmp_path, 0, [operation(1, 2 * SECOND, 3 * SECOND)]),
            # wrote later, when the wall clock had been set back by a second
            write(
                tmp_path,
                1,
                [operation(1, 2 * SECOND + 1000, 3 * SECOND)],
                monotonic_ns=12 * SECOND,
                time_ns=1001 * SECOND,
            ),
        ]
    )
    assert events(chrome_trace(files)) == [
        (0, 1, "all_reduce", 0.0, 1_000_000.0),
        (1, 1, "all_reduce", 1.0, 999_999.0),
    ]


def test_operations_of_former_members_are_not_compared(tmp_path: Path) -> None:
    """Operations count anew in each generation, and rank 1 may have come later than rank 0."""
    former = [operation(n, n * SECOND, n * SECOND + 1, generation=0) for n in (7, 8)]
    now = [operation(n, (20 + n) * SECOND, (20 + n) * SECOND + 1, generation=2) for n in (1, 2)]
    paths = [write(tmp_path, 0, [*former, *now]), write(tmp_path, 1, now[:1])]
    for path in paths:
        values = json.loads(path.read_text("utf-8"))
        values["groups"][0]["generation"] = 2
        path.write_text(json.dumps(values), "utf-8")
    text = printed(*map(str, paths))
    assert "gloo group '0' of 2, generation 2" in text
    assert "gloo group '0': rank 1 had not begun all_reduce #2" in text


def test_machines_are_aligned_by_what_ends_together(tmp_path: Path) -> None:
    """The second machine started later, and its wall clock is 5 ms fast."""
    shift, fast = 7 * SECOND, 5_000_000
    ends = [2 * SECOND, 3 * SECOND, 4 * SECOND]
    first = [operation(n, end - 1000, end) for n, end in enumerate(ends, 1)]
    second = [operation(n, end - shift - 3000, end - shift) for n, end in enumerate(ends, 1)]
    second.append(operation(4, 5 * SECOND - shift, 6 * SECOND - shift, "broadcast"))
    files = read_files(
        [
            write(tmp_path, 0, [*first, operation(4, 5 * SECOND, 5 * SECOND + 1, "broadcast")]),
            write(
                tmp_path,
                1,
                second,
                boot="two",
                monotonic_ns=10 * SECOND - shift,
                time_ns=1000 * SECOND + fast,
            ),
        ]
    )
    offsets = clock_offsets(files)
    assert offsets["two"] - offsets["one"] == shift
    assert files[0].time - files[0].monotonic == offsets["one"]


def test_operations_that_overlap_lie_apart(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        0,
        [
            operation(1, 1 * SECOND, 4 * SECOND),
            operation(2, 2 * SECOND, 3 * SECOND),
            operation(3, 5 * SECOND, 6 * SECOND, state="failed", error="PeerLostError: rank 1"),
            operation(4, 7 * SECOND, None),
        ],
    )
    assert events(chrome_trace(read_files([path]))) == [
        (0, 1, "all_reduce", 0.0, 3e6),
        (0, 1, "all_reduce (failed)", 4e6, 1e6),
        (0, 1, "all_reduce (pending)", 6e6, 3e6),
        (0, 2, "all_reduce", 1e6, 1e6),
    ]


def test_who_is_behind_is_told(tmp_path: Path) -> None:
    barrier = operation(2, 3 * SECOND, None, "barrier", site="train.py:88 in step")
    paths = [
        write(tmp_path, 0, [operation(1, SECOND, 2 * SECOND), barrier]),
        write(tmp_path, 1, [operation(1, SECOND, 2 * SECOND)]),
    ]
    text = printed(*map(str, paths))
    assert "gloo group '0' of 2  0     0       pending  7.0 s  barrier #2" in text
    assert "called at train.py:88 in step" in text
    assert "gloo group '0': rank 1 had not begun barrier #2" in text
    assert "rank 1 wrote no file that tells whether they began barrier #2" in printed(str(paths[0]))
    assert "\x1b" not in printed(str(write(tmp_path, 0, [operation(1, 1, 2, "\x1b[2J")])))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is no flight record"),
        ("[]", "is no flight record"),
        ("{}", "is no flight record: KeyError: 'format'"),
        (
            '{"format": "collectives flight record 9"}',
            "has the format 'collectives flight record 9', but this version",
        ),
        ('{"format": "collectives flight record 1", "rank": null}', "is no flight record: TypeError"),
        ("[" * 100_000, "is no flight record: RecursionError"),
    ],
)
def test_other_files_are_refused(content: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    assert complaint in printed(str(path), status=1)


def test_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "a", tmp_path / "b"
    one.mkdir()
    other.mkdir()
    assert "are both of rank 0" in printed(str(write(one, 0, [])), str(write(other, 0, [])), status=1)
    assert "cannot be read: No such file" in printed(str(tmp_path / "missing"), status=1)


def each_collective(rank: int, size: int, prefix: str) -> None:
    dist.init_process_group("gloo", store=current_store(), rank=rank, world_size=size)
    pair = dist.new_group([0, 1])
    tensor, issue = torch.ones(2, 3), table.by_functions(dist)
    for operation in OPERATIONS:
        if operation not in {ALL_REDUCE_COALESCED, BARRIER}:
            operands = table.plain(operation, rank, size, 1)
            issue(operation, *operands, op=dist.ReduceOp.SUM, root=1, splits=None)
    dist.barrier()
    if rank < 2:
        assert isinstance(pair, dist.ProcessGroup)
        dist.all_reduce(tensor, group=pair)
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    if rank == 1:
        current_store().wait(["late"])
        dist.dump_flight_record(f"{prefix}{rank}.json")
    else:
        opts = AllreduceOptions(timedelta(milliseconds=300), True)
        with pytest.raises(dist.CollectiveTimeoutError):
            dist.group.WORLD.allreduce(torch.ones(5), opts).wait()
        dist.dump_flight_record(f"{prefix}{rank}.json")
        current_store().set("late", "")


finds_other_backends = pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="this torch's analyzer of flight records knows NCCL only"
)


@finds_other_backends
def test_torch_finds_the_rank_that_did_not_come(tmp_path: Path) -> None:
    prefix = str(tmp_path / "flight_")
    run_ranks(each_collective, 3, prefix, isolated=True)
    folder = tmp_path / "torch"
    paths = [f"{prefix}{rank}.json" for rank in range(3)]
    text = printed(*paths, "--torch", str(folder), "--output", str(tmp_path / "trace.json"))
    begun = len(OPERATIONS)  # a barrier among them, and this one in place of the coalesced
    assert f"gloo group '0': rank 1 had not begun all_reduce #{begun} (SUM, float32 [5])" in text
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2}
    found = analyzed(folder)
    assert {group.size for group in found.groups} == {2, 3}
    good = [one for one in found.collectives if one.pass_check and not one.missing_ranks]
    assert [one for one in found.collectives if one.type_of_mismatch] == []
    assert len(good) == begun
    missing = [one for one in found.collectives if one.missing_ranks]
    assert [(one.collective_seq_id, one.missing_ranks) for one in missing] == [(begun, {1})]


@finds_other_backends
def test_torch_is_given_what_all_rings_hold(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, 0, [operation(n, n * SECOND, n * SECOND + 1) for n in (1, 2, 3)]),
        write(tmp_path, 1, [operation(n, n * SECOND, n * SECOND + 1) for n in (2, 3)]),
    ]
    write_for_torch(read_files(paths), tmp_path / "torch")
    found = analyzed(tmp_path / "torch")
    assert [(one.collective_seq_id, one.pass_check) for one in found.collectives] == [(2, True), (3, True)]
