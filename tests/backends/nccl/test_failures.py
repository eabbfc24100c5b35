"""What goes wrong: ranks that do not come, give up, die or leave, and errors of NCCL; over the double."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conformance.test_interrupts import passed_on
from conformance.test_renewal import broken_and_renewed
from conformance.test_works import eventually, gate
from harness import Died
from nccl_double.groups import load, logged, make_group, run_over_double
from no_threads import threadless
from sources import IMPORTED_FROM
from store_server import store_server

import collectives
from collectives import (
    CollectiveTimeoutError,
    DistBackendError,
    GroupAbortedError,
    PeerLostError,
    ProcessGroup,
)
from collectives.backends.nccl import communicators
from collectives.backends.nccl.libnccl import NcclError
from collectives.core.types import AllreduceOptions, make_premul_sum
from collectives.store import TCPStore

SHORT = {"timeout": timedelta(seconds=1)}
BLOCKS = timedelta(seconds=15)
"""Lets ``wait()`` block the host."""


def is_broken(group: ProcessGroup, why: str, kind: type[Exception] = GroupAbortedError) -> None:
    calls = (lambda: group.allreduce(torch.ones(1)), group.barrier, lambda: group.send(torch.ones(1), 0))
    for call in calls:
        with pytest.raises(kind, match=why):
            call()


def a_rank_does_not_call(group: ProcessGroup) -> None:
    group.allreduce(torch.ones(1)).wait()
    if group.rank() == 1:
        gate("expired", group)
        # Here nothing has happened yet; what needs rank 0 learns of it.
        with pytest.raises(CollectiveTimeoutError, match="because rank 0 gave up: its all_reduce #2 passed"):
            group.recv(torch.ones(1), 0)
        is_broken(group, "first cause")
        return
    with pytest.raises(CollectiveTimeoutError, match="passed its time limit of 1 s") as info:
        group.allreduce([torch.ones(3)], AllreduceOptions(asyncOp=False)).wait(BLOCKS)
    assert "[rank 0]" in str(info.value)
    assert "all_reduce #2 (SUM, torch.float32 [3])" in str(info.value)
    assert "rank 1 waits in no operation" in str(info.value)
    is_broken(group, "first cause.*passed its time limit")
    gate("expired", group)


def without_threads(group: ProcessGroup) -> None:
    """An operation that finds no thread for its communicator, or for who watches it, has not begun."""
    x = torch.ones(3)
    with threadless(lambda: group.allreduce(x), lambda: group.allreduce(x)):
        gate("refused", group)
    group.allreduce(x).wait(BLOCKS)
    assert x.tolist() == [2.0] * 3


def elsewhere(group: ProcessGroup) -> None:
    """The message tells where the others are."""
    group.allreduce(torch.ones(1)).wait()
    if group.rank() == 0:
        group.send(torch.ones(2), 1).wait()
        with pytest.raises(
            CollectiveTimeoutError, match=r"rank 1 waits in recv #2 \(from rank 0, torch.float32"
        ):
            group.barrier(timeout=timedelta(seconds=3)).wait()
    else:
        x = torch.empty(2)
        group.recv(x, 0).wait()
        with pytest.raises(CollectiveTimeoutError, match="rank 0 gave up: its barrier #2"):
            group.recv(x, 0).wait(BLOCKS)


def limits_together(group: ProcessGroup) -> None:
    """Each of the operations that start together has its limit, and the first to pass ends all."""
    group.allreduce(torch.ones(1)).wait()
    if group.rank() == 1:
        gate("expired", group)
        return
    with group._together():
        works = [
            group.allreduce(torch.ones(2)),
            group.allreduce(torch.ones(3), timeout=timedelta(seconds=2)),
            group.allreduce(torch.ones(4), timeout=timedelta(seconds=9)),
        ]
    with pytest.raises(CollectiveTimeoutError, match=r"all_reduce #3 .*\[3\].*time limit of 2 s"):
        works[0].wait(BLOCKS)
    gate("expired", group)


def a_rank_never_comes(group: ProcessGroup) -> None:
    if group.rank() != 1:
        with pytest.raises(
            CollectiveTimeoutError, match=r"communicator of ranks 0, 1, 2 .*: rank 1 did not come"
        ):
            group.allreduce(torch.ones(1))
        with pytest.raises(CollectiveTimeoutError, match=r"communicator of ranks .*: rank 1 did not come"):
            group.send(torch.ones(1), 1)
    gate("gave up", group)


def refused_by_one(group: ProcessGroup, refused_at: str) -> list[str]:
    """What one rank refuses while the others wait counts for none of them, and all go on in step."""
    late = timedelta(seconds=20)
    if group.rank() == 1:
        if refused_at == "the arguments":
            with pytest.raises(collectives.UnsupportedOperationError, match="int16"):
                group.allreduce(torch.ones(1, dtype=torch.int16))
        else:
            os.environ["NCCL_COMM_BLOCKING"] = "0"
            with pytest.raises(DistBackendError, match="NCCL_COMM_BLOCKING=0"):
                group.allreduce(torch.ones(1))
            del os.environ["NCCL_COMM_BLOCKING"]
    else:
        with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come"):
            group.allreduce(torch.ones(1))
    gate("told", group)
    x = torch.ones(1)
    group.allreduce(x, timeout=late).wait()
    assert x.item() == 2.0
    if group.rank() == 1:
        with pytest.raises(ValueError, match="root"):
            group.broadcast(x, root=7)
        with pytest.raises(ZeroDivisionError):
            interrupted(group, x)
    group.barrier().wait()
    return [f"{one.name} #{one.number}" for one in group.flight_record.operations()]


def interrupted(group: Any, x: torch.Tensor) -> None:
    with group._together():
        group.allreduce(x)
        raise ZeroDivisionError


@pytest.mark.parametrize("refused_at", ["the arguments", "the connections"])
def test_a_rank_refuses_alone(nccl_library: Path, refused_at: str) -> None:
    numbers = run_over_double(refused_by_one, 2, nccl_library, refused_at, options=SHORT)
    assert numbers == [["all_reduce #1", "barrier #2"]] * 2


def aborted_by_rank_0(group: ProcessGroup) -> None:
    group.allreduce(torch.ones(1)).wait()
    alone = AllreduceOptions(asyncOp=False)
    blocked = lambda: group.allreduce([torch.ones(3)], alone).wait(BLOCKS)  # noqa: E731
    if group.rank() == 2:
        gate("over", group)
        return
    if group.rank() == 0:
        timer = threading.Timer(0.3, group.abort)
        timer.start()
        with pytest.raises(GroupAbortedError, match="aborted by this rank"):
            blocked()
        timer.join()
    else:
        with pytest.raises(GroupAbortedError, match="because rank 0 aborted the group"):
            blocked()
    is_broken(group, "first cause.*aborted")
    group.abort()
    is_broken(group, "first cause.*aborted")
    gate("over", group)


def killed(group: ProcessGroup) -> None:
    group.allreduce(torch.ones(1)).wait()
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="rank 1 is lost") as info:
        group.allreduce(torch.ones(3)).wait(BLOCKS)
    assert info.value.rank == 1
    is_broken(group, "rank 1 is lost", PeerLostError)
    group.abort()
    is_broken(group, "rank 1 is lost", GroupAbortedError)


def killed_before_connecting(group: ProcessGroup) -> None:
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        group.allreduce(torch.ones(3))


def killed_while_connecting(group: Any) -> None:
    """NCCL itself would wait for it for ever."""
    if group.rank() == 1:
        group._library.init = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        group.allreduce(torch.ones(3))


def connected_too_late(group: Any) -> None:
    """What NCCL makes after the limit ends at once."""
    over = threading.Event()
    gate("started", group)  # so that the limit is for connections alone
    if group.rank() == 1:
        made = group._library.init
        group._library.init = lambda *about: made(*about) if over.wait() else None
    with pytest.raises(CollectiveTimeoutError, match="NCCL has not made the connections within 3 s"):
        group.allreduce(torch.ones(3))
    gate("told", group)
    over.set()


def broken_for_another_group(group: ProcessGroup) -> None:
    """As lanes of a composition are: who passes the cause on is not blamed."""
    group.allreduce(torch.ones(1)).wait()
    if group.rank() == 0:
        group._break_for(PeerLostError("rank 1 has died", 1))
        is_broken(group, "rank 1 has died", PeerLostError)
    elif group.rank() == 2:
        with pytest.raises(PeerLostError, match="rank 1 is lost: rank 1 has died") as info:
            group.allreduce(torch.ones(3)).wait(BLOCKS)
        assert info.value.rank == 1
        assert isinstance(group._first_cause(), PeerLostError)
    gate("told", group)


def left(group: ProcessGroup) -> None:
    """A rank shuts the group down while another still needs it; one that does not goes on."""
    group.allreduce(torch.ones(1)).wait()
    if group.rank() == 1:
        return
    if group.rank() == 0:
        with pytest.raises(PeerLostError, match="rank 1 is lost: it shut the group down"):
            group.barrier().wait()
    else:
        with pytest.raises(DistBackendError, match="rank 1"):
            group.barrier().wait()


def needs_of_operations(group: ProcessGroup) -> None:
    """Over a slow collective the group looks after all ranks, over a message after its peer."""

    def message() -> collectives.Work:
        one = torch.ones(1)
        return group.send(one, 0) if group.rank() == 1 else group.recv(one, 1)

    def collective() -> collectives.Work:
        return group.allreduce(torch.ones(1))

    for call, needed in ((collective, None), (message, {1})):
        call().wait()  # makes the connections
        if group.rank() == 1:
            gate(call.__name__, group)
            call().wait()
            continue
        slow: list[Any] = []
        with mock.patch.object(group._health, "check_peers", lambda *about, slow=slow: slow.append(about)):
            work = call()
            assert eventually(lambda slow=slow: bool(slow))
        assert slow[-1][3] == needed
        gate(call.__name__, group)
        work.wait()


def errors_of_nccl(group: Any, path: Path) -> None:
    double = load(path)
    group.allreduce(torch.ones(1)).wait()
    if group.rank() == 1:
        with pytest.raises(
            DistBackendError, match=r"rank 0 gave up: its all_reduce #2 failed.*ordered by a test"
        ):
            group.allreduce(torch.ones(3)).wait(BLOCKS)
        return
    double.fail_next("ncclAllReduce", 3, "ordered by a test")
    with pytest.raises(DistBackendError, match=r"all_reduce #2 .*ncclAllReduce failed.*ordered by a test"):
        group.allreduce(torch.ones(3))
    is_broken(group, "first cause.*ordered by a test")


def asynchronous_error(group: Any, path: Path) -> None:
    double = load(path)
    group.allreduce(torch.ones(1)).wait(BLOCKS)
    gate("first", group)  # an error fails all that is under way, on both ranks
    if group.rank() == 0:
        work = group.allreduce(torch.ones(3))
        (communicator,) = group._communicators.open()
        double.set_async_error(communicator.handle, 1, "ordered by a test")
        with pytest.raises(DistBackendError, match=r"all_reduce #2 .*ordered by a test"):
            work.wait(BLOCKS)
        gate("failed", group)
        return
    gate("failed", group)
    with pytest.raises(
        DistBackendError, match=r"rank 0 gave up: its all_reduce #2 failed.*ordered by a test"
    ):
        group.recv(torch.ones(3), 0)


def a_state_that_cannot_be_asked(group: Any, path: Path) -> None:
    """A communicator whose state NCCL does not tell is as one with an error."""
    double = load(path)
    group.allreduce(torch.ones(1)).wait(BLOCKS)
    if group.rank() == 0:
        work = group.allreduce(torch.ones(3))
        double.fail_next("ncclCommGetAsyncError", 3, "ordered by a test")
        with pytest.raises(DistBackendError, match=r"ncclCommGetAsyncError failed.*ordered by a test"):
            work.wait(BLOCKS)
    gate("failed", group)


def refused(group: Any, path: Path) -> None:
    """The first rank cannot make an identifier: all know it at once."""
    double = load(path)
    if group.rank() == 0:
        double.fail_next("ncclGetUniqueId", 2, "no interface, ordered by a test")
    with pytest.raises(DistBackendError, match="no interface, ordered by a test"):
        group.allreduce(torch.ones(3))
    group.allreduce(torch.ones(3)).wait()  # a second try


def not_connected(group: Any, path: Path) -> None:
    """The first message connects both directions, in the call itself; what fails there ends the group."""
    double = load(path)
    if group.rank() == 0:
        double.fail_next("ncclRecv", 3, "ordered by a test")
        with pytest.raises(
            DistBackendError, match=r"send #1 \(to rank 1.*ncclRecv failed.*ordered by a test"
        ):
            group.send(torch.ones(3), 1)
        is_broken(group, "first cause.*ordered by a test")
    else:
        with pytest.raises(DistBackendError, match=r"rank 0 gave up: its send #1 failed.*ordered by a test"):
            group.send(torch.ones(3), 0).wait(BLOCKS)


def a_bad_factor(group: Any, _: Path) -> None:
    group.allreduce(torch.ones(1)).wait()
    if group.rank() == 1:
        gate("failed", group)
        return
    (communicator,) = group._communicators.open()

    def fails(factor: float, dtype: int) -> int:
        raise NcclError(3, "ncclRedOpCreatePreMulSum", "ordered by a test")

    communicator.premul_sum = fails
    with pytest.raises(DistBackendError, match=r"all_reduce #2 \(PREMUL_SUM.*ordered by a test"):
        group.allreduce([torch.ones(3)], AllreduceOptions(reduceOp=make_premul_sum(2.0)))
    is_broken(group, "first cause.*ordered by a test")
    gate("failed", group)


def connect(group: Any) -> list[Any]:
    group.allreduce(torch.ones(1)).wait()
    with group._together():
        group.send(torch.ones(1), 1 - group.rank())
        received = group.recv(torch.ones(1), 1 - group.rank())
    received.wait()
    group.barrier().wait()
    opened: list[Any] = group._communicators.open()
    assert len(opened) == 2
    return opened


def aborted_together(group: Any, path: Path) -> None:
    """The abort of one communicator needs that of another, as the device frees memory behind its kernels."""
    opened = connect(group)
    if group.rank() == 0:
        works = [group.allreduce(torch.ones(3)), group.recv(torch.ones(3), 1)]
        assert not any(work.is_completed() for work in works)
    group.abort()
    assert load(path).communicators() == 0, "one was left behind"
    assert [one.handle for one in opened] == [0] * 2
    gate("aborted", group)


def at_the_end_of_the_interpreter(group: Any, path: Path) -> None:
    """No thread can begin then, and NCCL may not come back."""
    opened = connect(group)
    communicators._END_SECONDS = 0.5
    load(path).hold_in_graph(opened[0].handle, True)
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("the interpreter ends")):
        group._finalizer()
    assert load(path).communicators() == 0
    load(path).hold_in_graph(opened[0].handle, False)


def left_behind(group: Any, path: Path) -> None:
    """NCCL does not abort a communicator while a CUDA graph with its operations lives; abort goes on."""
    opened = connect(group)
    gate("connected", group)
    communicators._END_SECONDS = 0.5
    handle = opened[0].handle
    load(path).hold_in_graph(handle, True)
    with logged(logging.WARNING, "has not aborted the group's communicators") as told:
        group.abort()
    assert told
    assert not group._communicators.over.is_set()
    load(path).hold_in_graph(handle, False)
    assert eventually(group._communicators.over.is_set)


def on_a_device_with_an_error(group: Any, _: Path) -> None:
    """What a device that has met an error says to its activation does not hold up the abort."""
    connect(group)
    (device,) = group._devices.values()
    with mock.patch.object(type(device), "activate", side_effect=RuntimeError("CUDA error 700")):
        group._communicators.abort()
    assert group._communicators.over.is_set()


def dropped(group: Any, path: Path) -> None:
    """A group that nobody keeps is ended, and a shut down one leaves nothing."""
    double = load(path)
    rank, size, store = group.rank(), group.size(), group.get_group_store()
    import torch.distributed as torch_dist

    other = make_group(path, "cupy", rank, size, torch_dist.PrefixStore("other", store), group_name="other")
    other.allreduce(torch.ones(1)).wait()
    with other._together():
        other.send(torch.ones(2), (rank + 1) % size)
        received = other.recv(torch.ones(2), (rank - 1) % size)
    received.wait()
    other.barrier().wait()
    assert double.communicators() == 2
    del received
    del other
    assert eventually(lambda: gc.collect() >= 0 and double.communicators() == 0)
    group.allreduce(torch.ones(1)).wait()
    group.shutdown()
    group.shutdown()
    group.abort()
    assert double.communicators() == 0
    is_broken(group, "was shut down")


def dropped_when_broken(group: Any, path: Path) -> None:
    """The error that broke a group holds neither it nor the frames in which it was raised."""
    import torch.distributed as torch_dist

    rank, size, store = group.rank(), group.size(), group.get_group_store()
    prefix = torch_dist.PrefixStore("broken", store)
    other = make_group(path, "cupy", rank, size, prefix, group_name="broken")
    other.allreduce(torch.ones(1)).wait()
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError):
            other.allreduce(torch.ones(1), timeout=timedelta(seconds=1)).wait(BLOCKS)
    gate("expired", group)
    with pytest.raises(DistBackendError):
        other.recv(torch.ones(1), 1 - rank)
    here = weakref.ref(other)
    del other
    assert eventually(lambda: gc.collect() >= 0 and here() is None)
    group.barrier().wait()


def lost_under_objects(group: ProcessGroup) -> None:
    """Memory that a lost rank did not fill is not taken for its object."""
    if group.rank() == 1:
        size = torch.tensor([200])  # of what never comes
        group.broadcast(size, root=1).wait()
        group.to_host(size)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        collectives.broadcast_object_list([None], group_src=1, group=group)


LOST = {"lost": {1}, "timeout": 100}


def full(body: Any, size: int, **more: Any) -> Any:
    return pytest.param(body, size, more, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("body", "size", "more"),
    [
        full(a_rank_does_not_call, 2, options=SHORT),
        (without_threads, 2, {}),
        (limits_together, 2, {}),
        full(elsewhere, 2),
        full(a_rank_never_comes, 3, options=SHORT),
        full(aborted_by_rank_0, 3),
        (killed, 3, LOST),
        (killed_before_connecting, 2, LOST),
        (killed_while_connecting, 2, LOST),
        (connected_too_late, 2, {"options": {"timeout": timedelta(seconds=3)}}),
        full(broken_for_another_group, 3),
        (left, 2, {}),
        (needs_of_operations, 2, {}),
        (lost_under_objects, 2, LOST),
        (broken_and_renewed, 3, {}),
        (passed_on, 2, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_failures(nccl_library: Path, body: Any, size: int, more: dict[str, Any]) -> None:
    results = run_over_double(body, size, nccl_library, **more)
    if more is LOST:
        assert results[1] == Died(-signal.SIGKILL)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "body",
    [
        errors_of_nccl,
        asynchronous_error,
        a_state_that_cannot_be_asked,
        refused,
        not_connected,
        a_bad_factor,
        aborted_together,
        at_the_end_of_the_interpreter,
        left_behind,
        on_a_device_with_an_error,
        dropped,
        dropped_when_broken,
    ],
    ids=lambda body: body.__name__,
)
def test_errors_and_ends(nccl_library: Path, body: Any) -> None:
    run_over_double(body, 2, nccl_library, nccl_library)


# What is registered first is called last.
EXIT = """
import atexit, sys, threading
from pathlib import Path
atexit.register(lambda: print([one.name for one in threading.enumerate() if "dog" in one.name]))
sys.path[:0] = {path!r}
import torch
import collectives
from nccl_double.device import DoubleDevice
from nccl_double.groups import make_group
group = make_group(Path({library!r}), "cupy", 0, 1, collectives.HashStore())
group.allreduce(torch.ones(1)).wait()
device = DoubleDevice.shared(torch.device("cpu"))
device.sleep(device.current_stream(), 1.0)
group.allreduce(torch.ones(1))  # under way when the process ends
{end}
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("end", ["", "group.abort()", "group.shutdown()"])
def test_no_watchdog_outlives_the_interpreter(nccl_library: Path, end: str) -> None:
    """One that came back from torch's store after that aborted the process."""
    folders = [str(folder) for folder in IMPORTED_FROM]
    program = EXIT.format(path=folders, library=str(nccl_library), end=end)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


