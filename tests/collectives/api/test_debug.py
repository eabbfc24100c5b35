"""Debug levels, groups that compare what their ranks call, and the breakpoint."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from conformance import table
from conformance.oracle import Report
from harness import current_store, run_ranks

import collectives as dist
from collectives.core.checked_group import CheckedGroup
from collectives.core.operations import ALL_REDUCE_COALESCED, BARRIER, OPERATIONS
from collectives.store.joining import agreement
from collectives.store.records import publish
from collectives.store.waiting import wait_for_keys

pytestmark = pytest.mark.usefixtures("preloaded_python")

LONG = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    level, logger = dist.get_debug_level(), logging.getLogger("collectives")
    log_level, handlers = logger.level, list(logger.handlers)
    yield
    dist.set_debug_level(level)
    logger.setLevel(log_level)
    logger.handlers = handlers


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [level.name for level in dist.DebugLevel] == ["OFF", "INFO", "DETAIL"]
    for text, level in (("INFO", 1), ("detail", 2), ("OFF", 0), ("", 0)):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", text)
        dist.set_debug_level_from_env()
        assert dist.get_debug_level() == level
    dist.set_debug_level(dist.DebugLevel.INFO)
    assert dist.get_debug_level() is dist.DebugLevel.INFO
    dist.set_debug_level(torch_dist.DebugLevel.DETAIL)
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "LOUD")
    with pytest.raises(ValueError, match="must be OFF, INFO or DETAIL, but is 'LOUD'"):
        dist.set_debug_level_from_env()
    with pytest.raises(TypeError, match="level must be a DebugLevel, but is 2 of type int"):
        dist.set_debug_level(2)
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL


@pytest.mark.parametrize(
    ("chosen", "level", "logged"),
    [
        ("ERROR", dist.DebugLevel.DETAIL, logging.ERROR),
        ("WARNING", dist.DebugLevel.INFO, logging.WARNING),
        ("INFO", dist.DebugLevel.OFF, logging.INFO),
        ("INFO", dist.DebugLevel.INFO, logging.DEBUG),
        ("INFO", dist.DebugLevel.DETAIL, 5),
    ],
)
def test_log_level_follows_both_variables(
    chosen: str, level: dist.DebugLevel, logged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", chosen)
    dist.set_debug_level(level)
    assert logging.getLogger("collectives").level == logged
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    dist.set_debug_level(dist.DebugLevel.OFF)
    assert logging.getLogger("collectives").level == logged


# ---- groups that compare -------------------------------------------------------------------------


def begin(rank: int, size: int, timeout: timedelta = LONG) -> dist.ProcessGroup:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.init_process_group("gloo", store=current_store(), rank=rank, world_size=size, timeout=timeout)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    group = dist.group.WORLD
    assert isinstance(group, CheckedGroup)
    return group


def agree(rank: int, size: int) -> None:
    group = begin(rank, size)
    assert (group.name(), dist.get_backend(), group.backend_type) == (
        "gloo",
        "gloo",
        group.inner.backend_type,
    )
    group.set_timeout(timedelta(seconds=40))
    assert group.inner.timeout == timedelta(seconds=40)
    one = torch.ones(2)
    report = Report(group)
    for turn in range(2):
        for operation in OPERATIONS:
            uneven = "little" if turn and operation in table.UNEVEN else ""
            case = table.Case(operation, 1, size, torch.float32, 2, "dense", uneven=uneven)
            if operation not in {BARRIER, ALL_REDUCE_COALESCED}:
                table.run(report, case, table.by_functions(dist), rank, [])
        dist.barrier()
        dist.monitored_barrier()
        if rank == 1:
            dist.batch_isend_irecv([dist.P2POp(dist.isend, one, 0)])[0].wait()
        assert rank != 0 or dist.recv(torch.empty(2)) == 1
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, "x" * rank)
        assert objects == ["x" * r for r in range(size)]
    report.finish(10)
    left = [key for key in group.get_group_store().list_keys() if key.startswith("check/")]
    assert len(left) <= 2 * size + 3  # what was compared is deleted, but for the last call of each rank
    dist.destroy_process_group()


def test_calls_that_agree_run() -> None:
    run_ranks(agree, 3)


def differ(rank: int, size: int) -> dict[str, str]:
    """Returns what each call raises that the ranks make differently; the group goes on after each."""
    group = begin(rank, size)
    tensor = torch.full((2,), float(rank))
    odd = rank == 1
    calls: dict[str, Callable[[], Any]] = {
        "function": lambda: dist.barrier() if odd else dist.all_reduce(tensor),
        "shape": lambda: dist.all_reduce(torch.ones(2, 1) if odd else tensor),
        "dtype": lambda: dist.all_reduce(tensor.int() if odd else tensor),
        "op": lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        "root": lambda: dist.broadcast(tensor, rank % 2),
        "async": lambda: dist.all_reduce(torch.ones(3) if odd else tensor, async_op=True),
        "lists": lambda: (
            dist.all_gather([torch.ones(2), torch.ones(2), torch.ones(2 + (rank == 0))], tensor)
            if rank < 2
            else dist.all_gather([torch.ones(2) for _ in range(3)], tensor)
        ),
        "exchange": lambda: dist.all_to_all_single(
            torch.empty(3 + odd), torch.ones(3), [1 + odd, 1, 1] if not odd else [2, 1, 1], [1, 1, 1]
        ),
    }
    told = {}
    for case, call in calls.items():
        tensor.fill_(rank)
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            call()
        told[case] = str(caught.value)
        assert tensor.tolist() == [rank] * 2
        dist.all_reduce(tensor)  # nothing was sent: the group goes on
        assert tensor.tolist() == [3] * 2
    assert group.size() == 3
    dist.destroy_process_group()
    return told


def test_calls_that_differ_raise_on_all_ranks() -> None:
    told = run_ranks(differ, 3)
    for number, case in enumerate(told[0]):
        messages = [of_rank[case] for of_rank in told]
        for rank, message in enumerate(messages):
            assert message.startswith(f"[rank {rank}] collective #{2 * number} on gloo group '0'"), case
            if case == "exchange":  # compared pair by pair
                assert "rank 0 sends 1 elements to rank 1, which expects 2; nothing was sent" in message
                continue
            aspect = {"async": "shape", "lists": "shapes"}.get(case, case)
            assert f"the ranks differ in {aspect}; nothing was sent" in message, case
            assert all(f"\n  rank {r}: " in message for r in range(3)), case
            assert f"called at {__file__}:" in message, case
        assert len({message.split(" ", 2)[2] for message in messages}) == 1 or case == "exchange"


def one_stays_away(rank: int, size: int) -> str:
    begin(rank, size, timedelta(milliseconds=500))
    dist.barrier()
    message = ""
    if rank != 2:
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            dist.all_reduce(torch.ones(1))
        message = str(caught.value)
    store = current_store()
    store.set(f"done{rank}", "")
    store.wait([f"done{r}" for r in range(size)])
    dist.destroy_process_group()
    return message


def test_rank_that_calls_nothing_is_named_with_its_last_call() -> None:
    for rank, message in enumerate(run_ranks(one_stays_away, 3)[:2]):
        assert message.startswith(f"[rank {rank}] collective #1 on gloo group '0'")
        assert "this rank calls all_reduce(op <ReduceOp.SUM: 0>, shape [1], dtype torch.float32" in message
        assert "but rank 2 called nothing within 0.5 s" in message
        assert f"rank 2: last called barrier() at {__file__}:" in message


def one_comes_late(rank: int, size: int) -> str:
    begin(rank, size, timedelta(milliseconds=500))
    store = current_store()
    if rank == 1:
        store.wait(["gave up"])
    with pytest.raises(dist.CollectiveTimeoutError) as caught:
        dist.all_reduce(torch.ones(1))
    store.set("gave up", "")
    assert caught.value.missing_ranks == (1,)
    store.set(f"done{rank}", "")
    store.wait([f"done{r}" for r in range(size)])
    dist.destroy_process_group()
    return str(caught.value)


def test_a_rank_that_comes_late_reports_that_the_others_gave_up() -> None:
    message = run_ranks(one_comes_late, 2)[1]
    assert message.startswith("[rank 1] collective #0 on gloo group '0'")
    assert message.endswith("device cpu), but the others had given up before it came")


def stack_is_logged(rank: int, size: int) -> str:
    os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("collectives").addHandler(handler)
    begin(rank, size)
    with pytest.raises(dist.CollectiveMismatchError):
        dist.all_reduce(torch.ones(rank + 1))
    dist.destroy_process_group()
    return "".join(records)


def test_call_stack_is_logged_where_asked_for() -> None:
    for text in run_ranks(stack_is_logged, 2, isolated=True):
        assert "was called from" in text
        assert "in stack_is_logged" in text


def shapes_differ(rank: int, size: int, backend: str) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group(backend, store=current_store(), rank=rank, world_size=size)
    dist.set_debug_level(dist.DebugLevel.OFF)
    odd = bool(rank)
    wide, tall = torch.ones(4, 2), torch.ones(2, 4)
    mine = tall if odd else wide
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(mine),
        lambda: dist.all_reduce_into_tensor(torch.ones(8), mine),
        lambda: dist.broadcast(mine, 0),
        lambda: dist.reduce(mine, 0),
        lambda: dist.all_gather([torch.ones_like(mine), torch.ones_like(mine)], mine),
        lambda: dist.all_gather_into_tensor(torch.ones(16), mine),
        lambda: dist.gather(mine, None if odd else [torch.ones(4, 2), torch.ones(4, 2)], 0),
        lambda: dist.scatter(mine, None if odd else [wide, wide], 0),
        lambda: dist.reduce_scatter(mine, [mine, mine]),
        lambda: dist.reduce_scatter_tensor(mine, torch.ones(16)),
    ]
    for call in calls:
        with pytest.raises(dist.CollectiveMismatchError, match=r"differ in shapes?; nothing was sent"):
            call()
    if odd:  # ranks may mix these two
        dist.all_reduce_into_tensor(torch.ones(8), wide)
    else:
        dist.all_reduce(wide)
        assert wide.unique().tolist() == [2.0]
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["host", "round_robin", "gloo"])
def test_shapes_are_compared_on_every_backend(backend: str) -> None:
    run_ranks(shapes_differ, 2, backend)


def checked_world(rank: int, size: int) -> dist.ProcessGroup:
    """Makes a world that compares calls, whatever is made after it."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("host", store=current_store(), rank=rank, world_size=size)
    dist.set_debug_level(dist.DebugLevel.OFF)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def a_record_of_other_length(rank: int, size: int) -> None:
    """Rank 1 leaves a call of two ranks, as another version of the program might leave it."""
    store = checked_world(rank, size).get_group_store()
    call = [
        {"function": "all_to_all_single", "dtype": "torch.float32", "sent": [1], "received": None},
        "here",
    ]
    if rank == 1:
        publish(store, "check/0/0/1", call)
        store.add("check/0/0/arrived", 1)
        store.set("left", "")
        return
    store.wait(["left"])
    with pytest.raises(dist.DistStoreError, match=r"'check/0/0/1'.* has sent = \[1\] instead of 2 numbers"):
        dist.all_to_all_single(torch.empty(2), torch.ones(2))


