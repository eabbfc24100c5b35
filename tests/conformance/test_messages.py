"""send, recv and recv_anysource: matching by rank and tag, order, messages to oneself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conformance.oracle import BYTES_ONLY, DTYPES, Report, place, values
from harness import current_store, run_ranks

from collectives import ProcessGroup, Work

LARGE = 300_007


def exchange(group: ProcessGroup) -> None:
    """Everyone sends to the next rank and receives from the one before; with one rank, from itself."""
    report, me, size = Report(group), group.rank(), group.size()
    after, before = (me + 1) % size, (me - 1) % size
    turn = 0
    for dtype in (*DTYPES, *BYTES_ONLY):
        shapes = [(0, "dense"), (1, "scalar"), (1009, "dense"), (131, "offset")]
        if dtype not in BYTES_ONLY:
            shapes += [(65, "strided"), (60, "transposed")]
        if dtype in {torch.float32, torch.uint8}:
            shapes.append((LARGE, "dense"))
        for count, layout in shapes:
            turn += 1
            case = f"{dtype} {count} {layout}"
            mine = place(values(dtype, me, count), layout)
            output = place(values(dtype, 77, count, salt=99), layout)

            def both(mine=mine, output=output, tag=turn % 3, first=turn % 2) -> None:
                works: list[Work] = []
                for step in range(2):
                    if (step + first + me) % 2:
                        works.append(group.send([mine.tensor], after, tag))
                    else:
                        works.append(group.recv([output.tensor], before, tag))
                for work in works:
                    work.wait()

            report.run(case, both)
            report.same(case, output.tensor, values(dtype, before, count))
            report.same(f"{case}, sent", mine.tensor, values(dtype, me, count))
            report.whole(case, mine, output)
    report.finish(100)


def tags_and_order(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    peer = (me + size // 2) % size
    if size == 3:  # three ranks make a ring
        peer, source = (me + 1) % 3, (me - 1) % 3
    else:
        source = peer
    tags = [7, 0, 2**31 - 1, 7, 7, 0]
    sends = [group.send(torch.full((n + 1,), float(n)), peer, tag) for n, tag in enumerate(tags)]
    # By tag in another order than sent; with one tag in the order sent.
    for n in (2, 1, 0, 5, 3, 4):
        got = torch.empty(n + 1)
        group.recv(got, source, tags[n]).wait()
        assert got.tolist() == [float(n)] * (n + 1), f"message {n} with tag {tags[n]}"
    for work in sends:
        work.wait()
    # Many in flight with one tag, received before they are waited for.
    outputs = [torch.empty(3) for _ in range(40)]
    receives = [group.recv(output, source, 4) for output in outputs]
    sends = [group.send(torch.full((3,), float(n)), peer, 4) for n in range(40)]
    for work in [*reversed(receives), *reversed(sends)]:
        work.wait()
    assert [output[0].item() for output in outputs] == list(range(40))


def receives_first(group: ProcessGroup) -> None:
    """All post their receives, and only when all have done so the sends."""
    me, size = group.rank(), group.size()
    others = [rank for rank in range(size) if rank != me]
    outputs = {rank: torch.empty(5000, dtype=torch.int64) for rank in others}
    receives = [group.recv(outputs[rank], rank, 1) for rank in others]
    assert not any(work.is_completed() for work in receives)
    store = current_store()
    store.set(f"posted{me}", "yes")
    store.wait([f"posted{rank}" for rank in range(size)])
    sends = [group.send(values(torch.int64, me, 5000, salt=rank), rank, 1) for rank in others]
    for work in sends + receives:
        work.wait()
    for rank in others:
        assert torch.equal(outputs[rank], values(torch.int64, rank, 5000, salt=me))
    for work, rank in zip(receives, others, strict=True):
        assert work.source_rank() == rank


def large_both_ways(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    others = [rank for rank in range(size) if rank != me]
    sends = [group.send(values(torch.float32, me, 1_000_003, salt=rank), rank) for rank in others]
    for rank in others:
        got = torch.empty(1_000_003)
        group.recv(got, rank).wait()
        assert torch.equal(got, values(torch.float32, rank, 1_000_003, salt=me))
    for work in sends:
        work.wait()


def from_anyone(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    rounds = 5
    if me:
        for n in range(rounds):
            group.send(torch.tensor([me, n]), 0, 3).wait()
        # Another tag is not matched by them.
        group.send(torch.tensor([100 + me]), 0, 9).wait()
        return
    seen: dict[int, list[int]] = {rank: [] for rank in range(1, size)}
    for turn in range(rounds * (size - 1)):
        got = torch.empty(2, dtype=torch.int64)
        work = group.recv_anysource(got, 3) if turn % 2 else group.recv_anysource([got], 3)
        work.wait()
        sender, number = got.tolist()
        assert work.source_rank() == sender
        seen[sender].append(number)
    assert all(numbers == list(range(rounds)) for numbers in seen.values()), seen
    for rank in range(1, size):
        got = torch.empty(1, dtype=torch.int64)
        group.recv(got, rank, 9).wait()
        assert got.item() == 100 + rank


def empty_from_anyone(group: ProcessGroup) -> None:
    """A message without elements that is there before its receive."""
    sent = []
    sender = group.size() - 1
    if group.rank() == sender:
        sent = [group.send(tensor, 0, 4) for tensor in (torch.empty(0), torch.ones(2))]
    group.barrier().wait()
    if group.rank() == 0:
        work = group.recv_anysource(torch.empty(0), 4)
        work.wait()
        assert work.source_rank() == sender
        got = torch.zeros(2)
        group.recv_anysource(got, 4).wait()
        assert got.tolist() == [1.0, 1.0]
    for work in sent:
        work.wait()


def to_oneself(group: ProcessGroup) -> None:
    me = group.rank()
    got = torch.empty(4)
    sent = group.send(torch.full((4,), 1.0 + me), me, 5)
    receive = group.recv(got, me, 5)
    receive.wait()
    sent.wait()
    assert got.tolist() == [1.0 + me] * 4
    assert receive.source_rank() == me

    early = torch.empty(6).view(2, 3).t()
    receive = group.recv(early, me, 6)
    assert not receive.is_completed()
    group.send(torch.arange(6.0).view(3, 2), me, 6).wait()
    receive.wait()
    assert early.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]

    group.send(torch.tensor([2.0]), me, 8)
    group.send(torch.tensor([1.0]), me, 7)
    any_of_them = torch.empty(1)
    work = group.recv_anysource(any_of_them, 7)
    work.wait()
    assert any_of_them.item() == 1.0
    assert work.source_rank() == me
    group.recv(any_of_them, me, 8).wait()
    assert any_of_them.item() == 2.0


def beside_collectives(group: ProcessGroup) -> None:
    """Messages match apart from the collectives: one that waits for its peer does not stop them."""
    me, size = group.rank(), group.size()
    after, before = (me + 1) % size, (me - 1) % size
    got = torch.empty(10)
    receive = group.recv(got, before, 2)
    for n in range(10):
        x = torch.full((100,), float(n))
        group.allreduce(x).wait()
        assert x[0].item() == n * size
    assert not receive.is_completed()
    group.barrier().wait()
    group.send(torch.full((10,), float(me)), after, 2).wait()
    receive.wait()
    assert got.tolist() == [float(before)] * 10


def futures_of_messages(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    got = torch.empty(3)
    receive = group.recv(got, (me - 1) % size)
    future = receive.get_future()
    doubled = future.then(lambda done: [tensor * 2 for tensor in done.value()])
    send = group.send(torch.full((3,), 1.0 + me), (me + 1) % size)
    assert send.get_future().wait() == []
    assert send.wait()
    assert send.result() == []
    value = 1.0 + (me - 1) % size
    assert doubled.wait()[0].tolist() == [2 * value] * 3
    assert receive.get_future() is future
    assert receive.wait()
    assert receive.is_completed()
    assert receive.is_success()
    assert receive.exception() is None
    assert receive.result()[0].data_ptr() == got.data_ptr()
    assert receive.get_future_result().wait() == 0
    with pytest.raises(RuntimeError, match="receive"):
        send.source_rank()


BODIES = [
    exchange, tags_and_order, receives_first, large_both_ways, from_anyone, empty_from_anyone, to_oneself,
    beside_collectives, futures_of_messages,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_messages(backend: str, world_size: int, body: Callable[[ProcessGroup], None]) -> None:
    run_ranks(body, world_size, backend=backend)
