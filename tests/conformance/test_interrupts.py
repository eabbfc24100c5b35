"""Signal handlers that raise within operations: Ctrl-C, alarms, torchelastic's and pytest-timeout's signals.

A blocking call that raises has nothing under way that touches its tensors, and a receive that raises has
taken no message. What an asynchronous call has begun keeps its tensors until it is done.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import itertools
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from harness import current_store, run_ranks, run_world
from torch_world import run_torch

import collectives

USED, FREED, SENT = 1.0, 7.0, 3.0
"""What tensors hold that are given to operations, those made after they are gone, and those of the peer."""

SMALL, LARGE = 1000, 2_000_000


class AlarmError(Exception):
    """What the handler of the signal raises."""


def ring(*_: object) -> None:
    raise AlarmError


@contextlib.contextmanager
def alarms(handler: Callable[..., Any] = ring) -> Iterator[None]:
    """Lets SIGALRM raise."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def alarm_after(seconds: float, error: type[Exception] = AlarmError) -> Iterator[Any]:
    """Expects what the handler of an alarm raises within; a busy machine may take long to get there."""
    with pytest.raises(error) as caught:  # noqa: PT012 - the alarm may come at once
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield caught


def filled(count: int, value: float) -> torch.Tensor:
    return torch.full((count,), value)


def decoys(count: int) -> list[torch.Tensor]:
    """Returns tensors that lie where those of the same size have just been freed."""
    gc.collect()
    return [filled(count, FREED) for _ in range(8)]


def untouched(tensors: list[torch.Tensor]) -> bool:
    return all(bool((tensor == FREED).all()) for tensor in tensors)


def run(layer: str, body: Any, *args: Any, backend: str = "host", **options: Any) -> None:
    """Runs a body on two ranks of a world of ``collectives`` or of ``torch.distributed``."""
    options = {"isolated": True, **options}
    if layer == "torch.distributed":
        name = {"host": "collectives"}.get(backend, f"collectives_{backend}")
        run_torch(body, 2, layer, *args, backend=name, **options)
    else:
        run_world(body, 2, layer, *args, backend=backend, **options)


layers = pytest.mark.parametrize("layer", ["collectives", "torch.distributed"])


# ---- blocking messages -----------------------------------------------------------------------------------


def receive(rank: int, size: int, layer: str, count: int, turns: int) -> None:
    """An alarm ends a receive before the sender begins; the next receive gets the message."""
    dist = importlib.import_module(layer)
    store = current_store()
    others: list[torch.Tensor] = []
    for turn in range(turns):
        if rank == 0:
            store.wait([f"{turn} interrupted"])
            dist.send(filled(count, SENT + turn), 1)
            continue
        with alarms():
            given = filled(count, USED)
            with alarm_after((0.004, 0.04)[turn % 2]):
                dist.recv(given, 0)
        del given
        others += decoys(count)
        store.set(f"{turn} interrupted", "x")
        got = filled(count, USED)
        dist.recv(got, 0)
        assert got.eq(SENT + turn).all(), turn
    assert untouched(others)


@pytest.mark.parametrize(
    ("layer", "count", "placement"),
    [
        ("collectives", SMALL, "aa"),
        ("collectives", LARGE, "ab"),
        ("torch.distributed", LARGE, "aa"),
        ("torch.distributed", SMALL, "ab"),
    ],
)
def test_an_interrupted_receive_takes_no_message(layer: str, count: int, placement: str) -> None:
    run(layer, receive, count, 6, placement=placement)


def receive_of_a_part(rank: int, size: int, layer: str, turns: int) -> None:
    """An alarm ends a receive while its message comes; the next receive gets the whole of it."""
    dist = importlib.import_module(layer)
    recv = inspect.unwrap(dist.recv)  # the alarm may come in torch's decorator, when all is done
    times = random.Random(1)
    interrupted = 0
    given, got = torch.empty(LARGE), torch.empty(LARGE)
    for turn in range(turns):
        first = SENT + 3 * turn
        if rank == 0:
            for part in range(3):
                dist.send(filled(LARGE, first + part), 1)
        else:
            received = 0
            with alarms():
                while received < 2:
                    given.fill_(USED)
                    done = False
                    try:
                        signal.setitimer(signal.ITIMER_REAL, times.uniform(1e-5, 6e-3))
                        recv(given, 0)
                        done = True
                        signal.setitimer(signal.ITIMER_REAL, 0)
                    except AlarmError:
                        interrupted += 1
                        has_come = not done and bool(given.eq(first + received).all())
                        if not done and (interrupted % 2 or has_come):
                            given.fill_(FREED)
                            dist.recv(got, 0)
                            assert given.eq(FREED).all(), (turn, received)
                            # Python runs the handler also when the receive is over.
                            received += has_come and bool(got.eq(first + received + 1).all())
                            found = got.unique(return_counts=True)
                            assert got.eq(first + received).all(), (turn, received, found)
                            received += 1
                    if done:
                        assert given.eq(first + received).all(), (turn, received)
                        received += 1
            if received == 2:
                dist.recv(got, 0)
                assert got.eq(first + 2).all(), turn
        dist.barrier()
    assert rank == 0 or interrupted > turns // 4