def test_exchanges_recorded_by_another_program_are_refused() -> None:
    run_ranks(a_record_of_other_length, 2, isolated=True)


def waits_alone(rank: int, size: int) -> None:
    group = checked_world(rank, size)
    if rank == 0:
        waits = []

        def recording(store: Any, keys: list[str], limit: timedelta) -> bool:
            waits.append(limit)
            return wait_for_keys(store, keys, limit)

        agreement.wait_for_keys = recording  # type: ignore[attr-defined]
        limit = timedelta(seconds=1.25)
        with pytest.raises(dist.CollectiveTimeoutError):
            group.allreduce([torch.ones(1)], dist.AllreduceOptions(limit))
        agreement.wait_for_keys = wait_for_keys  # type: ignore[attr-defined]
        assert len(waits) > 1
        assert sum(waits, timedelta()) <= limit + timedelta(milliseconds=2)  # a wait takes 1 ms at least
        current_store().set("waited", "")
    current_store().wait(["waited"])


def test_the_comparison_waits_no_longer_than_the_limit() -> None:
    run_ranks(waits_alone, 2, isolated=True)


def one_aborts(rank: int, size: int) -> None:
    group = checked_world(rank, size)
    dist.barrier()
    if rank == 1:
        group.abort()
    with pytest.raises(dist.GroupAbortedError, match="rank 1 aborted it"):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_an_abort_ends_the_comparison() -> None:
    run_ranks(one_aborts, 2)


