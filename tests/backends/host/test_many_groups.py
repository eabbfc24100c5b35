"""Several groups of the same ranks, all with operations in flight on fewer cores: none starves."""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta

import pytest
import torch
from harness import current_store, run_ranks
from torch.distributed import PrefixStore
from waiting import until

import collectives as dist
from collectives.backends.host import ProcessGroupHost
from collectives.registry.backends import GroupOptions, create_group

LIMIT = timedelta(seconds=60)
SYNCHRONOUS = dist.AllreduceOptions(asyncOp=False)
MAXIMUM = dist.AllreduceOptions(reduceOp=dist.ReduceOp.MAX)
IN_FLIGHT = 6
COUNTS = (2, 3_000, 300_000, 1_500_000)
"""Elements of an operation by lane: the shortest are done in a thousandth of the longest's time."""


class _Lane(threading.Thread):
    """Keeps operations of one group in flight until all ranks know that it is to stop.

    An element of each operation says whether its rank wants to stop. All ranks learn it by the same
    operation, so that they issue equally many.
    """

    def __init__(self, group, count):
        super().__init__(daemon=True)
        self.group = group
        self.done = 0
        self.changed = threading.Condition()
        self._stop_wanted = threading.Event()
        self._count = count
        self._error = None

    def run(self):
        try:
            self._keep_full()
        except BaseException as error:
            self._error = error
            raise
        finally:
            with self.changed:
                self.done = -1 if self._error else self.done
                self.changed.notify_all()

    def _keep_full(self):
        rank, flying, stopping = self.group.rank(), deque(), False
        while flying or not stopping:
            while not stopping and len(flying) < IN_FLIGHT:
                tensor = torch.full((self._count,), float(rank))
                tensor[0] = float(self._stop_wanted.is_set())
                flying.append((tensor, self.group.allreduce([tensor], MAXIMUM)))
            tensor, work = flying.popleft()
            work.wait()
            assert (tensor[1:] == self.group.size() - 1).all()
            stopping = stopping or tensor[0] == 1
            with self.changed:
                self.done += 1
                self.changed.notify_all()

    def await_more(self, count):
        """Blocks until so many more operations are done."""
        with self.changed:
            wanted = self.done + count
            assert self.changed.wait_for(lambda: self.done >= wanted or self.done < 0, LIMIT.total_seconds())
            assert self.done >= 0, self._error

    def end(self):
        self._stop_wanted.set()
        self.join(LIMIT.total_seconds())
        assert not self.is_alive()
        assert self._error is None, self._error


def _groups(rank, size, count):
    store = current_store()
    return [
        ProcessGroupHost(PrefixStore(str(i), store), rank, size, LIMIT, group_name=str(i))
        for i in range(count)
    ]


def _end(lanes, closing):
    """Ends the lanes when no rank waits for them any more; they were full until then."""
    assert all(lane.is_alive() for lane in lanes)
    closing.barrier().wait()
    for lane in lanes:
        lane.end()
        lane.group.shutdown()
    closing.shutdown()


def _each_lane_moves(rank, size):
    closing, *groups = _groups(rank, size, 5)
    lanes = [_Lane(group, count) for group, count in zip(groups, COUNTS, strict=True)]
    for lane in lanes:
        lane.start()
    for _ in range(3):
        for lane in lanes:  # each while the other three are kept full
            lane.await_more(2 * IN_FLIGHT)
    _end(lanes, closing)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_every_group_completes_while_three_others_are_kept_full(size):
    run_ranks(_each_lane_moves, size)


def _callers_get_through(rank, size):
    """Blocking calls, messages and asynchronous calls of one group, among three that are kept full."""
    group, *others = _groups(rank, size, 4)
    lanes = [_Lane(other, count) for other, count in zip(others, COUNTS[1:], strict=True)]
    for lane in lanes:
        lane.start()
        lane.await_more(1)
    neighbour, previous = (rank + 1) % size, (rank - 1) % size
    for turn in range(20):
        tensor = torch.full((5,), float(rank + turn))
        group.allreduce([tensor], SYNCHRONOUS)
        assert tensor.tolist() == [sum(r + turn for r in range(size))] * 5
        sent = group.send([torch.full((3,), float(turn))], neighbour)
        received = torch.empty(3)
        group.recv([received], previous).wait()
        sent.wait()
        assert received.tolist() == [turn] * 3
        work = group.allreduce([tensor])
        work.wait()
        group.barrier().wait()
    for lane in lanes:
        lane.await_more(IN_FLIGHT)  # they were not held up themselves
    _end(lanes, group)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 4])
def test_blocking_calls_of_a_group_get_through_while_three_others_are_kept_full(size):
    run_ranks(_callers_get_through, size)


def late(rank, size):
    """Rank 1 comes when rank 0 has looked whether it has published that it is on another machine."""
    store = current_store()
    options = GroupOptions(PrefixStore("late", store), rank, size, group_name="late")
    if rank:
        store.set("comes", "")
        keys = store.num_keys()
        store.set("asks", "")
        until(lambda: store.num_keys() >= keys + 3)
    else:
        store.wait(["asks"])
        keys = store.num_keys() - 1
    group = create_group("host", options)
    group.barrier().wait()
    left = store.num_keys() - keys - 1
    group.barrier().wait()
    group.shutdown()
    return left


def test_making_a_group_leaves_no_keys_where_a_rank_comes_late():
    assert run_ranks(late, 2) == [0, 0]