@pytest.mark.sampled(1)
@layers
@pytest.mark.parametrize("placement", ["aa", "ab"])
def test_an_interrupted_receive_gives_back_what_had_come(layer: str, placement: str) -> None:
    run(layer, receive_of_a_part, 30, placement=placement)


def send(rank: int, size: int, layer: str, turns: int) -> None:
    """An alarm ends a send of which a part has left, and one behind it; the receiver gets right bytes."""
    dist = importlib.import_module(layer)
    store = current_store()
    for turn in range(turns):
        if rank == 0:
            store.wait([f"{turn} interrupted"])
            got, come = torch.empty(LARGE), []
            while come[-1:] != [turn + 2]:
                dist.recv(got, 1)
                assert got.eq(got[0]).all(), (turn, come)
                come.append(int(got[0] - SENT))
            assert come in ([turn + 2], [turn, turn + 2], [turn, turn + 1, turn + 2]), (turn, come)
            continue
        with alarms():
            for value in (SENT, SENT + 1):
                given = filled(LARGE, value + turn)
                with alarm_after(0.03):
                    dist.send(given, 0)
                given.fill_(FREED)
        del given
        others = decoys(LARGE)
        store.set(f"{turn} interrupted", "x")
        dist.send(filled(LARGE, SENT + 2 + turn), 0)
        assert untouched(others)


@layers
@pytest.mark.parametrize("placement", ["aa", "ab"])
def test_an_interrupted_send_leaves_whole_or_not_at_all(layer: str, placement: str) -> None:
    run(layer, send, 3, placement=placement)


def waits(rank: int, size: int, layer: str) -> None:
    """An alarm ends the wait for operations that go on when somebody waits again."""
    dist = importlib.import_module(layer)
    store = current_store()
    if rank == 0:
        store.wait(["interrupted"])
        for value in range(4):
            dist.send(filled(SMALL, SENT + value), 1)
        dist.all_reduce(filled(SMALL, USED))
        return
    got = [filled(SMALL, USED) for _ in range(4)]
    works = [dist.irecv(tensor, 0) for tensor in got]
    reduced = filled(SMALL, USED)
    works.append(dist.all_reduce(reduced, async_op=True))
    with alarms():
        for work in works:
            with alarm_after(0.03):
                work.wait()
    store.set("interrupted", "x")
    for work in works:
        work.wait()
    for value, tensor in enumerate(got):
        assert tensor.eq(SENT + value).all()
    assert reduced.eq(2 * USED).all()


@layers
def test_interrupted_waits_for_works_begin_again(layer: str) -> None:
    run(layer, waits)


def receive_otherwise(rank: int, size: int, layer: str, turns: int) -> None:
    """Receives that the core does not take as they are: into gaps, and from any rank."""
    dist = importlib.import_module(layer)
    store = current_store()
    for turn in range(turns):
        if rank == 0:
            store.wait([f"{turn} interrupted"])
            dist.send(filled(SMALL, SENT + turn), 1)
            continue
        given = filled(2 * SMALL, USED)[::2] if turn % 2 else filled(SMALL, USED)
        source = 0 if turn % 2 else None
        with alarms(), alarm_after(0.03):
            dist.recv(given, source)
        store.set(f"{turn} interrupted", "x")
        got = filled(SMALL, USED)
        assert dist.recv(got) == 0
        assert got.eq(SENT + turn).all()
        assert given.eq(USED).all()


@layers
def test_an_interrupted_receive_of_any_kind_takes_no_message(layer: str) -> None:
    run(layer, receive_otherwise, 4)


# ---- waits -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def at_a_signal(action: Callable[[], object]) -> Iterator[None]:
    """Has a thread act when a signal has come; its handler may run later, as behind a wait of Gloo's."""
    listens, told = socket.socketpair()
    told.setblocking(False)
    before = signal.set_wakeup_fd(told.fileno())
    thread = threading.Thread(target=lambda: listens.recv(1) and action())
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        told.close()
        thread.join()
        listens.close()


