"""Several threads of a rank: they change no bit, sleep, go with their groups, and are no more than cores."""

from __future__ import annotations

import contextlib
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import current_store, run_ranks, run_world

import collectives as dist
from collectives.backends.host import HostOptions, ProcessGroupHost, threads
from collectives.store import HashStore

EDGE = 512 << 10
"""Bytes from which on a second thread takes part."""
COUNTS = [EDGE // 4 - 1, EDGE // 4 + 1, 3 * EDGE // 4 + 17, 2_200_003 // 4]
"""Of float32, in the whole tensor."""


def workers() -> int:
    """Returns how many threads of the pool this process has."""
    names = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return sum(name.read_text().startswith("collectives-wrk") for name in names)


def groups_of(*numbers: int) -> list[Any]:
    """Returns a group for each number of threads."""
    return [dist.new_group(backend="host", pg_options=HostOptions(threads=number)) for number in numbers]


def results(group: Any, count: int, dtype: torch.dtype, op: Any, async_op: bool) -> list[torch.Tensor]:
    """Returns what every collective makes of the same tensors."""
    rank, size = group.rank(), group.size()
    count = count * 4 // dtype.itemsize // size * size
    source = torch.Generator().manual_seed(7 + rank)
    given = torch.randint(-100, 100, (count,), generator=source).to(torch.float64).div_(7).to(dtype)
    made, root = [], size - 1
    whole = {name: given.clone() for name in ("all_reduce", "reduce", "broadcast", "all_to_all", "gather")}
    part, gathered = torch.empty_like(given[: count // size]), given.new_empty(count)
    scattered = torch.empty_like(part)
    parts = list(given.chunk(size)) if rank == root else None
    lists = list(whole["gather"].chunk(size)) if rank == root else None
    works = [
        dist.all_reduce(whole["all_reduce"], op, group, async_op),
        dist.reduce(whole["reduce"], root, op, group, async_op),
        dist.broadcast(whole["broadcast"], root, group, async_op),
        dist.all_gather_into_tensor(gathered, given[: count // size].clone(), group, async_op),
        dist.reduce_scatter_tensor(part, given.clone(), op, group, async_op),
        dist.all_to_all_single(whole["all_to_all"], given.clone(), group=group, async_op=async_op),
        dist.gather(given[: count // size].clone(), lists, root, group, async_op),
        dist.scatter(scattered, parts, root, group, async_op),
    ]
    for work in works:
        if async_op:
            work.wait()
    if rank != root:
        del whole["reduce"]
    made = [*whole.values(), part, gathered, scattered]
    return [tensor.view(torch.uint8) for tensor in made]


def make_the_same(rank: int, size: int, dtype: torch.dtype, op: str) -> None:
    one, *several = groups_of(1, 2, 4, 8)
    assert workers() == 0
    for number, count in enumerate(COUNTS):
        wanted = results(one, count, dtype, getattr(dist.ReduceOp, op), False)
        for group in several:
            found = results(group, count, dtype, getattr(dist.ReduceOp, op), number % 2 == 0)
            assert all(map(torch.equal, found, wanted)), (count, group.describe())
    assert 1 <= workers() <= 7
    for group in several:
        dist.destroy_process_group(group)
    assert workers() == 0  # the group of one thread holds no pool


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(torch.float32, "SUM"), (torch.bfloat16, "AVG"), (torch.int64, "MAX"), (torch.uint8, "SUM")],
)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.sampled(1)
def test_threads_change_no_bit(size: int, dtype: torch.dtype, op: str) -> None:
    run_world(make_the_same, size, dtype, op)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", ["ab", "aab"])
def test_threads_change_no_bit_between_machines(placement: str) -> None:
    run_world(make_the_same, len(placement), torch.float32, "SUM", placement=placement)


def use_two_groups_at_once(rank: int, size: int) -> None:
    first, second = groups_of(4, 3)
    tensors = [torch.full((400_000 + i,), float(rank + i)) for i in range(10)]
    works = [
        dist.all_reduce(tensor, group=(first, second)[i % 2], async_op=True)
        for i, tensor in enumerate(tensors)
    ]
    for work in works:
        work.wait()
    for i, tensor in enumerate(tensors):
        assert (tensor == size * i + size * (size - 1) / 2).all(), i


def test_two_groups_at_once() -> None:
    run_world(use_two_groups_at_once, 2)


def _came_to_its_end(work: Any) -> bool:
    with contextlib.suppress(dist.DistError):
        work.wait()
        return True
    return False


def break_in_the_middle(rank: int, size: int) -> None:
    for _ in range(3):
        (group,) = groups_of(4)
        tensors = [torch.ones(4_000_000) for _ in range(3)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        if rank == 0:
            time.sleep(0.002)
            group.abort()
        failed = [work.exception() for work in works if not _came_to_its_end(work)]
        del tensors, works
        assert all(isinstance(error, dist.GroupAbortedError) for error in failed)
        group.abort()
        assert workers() == 0


def test_an_abort_waits_for_the_workers() -> None:
    run_world(break_in_the_middle, 2)


def work_in_a_child(rank: int, size: int) -> None:
    (group,) = groups_of(4)
    dist.all_reduce(torch.ones(1_000_000), group=group)
    assert workers() == 3
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert workers() == 0
            alone = ProcessGroupHost(HashStore(), 0, 1, threads=3)
            source, copied = torch.rand(1_000_000), torch.empty(1_000_000)
            alone.all_gather_single(copied, source).wait()
            assert torch.equal(source, copied)
            assert workers() == 2
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    tensor = torch.ones(1_000_000)
    dist.all_reduce(tensor, group=group)
    assert (tensor == size).all()


def test_a_child_has_none_of_them() -> None:
    run_ranks(work_in_a_child, 2, backend="host", world=True, isolated=True)


def small_messages(rank: int, size: int) -> None:
    (group,) = groups_of(8)
    for count in (1, 1000, EDGE // 4 - 1):
        dist.all_reduce(torch.ones(count), group=group)
        dist.broadcast(torch.ones(count), 0, group=group)
    assert workers() == 0


def test_small_messages_start_no_thread() -> None:
    run_world(small_messages, 2)


def threads_by_the_environment(group: Any, wanted: int) -> None:
    group.allreduce(torch.ones(2_000_000)).wait()
    assert workers() == wanted - 1


@pytest.mark.parametrize(("text", "wanted"), [("3", 3), ("1", 1), ("", 1)])
def test_the_environment_says_how_many(text: str, wanted: int) -> None:
    # The harness gives torch one thread.
    env = {threads.VARIABLE: text, "OMP_NUM_THREADS": "1"}
    run_ranks(threads_by_the_environment, 2, wanted, backend="host", env=env)


def threads_sleep(group: Any) -> None:
    tensor = torch.ones(2_000_000)
    group.allreduce(tensor).wait()
    time.sleep(0.05)
    tasks = [
        task
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().startswith("collectives-wrk")
    ]
    assert len(tasks) == 2
    before = [switches(task) for task in tasks]
    for _ in range(100):
        group.allreduce(tensor[:1000]).wait()
    time.sleep(0.05)
    assert [switches(task) for task in tasks] == before  # asleep all the time, at short messages too


def switches(task: Path) -> list[str]:
    status = (task / "status").read_text()
    assert "State:\tS" in status
    return re.findall(r"ctxt_switches:\s*(\d+)", status)


def test_threads_sleep_where_there_is_nothing_to_do() -> None:
    run_ranks(threads_sleep, 2, backend="host", pg_options={"threads": 3})


# ---- how many ---------------------------------------------------------------------------------------------

RANK = {"system": "kernel net", "threads": 8, "chosen": False, "cores": "ff", "granted": 8}


@pytest.mark.parametrize(
    ("ranks", "agreed"),
    [
        ([RANK], [8]),
        ([RANK] * 2, [4, 4]),
        ([RANK] * 3, [2, 2, 2]),
        ([RANK] * 8, [1] * 8),
        ([RANK] * 9, [1] * 9),  # more ranks than cores
        ([{**RANK, "cores": "0f"}, {**RANK, "cores": "f0"}], [4, 4]),  # each bound to cores of its own
        ([{**RANK, "cores": "0f"}, {**RANK, "cores": "30"}], [4, 2]),
        ([{**RANK, "threads": 2}, RANK], [2, 4]),  # torch's number
        ([{**RANK, "chosen": True}, RANK], [8, 4]),  # the user's
        ([RANK, {**RANK, "system": "other net"}], [8, 8]),  # another machine
        ([RANK, {**RANK, "system": "kernel net:[2]"}], [4, 4]),  # another container of the same
        ([{**RANK, "granted": 4}] * 2, [2, 2]),  # a container that gets the time of four cores
        ([{**RANK, "cores": "3f"}] * 6, [1] * 6),
    ],
)
def test_ranks_share_the_cores(ranks: list[dict[str, Any]], agreed: list[int]) -> None:
    assert threads.agreed(ranks) == agreed


def test_a_rank_tells_what_torch_has_and_what_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    monkeypatch.setattr(threads, "_smallest_share", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5})
    told = threads.wish(None)
    assert (told["threads"], told["chosen"], told["cores"]) == (6, False, "21")
    threads.remember(3)
    threads.remember(4)  # of a smaller group of the same job
    assert threads.wish(None)["threads"] == 3
    assert (threads.wish(5)["threads"], threads.wish(5)["chosen"]) == (5, True)
    monkeypatch.setenv(threads.VARIABLE, "7")
    assert (threads.wish(None)["threads"], threads.wish(None)["chosen"]) == (7, True)


@pytest.mark.parametrize("wrong", [0, 33, True, "2", 1.0])
def test_a_number_of_threads_is_checked(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"threads must be an int from 1 to 32, but is {wrong!r}"):
        threads.wish(wrong)


@pytest.mark.parametrize("wrong", ["0", "33", "many", "-1"])
def test_the_variable_is_checked(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(threads.VARIABLE, wrong)
    with pytest.raises(
        ValueError, match=f"COLLECTIVES_THREADS must be a number from 1 to 32, but is '{wrong}'"
    ):
        threads.wish(None)


def outcome_with_a_wrong_number(rank: int, size: int) -> tuple[str, str]:
    if rank == 1:
        os.environ[threads.VARIABLE] = "none"
    try:
        ProcessGroupHost(current_store(), rank, size, timedelta(seconds=60)).shutdown()
    except (ValueError, dist.DistError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_wrong_number_of_one_rank_is_told_to_the_others() -> None:
    others, own = run_ranks(outcome_with_a_wrong_number, 2, isolated=True)
    assert own[0] == "ValueError"
    assert others[0] == "DistBackendError"
    assert others[1].startswith("[rank 1]")
    assert "COLLECTIVES_THREADS must be a number from 1 to 32, but is 'none'" in others[1]


def test_options_that_host_does_not_have_are_refused() -> None:
    with pytest.raises(TypeError, match="unknown are lanes; known are threads"):
        dist.init_process_group("host", store=HashStore(), rank=0, world_size=1, pg_options={"lanes": 2})
    with pytest.raises(TypeError, match="they must be HostOptions"):
        dist.init_process_group("host", store=HashStore(), rank=0, world_size=1, pg_options=3)


# ---- where pages lie --------------------------------------------------------------------------------------


def nodes_of_the_segment(group: Any, nodes: list[list[int]]) -> dict[str, int]:
    """Returns pages by node, as this rank maps them."""
    os.sched_setaffinity(0, nodes[group.rank()])
    group.allreduce(torch.ones(2_000_000)).wait()
    lines = [
        line for line in Path("/proc/self/numa_maps").read_text().splitlines() if "memfd:collectives" in line
    ]
    pages: dict[str, int] = {}
    for line in lines:
        for node, count in re.findall(r" N(\d+)=(\d+)", line):
            pages[node] = pages.get(node, 0) + int(count)
    return pages


def test_pages_lie_on_the_node_of_the_rank_that_writes_them() -> None:
    usable = os.sched_getaffinity(0)
    nodes = []
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        cores = [core for core in usable if (folder / f"cpu{core}").exists()]
        if cores:
            nodes.append(cores)
    if len(nodes) < 2:
        pytest.skip("this machine has one node of memory; state_test.cpp shows who allocates")
    found = run_ranks(nodes_of_the_segment, 2, nodes, backend="host", isolated=True)
    for pages in found:
        counts = sorted(pages.values())
        assert len(counts) == 2, pages
        assert counts[0] > counts[1] / 4, pages  # each rank's ring, on its own node
