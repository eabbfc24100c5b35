"""What the gloo backend adds to Gloo: data types, names of lost ranks, an abort, messages to oneself."""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conformance.test_works import gate
from harness import current_store, run_ranks

from collectives import (
    DistBackendError,
    GroupAbortedError,
    PeerLostError,
    ProcessGroup,
    ReduceOp,
    UnsupportedOperationError,
)
from collectives.backends._shared.operation import Operation
from collectives.backends.gloo.reductions import REDUCTIONS, WireConversion, reduction_for
from collectives.backends.gloo.work import MessageGlooWork
from collectives.core.recording.flight_record import FlightRecord
from collectives.core.types import make_premul_sum
from collectives.registry.backends import GroupOptions, create_group

GLOO_OPTIONS = dist.ProcessGroupGloo._Options


def through(inputs: list[torch.Tensor], op: ReduceOp) -> list[int]:
    """Carries a plan out without Gloo."""
    made = reduction_for(inputs[0].dtype, op, len(inputs))
    assert isinstance(made, WireConversion)
    wires = [made.to_wire(tensor) for tensor in inputs]
    assert all(wire.data_ptr() != tensor.data_ptr() for wire, tensor in zip(wires, inputs, strict=True))
    stacked = torch.stack(wires)
    combine = {"SUM": torch.sum, "MIN": torch.amin, "MAX": torch.amax}[made.op.name]
    return made.from_wire(combine(stacked, dim=0)).reshape(-1).tolist()