def passed_on(group: collectives.ProcessGroup) -> None:
    """What a handler raises leaves a wait as it is, though operations, too, raise errors of its class."""
    store, me = current_store(), group.rank()
    got = filled(SMALL, USED)
    for connects in (group.barrier, lambda: group.recv(got, 1) if me == 0 else group.send(got, 0)):
        connects().wait()
    calls = [
        (lambda: group.recv(got, 1), lambda: group.send(filled(SMALL, SENT), 0)),
        (lambda: group.allreduce(got), lambda: group.allreduce(filled(SMALL, SENT - USED))),
    ]
    if not group.needs_batches:  # a receive from the own rank may come first
        calls.append((lambda: group.recv(got, me, 5), lambda: group.send(filled(SMALL, SENT), me, 5)))
    cases = [(0.02, ValueError("mine")), (0.4, TimeoutError("mine"))]
    for number, (call, (seconds, error)) in enumerate(itertools.product(calls, cases)):
        waits, answers = call
        itself = number >= 4
        if me == 1:
            if not itself:
                store.wait([f"signalled {number}"])
                answers().wait()
            continue
        got.fill_(USED)
        work = waits()
        with at_a_signal(answers if itself else partial(store.set, f"signalled {number}", "x")):
            interrupted(group, work, seconds, error)
        work.wait()
        assert group.to_host(got).eq(SENT).all()


def interrupted(group: collectives.ProcessGroup, work: Any, seconds: float, error: Exception) -> None:
    def raise_it(*_: object) -> None:
        raise error

    blocks = timedelta(seconds=20) if group.is_stream_ordered(torch.device("cpu")) else None
    with alarms(raise_it), alarm_after(seconds, type(error)) as caught:
        work.wait(blocks)
    assert caught.value is error


def test_what_a_handler_raises_leaves_a_wait_as_it_is(backend: str) -> None:
    run_ranks(passed_on, 2, backend=backend, isolated=True)


# ---- blocking collectives --------------------------------------------------------------------------------


def collective(rank: int, size: int, layer: str, busy: bool) -> None:
    """An alarm ends an all-reduce for all ranks; nothing is written afterwards."""
    dist = importlib.import_module(layer)
    store = current_store()
    told = pytest.raises(collectives.GroupAbortedError, match="rank 1 was interrupted in all_reduce")
    if rank == 0:
        store.wait(["interrupted"])
        with told:
            dist.all_reduce(filled(LARGE, SENT))
        return
    before = [dist.all_reduce(filled(SMALL, USED), async_op=True)] if busy else []
    given = filled(LARGE, USED)
    with alarms(), alarm_after(0.05):
        dist.all_reduce(given)
    given.fill_(FREED)
    store.set("interrupted", "x")
    with told:
        dist.barrier()
    time.sleep(0.2)
    assert given.eq(FREED).all()
    for work in before:
        with told:
            work.wait()


@layers
@pytest.mark.parametrize("busy", [False, True])
def test_an_interrupted_collective_ends_on_all_ranks(layer: str, busy: bool) -> None:
    run(layer, collective, busy)


# ---- asynchronous operations -----------------------------------------------------------------------------


def storm(rank: int, size: int, layer: str, name: str, count: int, times: int) -> None:
    """Alarms at any moment of calls whose Works and tensors go at once, while the peer is late."""
    dist = importlib.import_module(layer)
    store = current_store()
    issue = {
        "broadcast": lambda x: dist.broadcast(x, 0, async_op=True),
        "all_reduce": lambda x: dist.all_reduce(x, async_op=True),
        "all_gather": lambda x: dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x, async_op=True),
        "irecv": lambda x: dist.irecv(x, 0),
        "isend": lambda x: dist.isend(x, 0),
    }[name]
    if rank == 0:
        store.wait(["issued"])
        sent = filled(count, SENT)
        answer = {"irecv": lambda x: dist.isend(x, 1), "isend": lambda x: dist.irecv(x, 1)}.get(name, issue)
        works = [(x := sent.clone(), answer(x)) for _ in range(times)]
        store.set("answered", "x")
        store.wait(["looked"])
        if name == "isend":
            done = [x for x, work in works if work.is_success()]
            assert done
            assert all(x.eq(USED).all() for x in done)
        return
    moments = random.Random(2)
    interrupted = 0
    others: list[torch.Tensor] = []
    with alarms():
        for _ in range(times):
            x = filled(count, USED)
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 2e-4))
                issue(x)
                time.sleep(1e-5)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except AlarmError:
                interrupted += 1
            del x
            others.append(filled(count, FREED))
            others.append(filled(count, FREED))
    assert interrupted > times // 10
    store.set("issued", "x")
    store.wait(["answered"])
    time.sleep(0.2)
    assert untouched(others)
    store.set("looked", "x")


@pytest.mark.parametrize(
    ("layer", "count"), [("collectives", SMALL), ("collectives", 50_000), ("torch.distributed", 50_000)]
)
@pytest.mark.parametrize("name", ["broadcast", "all_reduce", "all_gather", "irecv", "isend"])
def test_alarms_at_any_moment_of_asynchronous_calls(layer: str, name: str, count: int) -> None:
    run(layer, storm, name, count, 400)