PATIENCE = timedelta(minutes=10)  # of the store's client, beyond the limit of the test


def alone(group: ProcessGroup, path: Path, port: int, server: int) -> None:
    """An operation that the other rank does not take part in, while the store's process is stopped."""
    store = TCPStore("127.0.0.1", port, timeout=PATIENCE)
    rank = group.rank()
    other = make_group(path, "cupy", rank, 2, store, timeout=timedelta(seconds=2), group_name="deaf")
    other.allreduce(torch.ones(1)).wait()
    other.barrier().wait()
    gate("connected", group)
    if rank == 0:
        os.kill(server, signal.SIGSTOP)
        try:
            work = other.allreduce(torch.ones(2))
            assert eventually(lambda: work.exception() is not None), "the limit waits for the store"
            with pytest.raises(
                CollectiveTimeoutError, match=r"all_reduce #\d+ .*passed its time limit of 2 s"
            ):
                work.wait(timedelta(seconds=30))
            with pytest.raises(GroupAbortedError, match="first cause"):
                other.allreduce(torch.ones(1))
        finally:
            os.kill(server, signal.SIGCONT)
    gate("over", group)
    other.abort()


def test_time_limits_hold_without_the_store(nccl_library: Path) -> None:
    with store_server() as server:
        pid = int(server.evaluate("os.getpid()"))
        run_over_double(alone, 2, nccl_library, nccl_library, server.port, pid, timeout=60)