LARGEST, SMALLEST = 2**63 - 1, -(2**63)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_averages_of_64_bit_integers_are_exact(dtype: torch.dtype, size: int) -> None:
    if dtype is torch.int64:
        rows = [[LARGEST, SMALLEST, -1, 7, -7, LARGEST], [LARGEST, SMALLEST, 0, 8, -8, SMALLEST],
                [LARGEST, SMALLEST, -1, 0, 0, -1], [LARGEST, SMALLEST, 0, 0, 0, 5]]  # fmt: skip
    else:
        rows = [
            [2**64 - 1, 2**63, 0, 7],
            [2**64 - 1, 2**63, 1, 8],
            [2**64 - 1, 1, 1, 0],
            [2**64 - 1, 0, 0, 0],
        ]
    inputs = [torch.tensor(row, dtype=dtype) for row in rows[:size]]
    totals = [sum(column) for column in zip(*rows[:size], strict=True)]
    expected = [abs(total) // size * (1 if total >= 0 else -1) for total in totals]
    assert through(inputs, ReduceOp.AVG) == expected


def test_order_of_unsigned_64_bit_integers() -> None:
    inputs = [torch.tensor([0, 2**63, 2**64 - 1], dtype=torch.uint64),
              torch.tensor([1, 2**63 - 1, 0], dtype=torch.uint64)]  # fmt: skip
    assert through(inputs, ReduceOp.MIN) == [0, 2**63 - 1, 0]
    assert through(inputs, ReduceOp.MAX) == [1, 2**63, 2**64 - 1]
    assert through(inputs, ReduceOp.SUM) == [1, 2**64 - 1, 2**64 - 1]


def test_every_reduction_has_a_plan() -> None:
    for dtype, names in REDUCTIONS.items():
        for name in names:
            op = make_premul_sum(2.0) if name == "PREMUL_SUM" else ReduceOp(name)
            assert reduction_for(dtype, op, 2) is not None, (dtype, name)


def sums_of_narrow_floats(group: ProcessGroup) -> list[float]:
    # One bit above 1 in each of the ranks is lost if every step is rounded to 8 bits.
    x = torch.full((4,), 1.0).to(torch.float8_e5m2)
    y = torch.tensor([0.125]).to(torch.float8_e5m2)
    mine = x if group.rank() == 0 else y.expand(4).contiguous()
    group.allreduce(mine).wait()
    return mine.to(torch.float32).tolist()


@pytest.mark.full
def test_float8_is_rounded_once() -> None:
    # 1 + 3 * 0.125 = 1.375 lies half way between 1.25 and 1.5; to even is 1.5. Rounded at every step it is 1.
    assert run_ranks(sums_of_narrow_floats, 4, backend="gloo") == [[1.5] * 4] * 4


def interface(group: ProcessGroup) -> int:
    x = torch.ones(1)
    for _ in range(4):
        group.allreduce(x).wait()
    return len(group._health.inner.options._devices)


def test_interfaces_are_chosen_by_environment() -> None:
    ours, gloos = "COLLECTIVES_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
    assert run_ranks(interface, 2, backend="gloo", env={ours: "lo", gloos: "none0"}) == [1, 1]
    assert run_ranks(interface, 2, backend="gloo", env={ours: None, gloos: "lo, lo"}) == [2, 2]


def one_more_interface(rank: int, size: int) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo" if rank == 1 else "lo"
    os.environ.pop("COLLECTIVES_SOCKET_IFNAME", None)
    with pytest.raises(DistBackendError) as info:
        create_group("gloo", GroupOptions(current_store(), rank, size, group_name="uneven"))
    return str(info.value)


def test_ranks_with_different_numbers_of_interfaces() -> None:
    for rank, text in enumerate(run_ranks(one_more_interface, 3, isolated=True)):
        assert text.startswith(f"[rank {rank}] gloo group 'uneven' of 3: all ranks must use the same number")
        assert "rank 0 has 1 interface, connected at once, and rank 1 2 interfaces, connected at once" in text


def connections() -> list[int]:
    """Returns how many bytes came in through each TCP connection of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                one.getpeername()
                told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        except OSError:  # closed meanwhile, or no connection
            continue
        found.append(struct.unpack_from("=Q", told, 128)[0])  # tcpi_bytes_received
    return found


def in_turn(group: ProcessGroup) -> list[int]:
    before = max(connections(), default=0)
    for _ in range(4):
        group.allreduce(torch.ones(1 << 18)).wait()
    group.barrier().wait()
    return [received >> 20 for received in connections() if received >= before + (1 << 19)]


@pytest.mark.parametrize(("names", "each"), [("lo", [4]), ("lo,lo", [2, 2])])
def test_operations_go_over_the_interfaces_in_turn(names: str, each: list[int]) -> None:
    env = {"COLLECTIVES_SOCKET_IFNAME": None, "GLOO_SOCKET_IFNAME": names}
    assert run_ranks(in_turn, 2, backend="gloo", env=env, isolated=True) == [each] * 2


def on_demand(group: ProcessGroup) -> list[int]:
    counts = [len(connections())]
    gate("counted", group)
    if group.rank() < 2:
        x = torch.full((3,), float(group.rank()))
        group.send(x, 1).wait() if group.rank() == 0 else group.recv(x, 0).wait()
        assert x.tolist() == [0.0] * 3
    counts.append(len(connections()))
    gate("counted again", group)
    for _ in range(group.size()):
        group.barrier().wait()
    everything = [torch.empty(2) for _ in range(group.size())]
    group.alltoall(everything, [torch.full((2,), float(group.rank()))] * group.size()).wait()
    assert [part[0].item() for part in everything] == list(range(group.size()))
    counts.append(len(connections()))
    gate("counted last", group)
    return counts


def test_connections_on_demand() -> None:
    """TORCH_GLOO_LAZY_INIT: two ranks connect when they first need it, else all at once."""
    env = {"COLLECTIVES_SOCKET_IFNAME": None, "GLOO_SOCKET_IFNAME": "lo"}
    made = run_ranks(on_demand, 4, backend="gloo", env={**env, "TORCH_GLOO_LAZY_INIT": "1"}, isolated=True)
    assert [[n - counts[0] for n in counts] for counts in made] == [[0, 1, 3]] * 2 + [[0, 0, 3]] * 2
    made = run_ranks(on_demand, 4, backend="gloo", env={**env, "TORCH_GLOO_LAZY_INIT": "0"}, isolated=True)
    assert [[n - counts[0] for n in counts] for counts in made] == [[0, 0, 0]] * 4


def abort_before_connecting(group: ProcessGroup) -> None:
    store = current_store()
    if group.rank() == 0:
        store.wait(["waiting1", "waiting2"])
        group.abort()
        store.set("aborted", "")
        return
    work = group.allreduce(torch.ones(3))
    store.set(f"waiting{group.rank()}", "")
    with pytest.raises(GroupAbortedError, match="rank 0 aborted the group"):
        work.wait()
    store.wait(["aborted"])


def test_an_abort_reaches_those_who_wait_for_a_connection() -> None:
    env = {"TORCH_GLOO_LAZY_INIT": "1"}
    run_ranks(abort_before_connecting, 3, backend="gloo", env=env, isolated=True)


def wrong_interface(rank: int, size: int) -> str:
    with pytest.raises(DistBackendError) as info:
        create_group("gloo", GroupOptions(dist.HashStore(), 0, 1))
    return str(info.value)


def test_an_interface_that_is_not_there() -> None:
    (text,) = run_ranks(wrong_interface, 1, env={"COLLECTIVES_SOCKET_IFNAME": "none0"})
    assert "none0" in text
    assert "set COLLECTIVES_SOCKET_IFNAME to one that is up" in text


def test_wrong_options() -> None:
    with pytest.raises(TypeError, match=r"\[rank 0\] pg_options of the gloo backend must be .*but is 3"):
        create_group("gloo", GroupOptions(dist.HashStore(), 0, 1, pg_options=3))
    with pytest.raises(TypeError, match=r"\[rank 0\] .* unknown are lanes; known are _threads, _devices"):
        create_group("gloo", GroupOptions(dist.HashStore(), 0, 1, pg_options={"lanes": 3}))


def own_options(rank: int, size: int) -> tuple[int, timedelta]:
    options = GLOO_OPTIONS()
    options._threads = 5
    store = current_store()
    made = GroupOptions(store, rank, size, timedelta(seconds=17), pg_options=options)
    group = create_group("gloo", made)
    used = group._health.inner.options
    group.barrier().wait()
    result = used._threads, used._timeout
    del used
    group.shutdown()
    return result


def test_options_of_torch_are_used() -> None:
    assert run_ranks(own_options, 2) == [(5, timedelta(seconds=17))] * 2


def alone_of_two(rank: int, size: int) -> float:
    began = time.monotonic()
    with pytest.raises(
        DistBackendError, match=r"could not be connected by Gloo.*whether all 2 ranks run"
    ) as info:
        create_group("gloo", GroupOptions(current_store(), 0, 2, timedelta(seconds=1)))
    assert "[rank 0]" in str(info.value)
    return time.monotonic() - began


def test_a_rank_that_does_not_come() -> None:
    (took,) = run_ranks(alone_of_two, 1)
    assert took < 20


def unmatched_self(group: ProcessGroup) -> None:
    me = group.rank()
    got = torch.empty(1)
    work = group.recv_anysource(got, 3)
    with pytest.raises(UnsupportedOperationError, match="send first, or receive from this rank by number"):
        group.send(torch.ones(1), me, 3)
    group.send(torch.ones(1), me, 4)  # another tag is another matter
    group.send(torch.full((1,), 5.0), 1 - me, 3)
    work.wait()
    assert got.item() == 5.0
    assert work.source_rank() == 1 - me
    group.send(torch.full((1,), 6.0), me, 3)
    group.recv_anysource(got, 3).wait()
    assert got.item() == 6.0
    group.recv(got, me, 4).wait()


def test_a_message_to_oneself_that_gloo_cannot_match() -> None:
    run_ranks(unmatched_self, 2, backend="gloo")


def done_when_sent(group: ProcessGroup) -> None:
    """A receive from the own rank is done as soon as the message is sent, however it is asked."""
    for name, answer in (("is_completed", True), ("result", [torch.ones(1)]), ("source_rank", group.rank())):
        work = group.recv(torch.empty(1), group.rank(), 1)
        assert not work.is_completed()
        group.send(torch.ones(1), group.rank(), 1)
        assert getattr(work, name)() == answer


def test_a_receive_from_oneself_is_done_when_it_is_sent() -> None:
    run_ranks(done_when_sent, 1, backend="gloo")


def wrong_size(group: ProcessGroup) -> None:
    group.send(torch.ones(3), group.rank(), 1)
    with pytest.raises(ValueError, match="has 12 bytes, but the tensor to receive it has 8"):
        group.recv(torch.ones(2), group.rank(), 1).wait()


def test_a_message_to_oneself_of_another_size() -> None:
    run_ranks(wrong_size, 1, backend="gloo")


def forgotten_messages(group: ProcessGroup) -> int:
    peer = 1 - group.rank()
    for n in range(300):
        group.send(torch.full((10,), float(n)), peer)
    got = torch.empty(10)
    for n in range(300):
        group.recv(got, peer).wait()
        assert got[0].item() == n
    deadline = time.monotonic() + 10
    while len(group._health.messages) > 64 and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(group._health.messages)


def test_messages_that_nobody_waits_for_are_let_go() -> None:
    assert max(run_ranks(forgotten_messages, 2, backend="gloo")) <= 64


def leave(group: ProcessGroup, how: str) -> str:
    group.barrier().wait()
    if group.rank() == 1:
        time.sleep(0.2)
        if how == "exit":
            os._exit(0)
        group.abort() if how == "abort" else group.shutdown()
        current_store().wait([f"seen{rank}" for rank in (0, 2)])
        return ""
    with pytest.raises(GroupAbortedError if how == "abort" else PeerLostError) as info:
        group.allreduce(torch.ones(3)).wait()
    assert getattr(info.value, "rank", 1) == 1
    current_store().set(f"seen{group.rank()}", "x")
    return str(info.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", "rank 1 is lost: its process"),
        ("abort", "rank 1 aborted the group"),
        ("shutdown", "rank 1 is lost: it shut the group down"),
    ],
)
def test_how_a_rank_left_is_told(how: str, said: str) -> None:
    results = run_ranks(leave, 3, how, backend="gloo", isolated=True, lost={1})
    for rank in (0, 2):
        assert said in results[rank]


def abort_of_two_contexts(group: ProcessGroup) -> None:
    group.barrier().wait()
    if group.rank() == 0:
        works = [group.allreduce(torch.ones(3)) for _ in range(2)] + [
            group.recv(torch.ones(1), 1, tag) for tag in range(4)
        ]
        began = time.monotonic()
        group.abort()
        for work in works:
            with pytest.raises(GroupAbortedError):
                work.wait()
        assert time.monotonic() - began < 10
        current_store().set("aborted", "x")
    else:
        current_store().wait(["aborted"])
        with pytest.raises((PeerLostError, GroupAbortedError)):
            group.recv(torch.ones(1), 0, 9).wait()


def test_abort_reaches_every_device() -> None:
    env = {"COLLECTIVES_SOCKET_IFNAME": "lo,lo"}
    run_ranks(abort_of_two_contexts, 2, backend="gloo", env=env, isolated=True)


def abort_in_a_callback(group: ProcessGroup) -> bool:
    ended, done = threading.Event(), threading.Event()

    def callback(future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if future.value()[0].item() == group.size():
            group.abort()
            ended.set()
        done.set()

    group.barrier().wait()
    work = group.allreduce(torch.ones(1))
    work.get_future().add_done_callback(callback)
    done.wait(30)
    with pytest.raises(GroupAbortedError):
        group.barrier()
    return ended.is_set()


def test_an_abort_in_a_callback() -> None:
    """Gloo's own thread runs it, which cannot be the one that ends Gloo's threads."""
    assert run_ranks(abort_in_a_callback, 2, backend="gloo", isolated=True) == [True] * 2


def ask_in_a_callback(group: ProcessGroup) -> None:
    heard = threading.Event()
    seen: list[object] = []

    def callback(_: object) -> None:
        seen.extend([work.is_completed(), work.exception(), work.wait(), [x.item() for x in work.result()]])
        heard.set()

    work = group.allreduce(torch.ones(1))
    work.get_future().add_done_callback(callback)
    assert heard.wait(30)
    assert seen == [True, None, True, [2.0]]


def test_a_work_is_asked_in_a_callback() -> None:
    """Gloo's own Work is not done before its callbacks are."""
    run_ranks(ask_in_a_callback, 2, backend="gloo")


def dropped_in_flight(rank: int, size: int) -> bool:
    made = GroupOptions(current_store(), rank, size, timedelta(seconds=20), pg_options=GLOO_OPTIONS())
    group = create_group("gloo", made)
    x, seen, called = torch.ones(1), weakref.ref(group), threading.Event()
    work = group.allreduce(x)
    work.get_future().add_done_callback(lambda _: called.set())
    del group, work, made
    if rank == 1:
        time.sleep(0.3)
    assert called.wait(30)
    deadline = time.monotonic() + 30
    while seen() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return seen() is None


def test_a_group_dropped_with_an_operation_on_its_way() -> None:
    assert run_ranks(dropped_in_flight, 2, isolated=True) == [True] * 2


def interrupted(group: ProcessGroup) -> tuple[bool, list[float]]:
    store = current_store()
    if group.rank() == 1:
        store.wait(["interrupted"])
        group.send(torch.ones(2), 0).wait()
        return True, []
    got = torch.zeros(2)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)  # raises behind Gloo's wait
        store.set("interrupted", "")

    threading.Timer(1.0, interrupt).start()
    work = group.recv(got, 1)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    ending = threading.Thread(target=group.shutdown, daemon=True)
    ending.start()
    ending.join(30)
    return not ending.is_alive(), got.tolist()


