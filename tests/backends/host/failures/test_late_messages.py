"""Messages of the host backend whose time limit passes while they are under way.

A layout of ``"aa"`` is two ranks that share memory, ``"ab"`` two that talk over loopback as two machines do.
"""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta

import pytest
import torch
from harness import current_store, run_ranks
from torch.distributed import PrefixStore

import collectives as dist
from collectives.backends.host import ProcessGroupHost

COUNT = 1 << 24
"""Elements of a message that neither a mailbox nor a connection takes whole."""

LONG = timedelta(seconds=30)
SHORT = timedelta(seconds=0.3)

both = pytest.mark.parametrize("layout", ["aa", "ab"])


def _group(rank, layout):
    os.environ["COLLECTIVES_HOST_MACHINE"] = layout[rank]
    try:
        group = ProcessGroupHost(current_store(), rank, len(layout), LONG, group_name="late")
    finally:
        del os.environ["COLLECTIVES_HOST_MACHINE"]
    _exchange(group, rank, 0.0)  # so that there are connections
    return group


def _exchange(group, rank, value):
    """Sends a short message from rank 0 to rank 1, which finds this one and no other."""
    if rank == 0:
        group.send([torch.full((3,), value)], 1).wait()
    else:
        tensor = torch.empty(3)
        group.recv([tensor], 0).wait()
        assert tensor.tolist() == [value] * 3
    group.barrier().wait()


def _every_rank(error):
    return re.findall(r"^  rank (\d)\b.*: ", str(error), re.MULTILINE) == ["0", "1"]


# ---- nothing has left or come ----------------------------------------------------------------------------


def _waits_behind(rank, size, layout):
    group = _group(rank, layout)
    store = current_store()
    if rank == 0:
        first = group.send([torch.ones(COUNT)], 1)
        group.set_timeout(SHORT)
        with pytest.raises(dist.CollectiveTimeoutError, match="nothing of it had left") as caught:
            group.send([torch.zeros(3)], 1).wait()
        assert _every_rank(caught.value)
        caught.match("the group stays usable")
        group.set_timeout(LONG)
        store.set("given up", "")
        first.wait()
    else:
        store.wait(["given up"])
        tensor = torch.zeros(COUNT)
        group.recv([tensor], 0).wait()
        assert (tensor == 1).all()
    _exchange(group, rank, 2.0)  # of the message that was given up nothing comes
    group.shutdown()


@both
def test_send_of_which_nothing_has_left_is_taken_back(layout):
    run_ranks(_waits_behind, 2, layout)


def _nothing_comes(rank, size, layout):
    group = _group(rank, layout)
    if rank == 1:
        group.set_timeout(SHORT)
        with pytest.raises(dist.CollectiveTimeoutError, match="nothing of a message had come") as caught:
            group.recv([torch.empty(3)], 0, 9).wait()
        caught.match(r"receive of 12 bytes.*rank 0, tag 9")
        assert _every_rank(caught.value)
        group.set_timeout(LONG)
    group.barrier().wait()
    if rank == 0:
        group.send([torch.ones(1)], 1, 9).wait()
    else:
        group.recv([tensor := torch.zeros(1)], 0, 9).wait()
        assert tensor.item() == 1
    _exchange(group, rank, 3.0)
    group.shutdown()


@both
def test_receive_that_nothing_came_for_leaves_the_group_usable(layout):
    run_ranks(_nothing_comes, 2, layout)


# ---- a part has ------------------------------------------------------------------------------------------