# ---- the breakpoint ------------------------------------------------------------------------------

SCRIPT = """
    import sys, torch, collectives as dist
    import torch.multiprocessing as mp

    def main(rank, path):
        dist.init_process_group("host", f"file://{path}", rank=rank, world_size=2)
        for turn in range(3):
            secret = 41 + rank
            dist.breakpoint(rank=1, skip=1)
            secret += 1
            # In one write: the ranks share the pipe.
            sys.stdout.write(f"rank {rank} turn {turn} secret {secret}.\\n")
            sys.stdout.flush()
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(main, (sys.argv[1],), 2)
"""


def debugged(commands: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    return subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")],
        input=commands,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.full
def test_breakpoint_stops_one_rank_in_the_callers_frame(tmp_path: Path) -> None:
    # In the first stop: print a local variable, change it, step to the line after it, go on.
    done = debugged("p secret\nsecret = 90\nnext\np secret\ncontinue\ncontinue\n", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[rank 1] breakpoint; the other ranks wait until 'continue'") == 2
    assert "(Pdb) 42" in done.stdout
    turns = sorted(re.findall(r"(rank \d turn \d secret \d+)\.\n", done.stdout))
    assert turns == [
        "rank 0 turn 0 secret 42",
        "rank 0 turn 1 secret 42",
        "rank 0 turn 2 secret 42",
        "rank 1 turn 0 secret 43",
        "rank 1 turn 1 secret 91",
        "rank 1 turn 2 secret 43",
    ]


def wrong_breakpoint(rank: int, size: int) -> None:
    dist.init_process_group("host", store=current_store(), rank=rank, world_size=size)
    with pytest.raises(
        ValueError, match=r"\[rank 0\] breakpoint: rank is 1, but the ranks of the default group are 0 to 0"
    ):
        dist.breakpoint(1)
    dist.destroy_process_group()


def test_breakpoint_on_no_rank() -> None:
    run_ranks(wrong_breakpoint, 1)