def test_a_signal_during_a_receive_leaves_it_done() -> None:
    results = run_ranks(interrupted, 2, backend="gloo", isolated=True)
    assert results == [(True, [1.0] * 2), (True, [])]


class Fails:
    """Stands for a message of Gloo and its group: it fails, and a signal comes while the cause is sought."""

    where = "[rank 0]"

    def wait(self, _: timedelta) -> bool:
        raise RuntimeError("Connection closed by peer")

    def failed(self, *_: object) -> DistBackendError:
        raise KeyboardInterrupt

    def refuse_in_child(self, _: object) -> None:
        pass


def test_a_message_has_failed_though_a_signal_comes_while_the_cause_is_sought() -> None:
    operation = Operation(FlightRecord(lambda _: None), "recv", 1, [], timedelta(seconds=60))
    work = MessageGlooWork(Fails(), Fails(), operation, operation.begin(), 1)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert work.is_completed()
    with pytest.raises(DistBackendError, match="Connection closed by peer"):
        work.wait(timedelta(seconds=1))


def keeps_the_users_options(group: ProcessGroup) -> None:
    options = GLOO_OPTIONS()
    before = options._timeout
    made = create_group(
        "gloo",
        GroupOptions(
            dist.PrefixStore("other", current_store()),
            group.rank(),
            group.size(),
            timeout=timedelta(seconds=7),
            pg_options=options,
        ),
    )
    assert (options._devices, options._timeout) == ([], before)
    made.shutdown()


def test_the_users_options_stay_as_they_are() -> None:
    run_ranks(keeps_the_users_options, 2, backend="gloo")