def _leaves_in_part(rank, size, layout, waits):
    group = _group(rank, layout)
    store = current_store()
    if rank == 0:
        other = group.recv([torch.empty(1)], 1, 5)
        group.set_timeout(SHORT)
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            group.send([torch.ones(COUNT)], 1).wait()
        caught.match(
            rf"send of {4 * COUNT} bytes \(float32\) to rank 1, tag 0 was not done within its timeout"
        )
        told = re.search(
            rf"(\d+) of {4 * COUNT} bytes were on their way .* the group is broken", str(caught.value)
        )
        assert told
        assert 0 < int(told[1]) < 4 * COUNT
        caught.match("make a new one")
        assert _every_rank(caught.value)
        with pytest.raises(dist.CollectiveTimeoutError, match="rank 0 gave up: send of"):
            other.wait()
        with pytest.raises(dist.GroupAbortedError, match=r"make a new group\. The first cause: send of"):
            group.send([torch.ones(1)], 1).wait()
        store.set("broken", "")
    elif waits:
        with pytest.raises(dist.CollectiveTimeoutError, match=r"rank 0 gave up: send of .* bytes were on"):
            group.barrier().wait()
    else:
        store.wait(["broken"])
        # Between machines the news may come when the receive has begun.
        errors = (dist.GroupAbortedError, dist.CollectiveTimeoutError)
        with pytest.raises(errors, match="bytes were on their way"):
            group.recv([torch.empty(COUNT)], 0).wait()
    group.shutdown()
    again = ProcessGroupHost(PrefixStore("again", store), rank, size, LONG, group_name="again")
    _exchange(again, rank, 4.0)
    again.shutdown()


@pytest.mark.parametrize("waits", [False, True])
@both
def test_send_that_has_left_in_part_breaks_the_group_and_says_so(layout, waits):
    run_ranks(_leaves_in_part, 2, layout, waits)


def _comes_in_part(rank, size, layout, waits_already):
    """Rank 0 is stopped while a message of it is under way, and goes on after the receive has given up."""
    group = _group(rank, layout)
    store = current_store()
    if rank == 0:
        message = torch.arange(COUNT, dtype=torch.float32)
        work = group.send([message], 1)
        store.set("process", str(os.getpid()))
        work.wait()
    else:
        process = int(store.get("process"))
        os.kill(process, signal.SIGSTOP)
        try:
            group.set_timeout(SHORT)
            late = group.recv([torch.empty(COUNT)], 0)
            group.set_timeout(LONG)
            tensor = torch.zeros(COUNT)
            waiting = group.recv([tensor], 0) if waits_already else None
            with pytest.raises(dist.CollectiveTimeoutError) as caught:
                late.wait()
        finally:
            os.kill(process, signal.SIGCONT)
        told = re.search(
            rf"(\d+) of {4 * COUNT} bytes had come, which the next receive gets", str(caught.value)
        )
        assert told
        assert 0 < int(told[1]) < 4 * COUNT
        assert _every_rank(caught.value)
        caught.match("the group stays usable")
        (waiting or group.recv([tensor], 0)).wait()
        assert torch.equal(tensor, torch.arange(COUNT, dtype=torch.float32))
    _exchange(group, rank, 5.0)
    group.shutdown()


@pytest.mark.parametrize("waits_already", [False, True])
@both
def test_message_that_came_in_part_goes_to_the_next_receive_whole(layout, waits_already):
    run_ranks(_comes_in_part, 2, layout, waits_already)


def _gives_up_a_mismatch(rank, size, layout):
    """The next receive has another size: the error is its own, and what follows arrives."""
    group = _group(rank, layout)
    store = current_store()
    if rank == 0:
        work = group.send([torch.ones(COUNT)], 1)
        store.set("process", str(os.getpid()))
        work.wait()
    else:
        process = int(store.get("process"))
        os.kill(process, signal.SIGSTOP)
        try:
            group.set_timeout(SHORT)
            with pytest.raises(dist.CollectiveTimeoutError, match="had come"):
                group.recv([torch.empty(COUNT)], 0).wait()
            group.set_timeout(LONG)
            with pytest.raises(dist.CollectiveMismatchError, match=rf"met a message of {4 * COUNT} bytes"):
                group.recv([torch.empty(3)], 0).wait()
        finally:
            os.kill(process, signal.SIGCONT)
    _exchange(group, rank, 6.0)
    group.shutdown()


@both
def test_message_that_came_in_part_is_dropped_by_a_receive_of_another_size(layout):
    run_ranks(_gives_up_a_mismatch, 2, layout)
