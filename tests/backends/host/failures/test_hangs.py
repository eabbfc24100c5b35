"""Time limits of the host backend: who waits, and every rank's place in the message."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from harness import Died, current_store, run_ranks, run_world
from torch.distributed import PrefixStore

import collectives as dist
from collectives import Work
from collectives.backends.host import ProcessGroupHost

LIMIT_S = 1.5
"""Within which every rank and thread of a test begins its operations, on a loaded machine too."""
PATIENT = timedelta(seconds=30)

PLACEMENTS = ["aaa", "aab", "abc"]
"""A letter for the machine of each rank; rank 2 is the one that does not come, rank 1 the one that stops."""

Issue = Callable[[ProcessGroupHost, bool], Work]


def all_reduce(group, asynchronous):
    return group.allreduce([torch.ones(5)], dist.AllreduceOptions(asyncOp=asynchronous))


def long_all_reduce(group, asynchronous):
    return group.allreduce([torch.ones(900_000)], dist.AllreduceOptions(asyncOp=asynchronous))


def reduce(group, asynchronous):
    return group.reduce([torch.ones(5)], dist.ReduceOptions(rootRank=1, asyncOp=asynchronous))


def broadcast(group, asynchronous):
    return group.broadcast([torch.ones(5)], dist.BroadcastOptions(rootRank=0, asyncOp=asynchronous))


def all_gather(group, asynchronous):
    outputs = [torch.ones(5) for _ in range(group.size())]
    return group.allgather([outputs], [torch.ones(5)], dist.AllgatherOptions(asyncOp=asynchronous))


def reduce_scatter(group, asynchronous):
    options = dist.ReduceScatterOptions(asyncOp=asynchronous)
    return group.reduce_scatter_single(torch.ones(5), torch.ones(5 * group.size()), options)


def gather(group, asynchronous):
    outputs = [[torch.ones(5) for _ in range(group.size())]] if group.rank() == 1 else []
    return group.gather(outputs, [torch.ones(5)], dist.GatherOptions(rootRank=1, asyncOp=asynchronous))


def scatter(group, asynchronous):
    inputs = [[torch.ones(5) for _ in range(group.size())]] if group.rank() == 1 else []
    return group.scatter([torch.ones(5)], inputs, dist.ScatterOptions(rootRank=1, asyncOp=asynchronous))


def all_to_all(group, asynchronous):
    count = 5 * group.size()
    options = dist.AllToAllOptions(asyncOp=asynchronous)
    return group.alltoall_base(torch.ones(count), torch.ones(count), None, None, options)


def barrier(group, asynchronous):
    return group.barrier(dist.BarrierOptions(asyncOp=asynchronous))


SHOWN: dict[Issue, str] = {
    all_reduce: "all_reduce(SUM, float32, 5 elements)",
    long_all_reduce: "all_reduce(SUM, float32, 900000 elements)",
    reduce: "reduce(SUM, float32, 5 elements, root 1)",
    broadcast: "broadcast(float32, 5 elements, root 0)",
    all_gather: "all_gather(float32, 5 elements)",
    reduce_scatter: "reduce_scatter(SUM, float32, 15 elements)",
    gather: "gather(float32, 5 elements, root 1)",
    scatter: "scatter(float32, 5 elements, root 1)",
    all_to_all: "all_to_all(float32, 15 elements)",
    barrier: "barrier",
}


def without_machines(text):
    """Between machines, messages name them behind the ranks."""
    return re.sub(r"(rank \d) on '[^']+'", r"\1", text)


def must_say(caught, line):
    text = without_machines(str(caught.value))
    assert re.search(line, text), f"no {line!r} in: {text}"


def end(groups):
    """Leaves nothing to the next test of this process, which may count what there is."""
    for group in groups:
        group.abort()


def wait_for_the_absent(group, issue, asynchronous, outcomes):
    """Runs an operation that rank 2 does not come to; notes how it ended."""
    try:
        issue(group, asynchronous).wait()
    except dist.CollectiveTimeoutError as error:
        outcomes.append((issue, asynchronous, str(error)))
    except BaseException as error:  # noqa: BLE001 - told to the parent
        outcomes.append((issue, asynchronous, f"{type(error).__name__}: {error}"))


def absent_rank(rank, size):
    """Every collective waits for rank 2 in a group of its own, all at once; returns the complaints."""
    store = current_store()
    cases = [(issue, asynchronous) for issue in SHOWN for asynchronous in (False, True)]
    groups = [
        ProcessGroupHost(PrefixStore(f"g{n}", store), rank, size, PATIENT, group_name=f"g{n}")
        for n in range(len(cases))
    ]
    for group in groups:
        group.barrier().wait()
        group.set_timeout(timedelta(seconds=LIMIT_S))
    if rank == 2:
        store.wait(["done0", "done1"])
        end(groups)
        return []
    outcomes = []
    threads = [
        threading.Thread(target=wait_for_the_absent, args=(group, *case, outcomes))
        for group, case in zip(groups, cases, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.set(f"done{rank}", "")
    end(groups)
    complaints = []
    for issue, asynchronous, said in outcomes:
        text = without_machines(said)
        place = rf"at test_hangs.py:\d+ in (wait_for_the_absent|{issue.__name__})"
        what = rf"in {re.escape(SHOWN[issue])} number 2, waits for rank \d, for \d\.\d s, {place}"
        lines = [
            f"rank 0: {what}",
            f"rank 1: {what}",
            r"rank 2: finished barrier number 1, begun \d\.\d s ago",
        ]
        lines.append(rf"was not done within its timeout of {LIMIT_S} s")
        missing = [line for line in lines if not re.search(line, text)]
        if missing:
            complaints.append(f"{issue.__name__} {asynchronous=} misses {missing}: {text}")
    return [f"{len(cases)} cases", *complaints]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_collective_ends_at_its_limit_and_names_every_rank(placement):
    first, second, _ = run_ranks(absent_rank, 3, placement=placement)
    assert first == ["20 cases"], "\n".join(first)
    assert second == ["20 cases"], "\n".join(second)


def user_function(rank, size, asynchronous):
    """The shortest way into the core, that of the user functions, tells the line as well."""
    if rank < 2:
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            dist.all_reduce(torch.ones(2), async_op=asynchronous).wait()
        caught.match(rf"rank {rank}: in all_reduce.*, at test_hangs.py:\d+ in user_function")
    current_store().set(f"seen{rank}", "")
    current_store().wait(["seen0", "seen1"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_user_function_is_found_at_its_line(asynchronous):
    run_world(user_function, 3, asynchronous, group_timeout=timedelta(seconds=LIMIT_S))


def wait_in_a_long_file_name(rank, size):
    group = ProcessGroupHost(current_store(), rank, size, PATIENT, group_name="long")
    group.barrier().wait()
    group.set_timeout(timedelta(seconds=LIMIT_S))
    if rank == 0:
        scope = {"group": group}
        exec(compile("def wait():\n    group.barrier().wait()", "ä" * 80, "exec"), scope)
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            scope["wait"]()
        must_say(caught, "rank 0: in barrier number 2, .*, at ä{47}\ufffd")
        current_store().set("done", "")
    current_store().wait(["done"])
    end([group])


def test_a_source_line_that_is_cut_within_a_character_is_shown():
    run_ranks(wait_in_a_long_file_name, 2)


def receive_from_the_absent(group):
    return group.recv([torch.ones(3)], 2, 5)


def send_to_the_absent(group):
    return group.send([torch.ones(4 << 20)], 2, 6)  # more than the ring between them holds


def blocked_message(rank, size, issue, words):
    group = ProcessGroupHost(current_store(), rank, size, PATIENT, group_name="mail")
    group.barrier().wait()
    group.set_timeout(timedelta(seconds=LIMIT_S))
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            issue(group).wait()
        assert time.monotonic() - begin >= LIMIT_S - 0.01
        must_say(caught, rf"rank 0: .*; {words}, for \d\.\d s, at test_hangs.py:\d+ in blocked_message")
        for r in (1, 2):
            must_say(caught, rf"rank {r}: finished barrier number 1, begun \d\.\d s ago")
        current_store().set("done", "")
    current_store().wait(["done"])
    end([group])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("issue", "words"),
    [
        (receive_from_the_absent, "waits in receive from rank 2, tag 5"),
        (send_to_the_absent, "waits in send to rank 2, tag 6"),
    ],
    ids=["receive", "send"],
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_blocked_message_ends_at_its_limit_and_names_every_rank(placement, issue, words):
    run_ranks(blocked_message, 3, issue, words, placement=placement)


def stream(group, stops):
    """Runs long operations for ever, until this rank stops if it is to."""
    tensor = torch.ones(3_000_000)
    for n in itertools.count():
        if stops and n == 3:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        group.allreduce([tensor.fill_(1.0)], dist.AllreduceOptions(asyncOp=n % 2 == 0)).wait()


def stop_in_the_middle(rank, size):
    """Rank 1 stops at some place of a stream of long operations: that is no death, but time runs out."""
    group = ProcessGroupHost(current_store(), rank, size, timedelta(seconds=1.5), group_name="stopped")
    group.barrier().wait()
    with pytest.raises(dist.CollectiveTimeoutError) as caught:
        stream(group, rank == 1)
    operation = r"all_reduce\(SUM, float32, 3000000 elements\) number \d+, "
    for r in range(size):
        must_say(caught, rf"rank {r}: (stopped; )?(in|finished|has come to) {operation}")
    for r in (0, 2):
        must_say(caught, rf"rank {r}: in .*, for \d\.\d s, at test_hangs.py:\d+ in stream")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.sampled(1)
def test_a_stopped_rank_is_late_but_not_dead(placement):
    results = run_ranks(stop_in_the_middle, 3, isolated=True, lost=[1], placement=placement)
    assert results[1] == Died(-signal.SIGKILL)


def waits_with_limits(group):
    """Rank 1 comes late; rank 0 gives up waiting for Works that stand at three places."""
    store = current_store()
    group.barrier().wait()
    if group.rank() == 1:
        store.wait(["gave up"])
        group.send([torch.ones(2)], 0).wait()
        for _ in range(2):
            group.allreduce([torch.ones(3)]).wait()
        return []
    seen = []
    works = [
        group.allreduce([torch.ones(3)]),
        group.allreduce([torch.ones(3)]),
        group.recv([torch.ones(2)], 1),
    ]
    for work in works:
        with pytest.raises(dist.CollectiveTimeoutError) as info:
            work.wait(timedelta(seconds=0.3))
        assert "it goes on until its own time limit. Every rank:\n" in str(info.value)
        assert "[rank 0] host group" in str(info.value)
        seen.append((info.value.details(), str(info.value)))
    store.set("gave up", "")
    for work in works:
        work.wait()
    return seen


@pytest.mark.parametrize("placement", ["aa", "ab"])
def test_a_limit_of_wait_names_operation_and_rank(placement):
    (first, behind, message), _ = run_ranks(waits_with_limits, 2, backend="host", placement=placement)
    about = {"rank": 1, "missing_ranks": [1], "operation": "all_reduce", "sequence": 2}
    assert first[0] == about
    assert behind[0] == {**about, "sequence": -1}  # it has not begun
    assert message[0] == {**about, "operation": "recv", "sequence": -1}
    assert "all_reduce number 2 was not done after wait(0.3 s)" in first[1]
    assert "all_reduce, which earlier operations keep from beginning, was not done" in behind[1]
    assert "receive of 8 bytes (float32) from rank 1, tag 0 was not done" in message[1]
