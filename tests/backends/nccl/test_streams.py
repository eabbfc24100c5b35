"""Order on streams: producers that are late, consumers on other streams, tensors that nobody keeps."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conformance.test_works import eventually, gate
from nccl_double.device import DoubleDevice, pool_stream
from nccl_double.groups import SEEDS, load, make_group, run_over_double

from collectives import CollectiveTimeoutError, ProcessGroup, Work
from collectives.backends.nccl import ProcessGroupNCCL
from collectives.backends.round_robin.group import LaneWork
from collectives.core.types import AllreduceOptions
from collectives.store import PrefixStore
from collectives.torch_bridge.work import TorchWork

DELAY = 0.2
CPU = torch.device("cpu")


def late(device: DoubleDevice, stream: int, tensor: torch.Tensor, value: float) -> None:
    """Lets a stream fill a tensor, after a while."""
    device.sleep(stream, DELAY)
    with device.using(stream):
        tensor.fill_(value)


def asynchronous(group: ProcessGroup) -> None:
    """The operation waits for the current stream, and the current stream, by wait(), for the operation."""
    device, me, size = DoubleDevice.shared(CPU), group.rank(), group.size()
    own, other = pool_stream(), pool_stream()
    total = sum(range(1, size + 1))
    for layout in ("dense", "strided"):
        seen = []
        with device.using(own):
            x = torch.zeros(16) if layout == "dense" else torch.zeros(48)[::3]
            late(device, own, x, 1.0 + me)
            work = group.allreduce(x)
            assert not work.is_completed()
            began = time.monotonic()
            work.wait()
            seen.append(torch.empty(16).copy_(x))
            assert time.monotonic() - began < DELAY / 2, "the host waited"
            assert work.is_completed()
        with device.using(other):  # another stream waits, too
            work.wait()
            seen.append(torch.empty(16).copy_(x))
        device.synchronize(own)
        device.synchronize(other)
        assert [copy.tolist() for copy in seen] == [[total] * 16] * 2


def on_the_current_stream(group: ProcessGroup) -> None:
    device, me, size = DoubleDevice.shared(CPU), group.rank(), group.size()
    own = pool_stream()
    with device.using(own):
        x = torch.zeros(48)[::3]
        late(device, own, x, 1.0 + me)
        work = group.allreduce([x], AllreduceOptions(asyncOp=False))
        assert not work._pending.completed()
        work.wait()
    device.synchronize(own)
    assert x.tolist() == [sum(range(1, size + 1))] * 16


def kept_alive(group: ProcessGroup) -> None:
    """Tensors live until the streams have passed the operation, and not for ever."""
    device = DoubleDevice.shared(CPU)
    own = pool_stream()
    with device.using(own):
        device.sleep(own, DELAY)
        x = torch.ones(1000)
        alive = weakref.ref(x)
        work = group.allreduce(x)
        del x, work
        gc.collect()
        assert alive() is not None, "freed while NCCL uses it"
    group.barrier().wait()
    group.allreduce(torch.ones(1)).wait()
    assert eventually(lambda: alive() is None), "never let go"

    x = torch.ones(10)
    alive = weakref.ref(x)
    work = group.allreduce(x)
    work.wait()
    assert work.result()[0] is x
    del x, work
    gc.collect()
    assert eventually(lambda: alive() is None), "kept beyond wait()"


def kept_alive_where_a_signal_raises(group: ProcessGroup) -> None:
    """Tensors of an operation live as long when a signal's handler raises before its Work is there."""
    device = DoubleDevice.shared(CPU)
    own, launch = pool_stream(), ProcessGroupNCCL._launch

    def interrupted(*arguments: Any) -> None:
        launch(*arguments)
        raise KeyboardInterrupt

    with device.using(own):
        device.sleep(own, DELAY)
        x = torch.ones(1000)
        alive = weakref.ref(x)
        with mock.patch.object(ProcessGroupNCCL, "_launch", interrupted), suppress(KeyboardInterrupt):
            group.allreduce(x)
        del x
        gc.collect()
        assert alive() is not None, "freed while NCCL uses it"
    group.allreduce(torch.ones(1)).wait()
    group.barrier().wait()
    assert eventually(lambda: alive() is None), "never let go"
    assert group._first_cause() is None


def waited_for_elsewhere(group: ProcessGroup) -> None:
    """Another stream's wait does not give tensors back to the stream that they belong to."""
    device = DoubleDevice.shared(CPU)
    own, other = pool_stream(), pool_stream()
    with device.using(own):
        x = torch.ones(1000)
        alive = weakref.ref(x)
        work = group.allreduce(x)
    with device.using(other):
        work.wait()
        device.synchronize(other)
    del x, work
    gc.collect()
    assert alive() is not None, "let go, though the stream that it belongs to has not waited"
    group.allreduce(torch.ones(1)).wait()
    assert eventually(lambda: alive() is None), "never let go"


def an_unanswered_receive(group: ProcessGroup) -> None:
    """Neither futures of later operations nor the end of their tensors wait for it."""
    device, me = DoubleDevice.shared(CPU), group.rank()
    got = torch.empty(4)
    receive = group.recv(got, 1 - me)
    answered = receive.get_future()
    x = torch.ones(1000)
    alive = weakref.ref(x)
    future = group.allreduce(x).get_future()
    assert future.wait()[0] is x
    device.synchronize(device.current_stream())  # not held back by the receive
    del x, future
    gc.collect()
    group.barrier().wait()
    group.allreduce(torch.ones(1)).wait()
    assert eventually(lambda: alive() is None), "kept because of a receive"
    assert not receive.is_completed()
    assert answered.done(), "on a device, what has been issued"
    gate("seen unanswered", group)
    group.send(torch.full((4,), float(me)), 1 - me).wait()
    receive.wait()
    device.synchronize(device.current_stream())
    assert answered.wait()[0].tolist() == [1.0 - me] * 4


def issued_by_two_threads(group: ProcessGroup) -> None:
    """Operations of two threads, in any order: messages here, in the other direction there."""
    peer, turns = 1 - group.rank(), 200
    tensors = [torch.zeros(8) for _ in range(turns)]
    works: list[Work] = []
    errors: list[Exception] = []

    def issue(call: Callable[[torch.Tensor], Work], values: Iterable[torch.Tensor]) -> None:
        try:
            works.extend(call(value) for value in values)
        except Exception as error:  # noqa: BLE001 - told below
            errors.append(error)

    given = [torch.full((8,), float(turn)) for turn in range(turns)]
    threads = [
        threading.Thread(target=issue, args=(lambda x: group.send(x, peer), given)),
        threading.Thread(target=issue, args=(lambda x: group.recv(x, peer), tensors)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for work in works:
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == list(range(turns))


def futures(group: ProcessGroup) -> None:
    device, me, size = DoubleDevice.shared(CPU), group.rank(), group.size()
    own = pool_stream()
    with device.using(own):
        x = torch.zeros(3)
        late(device, own, x, 1.0 + me)
        future = group.allreduce(x).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
    total = float(sum(range(1, size + 1)))
    assert doubled.wait().tolist() == [2 * total] * 3
    assert future.wait()[0] is x
    strided = torch.ones(8)[::2]
    works = [
        group.allreduce(strided),
        group.allgather([torch.empty(4) for _ in range(size)], torch.ones(4)),
        group.barrier(),
        group.allreduce_coalesced([torch.ones(2), torch.ones(3, dtype=torch.int32)]),
    ]
    asked = [work.get_future() for work in works]
    assert all(one.done() for one in asked), "on a device, what has been issued"
    results = [one.wait() for one in asked]
    assert [len(result) for result in results] == [1, size, 0, 2]
    assert strided.tolist() == results[0][0].tolist() == [float(size)] * 4
    assert [tensor.tolist() for tensor in results[3]] == [[size] * 2, [size] * 3]
    for work, one in zip(works, asked, strict=True):
        assert work.get_future() is one
        assert work.get_future_result().wait() == 0


def last_steps(group: ProcessGroup) -> None:
    """What is written back behind an operation is there for every stream that waits, wherever it ran."""
    device, me, size = DoubleDevice.shared(CPU), group.rank(), group.size()
    own, other = pool_stream(), pool_stream()
    total = float(sum(range(1, size + 1)))
    for asks in (True, False):
        seen = []
        with device.using(own):
            x = torch.zeros(48)[::3]
            late(device, own, x, 1.0 + me)
            # Tensors that share memory are reduced as copies, which a last step writes back.
            work = group.allreduce_coalesced([x, x])
            if asks:
                work.get_future()
            work.wait()
            seen.append(torch.empty(16).copy_(x))
        with device.using(other):
            work.wait()
            seen.append(torch.empty(16).copy_(x))
        device.synchronize(own)
        device.synchronize(other)
        assert [copy.tolist() for copy in seen] == [[total] * 16] * 2


def last_steps_of_nobody(group: ProcessGroup) -> None:
    """On a device, what is written back goes to the first stream that waits, and to none before."""
    device = DoubleDevice.shared(CPU)
    x = torch.ones(8)
    work = group.allreduce_coalesced([x[:4], x])  # the second as a copy
    total = float(group.size())
    assert eventually(work._inner.is_completed)
    assert x.tolist() == [total] * 4 + [1.0] * 4
    own = pool_stream()
    with device.using(own):
        work.wait()
        read = torch.empty(8).copy_(x)
    device.synchronize(own)
    assert read.tolist() == [total] * 8


def host_blocks(group: ProcessGroup) -> None:
    """A barrier's wait blocks the host, as one with a limit does, after which the operation goes on."""
    device = DoubleDevice.shared(CPU)
    own = pool_stream()
    with device.using(own):
        device.sleep(own, DELAY)
        began = time.monotonic()
        group.barrier().wait()
        assert time.monotonic() - began > DELAY / 2
        device.sleep(own, DELAY)
        x = torch.ones(2)
        work = group.allreduce(x)
        with pytest.raises(
            CollectiveTimeoutError, match=r"all_reduce #\d+ \(SUM, torch.float32 \[2\]\).*goes on"
        ):
            work.wait(timedelta(milliseconds=20))
        assert not work.is_completed()
        assert work.wait(timedelta(seconds=20))
        assert x.tolist() == [group.size()] * 2


def messages(group: ProcessGroup) -> None:
    device, me = DoubleDevice.shared(CPU), group.rank()
    own = pool_stream()
    with device.using(own):
        x, y = torch.zeros(4), torch.zeros(4)
        late(device, own, x, 5.0 + me)
        sent = group.send(x, 1 - me)
        received = group.recv(y, 1 - me)
        received.wait()
        sent.wait()
    device.synchronize(own)
    assert y.tolist() == [5.0 + 1 - me] * 4


def messages_to_oneself(group: ProcessGroup) -> None:
    """Whoever waits for one comes behind it, on whichever stream, with whatever hands its value on."""
    device, me = DoubleDevice.shared(CPU), group.rank()
    sender, receiver, other = pool_stream(), pool_stream(), pool_stream()
    with device.using(sender):
        x = torch.zeros(4)
        late(device, sender, x, 9.0)
        sent = group.send(x, me)
        assert not sent.is_completed()
    with device.using(receiver):
        y = torch.zeros(4)
        received = group.recv(y, me)
        assert not received.is_completed()
        doubled = received.get_future().then(lambda done: done.value()[0] * 2)
    with device.using(other):
        sent.wait()
        x.fill_(-1.0)
        received.wait()
        seen = torch.empty(4).copy_(y)
        assert doubled.wait().tolist() == [18.0] * 4
    device.synchronize(other)
    assert seen.tolist() == [9.0] * 4
    assert received.source_rank() == me
    assert received.result()[0] is y

    # In a batch, in any order, and beside others.
    y, z = torch.zeros(4), torch.zeros(3)
    with group._together():
        first = group.recv(y, me)
        works = [group.send(torch.full((3,), float(me)), 1 - me), group.recv(z, 1 - me)]
        works.append(group.send(torch.full((4,), 5.0), me))
    for work in [first, *works]:
        work.wait()
    assert (y.tolist(), z.tolist()) == ([5.0] * 4, [1.0 - me] * 3)


def beside_streams_of_users(group: ProcessGroup) -> None:
    """No operation and no future waits for what users do on their streams, of which there are 32 in all."""
    device, me, size = DoubleDevice.shared(CPU), group.rank(), group.size()
    total = [float(sum(range(1, size + 1)))] * 4
    goes_on = threading.Event()
    held = {pool_stream() for _ in range(33)}
    for stream in held:
        device.call(stream, goes_on.wait)
    try:
        own = device.take_stream(high_priority=False)
        with device.using(own):
            tensors = [torch.full((4,), 1.0 + me) for _ in range(40)]
            works: list[Any] = [group.allreduce(x) for x in tensors]
            with group._together():
                together = [group.allreduce(torch.full((4,), 1.0 + me)) for _ in range(4)]
                within = [work.get_future() for work in together]
            works += [*together, *map(TorchWork, works[:4]), LaneWork(works[0], lambda _: None)]
            futures = [*within, *(work.get_future() for work in works)]
            values = [future.wait() for future in futures]
            got = torch.empty(4)
            messages = [group.send(torch.full((4,), float(me)), 1 - me), group.recv(got, 1 - me)]
            for work in messages:
                work.wait()
            passed = device.record(own)
        assert eventually(lambda: device.done(passed)), "waits for a stream of a user"
    finally:
        goes_on.set()
    assert [value[0].tolist() for value in values] == [total] * len(values)
    assert got.tolist() == [1.0 - me] * 4
    device.give_back(own, high_priority=False)
    for stream in held:
        device.synchronize(stream)


def connected_by_two_threads(group: ProcessGroup, path: Path) -> None:
    """Two threads with a group each, whose first operations come in another order on the other rank.

    A first operation makes connections, for which NCCL waits for the other rank.
    """
    double, rank = load(path), group.rank()
    store = group.get_group_store()
    groups = [make_group(path, "cupy", rank, 2, PrefixStore(name, store)) for name in ("first", "second")]
    one, other = groups if rank == 0 else groups[::-1]
    x, y = torch.ones(2), torch.ones(2)
    for member in groups:  # what is missing are the connections
        member._communicators.all_ranks(DoubleDevice.shared(CPU), timedelta(seconds=20))
    first = threading.Thread(target=lambda: one.allreduce(x).wait())
    first.start()
    assert eventually(lambda: double.connecting() == 1)
    gate("both are connecting", group)
    other.allreduce(y).wait()
    first.join()
    assert eventually(lambda: x.tolist() == [2.0] * 2 and y.tolist() == [2.0] * 2)
    for member in groups:
        member.shutdown()


LATER = (waited_for_elsewhere, an_unanswered_receive, issued_by_two_threads, beside_streams_of_users)


def streams(group: ProcessGroup) -> None:
    group.allreduce(torch.ones(1)).wait()
    for body in (
        asynchronous,
        on_the_current_stream,
        kept_alive,
        kept_alive_where_a_signal_raises,
        futures,
        last_steps,
        last_steps_of_nobody,
        host_blocks,
        messages,
        messages_to_oneself,
        *LATER,
    ):
        body(group)


DUPLEX = {"pg_options": ProcessGroupNCCL.Options(duplex_messages=True)}


def test_order_on_streams(nccl_library: Path) -> None:
    run_over_double(streams, 2, nccl_library, options=DUPLEX)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_streams_that_run_in_other_orders(nccl_library: Path, seed: int) -> None:
    run_over_double(streams, 2, nccl_library, options=DUPLEX, seed=seed)


def held(group: ProcessGroup, path: Path) -> tuple[int, list[int]]:
    """Returns how often streams were held while one carried tasks out, and the order of these."""
    device, own, order = DoubleDevice.shared(CPU), pool_stream(), []
    before = load(path).holds()
    for number in range(200):
        device.call(own, lambda number=number: order.append(number))
    device.synchronize(own)
    return load(path).holds() - before, order


def test_a_seed_holds_streams_and_keeps_their_order(nccl_library: Path) -> None:
    drawn = []
    for seed in (1, 1, 2, 0):
        ((holds, order),) = run_over_double(held, 1, nccl_library, nccl_library, seed=seed)
        assert order == list(range(200))
        drawn.append(holds)
    assert drawn[0] == drawn[1] > 0
    assert drawn[2] > 0
    assert drawn[3] == 0


def test_connections_made_by_two_threads(nccl_library: Path) -> None:
    run_over_double(connected_by_two_threads, 2, nccl_library, nccl_library)


def blocking_waits(group: Any, path: Path) -> None:
    cases = [("1", None, True), ("true", None, True), ("0", None, False)]
    cases += [(None, None, False), ("1", False, False), (None, True, True)]
    for number, (variable, chosen, blocks) in enumerate(cases):
        store = PrefixStore(str(number), group.get_group_store())
        with pytest.MonkeyPatch.context() as patch:
            if variable is None:
                patch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
            else:
                patch.setenv("TORCH_NCCL_BLOCKING_WAIT", variable)
            options = ProcessGroupNCCL.Options(blocking_wait=chosen)
            own = make_group(path, "cupy", group.rank(), group.size(), store, pg_options=options)
        every_wait_blocks(own, blocks)
        own.shutdown()


def every_wait_blocks(group: ProcessGroup, blocks: bool) -> None:
    device = DoubleDevice.shared(CPU)
    own = pool_stream()
    group.allreduce(torch.ones(1)).wait()
    with device.using(own):
        x = torch.zeros(2)
        late(device, own, x, 1.0)
        work = group.allreduce(x)
        work.wait()
        assert work._pending.completed() is blocks
        doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    device.synchronize(own)
    assert doubled.wait().tolist() == [2.0 * group.size()] * 2


def test_blocking_wait(nccl_library: Path) -> None:
    run_over_double(blocking_waits, 2, nccl_library, nccl_library)
