"""DistributedDataParallel over nccl: passes that do not wait for the device, with errors one pass later."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import failing_hooks
import pytest
import torch
from conformance.test_works import eventually, gate
from harness import current_store
from nccl_double.device import DoubleDevice, Graph
from nccl_double.groups import SEEDS, host_refusing_to_wait, load, logged, run_over_double
from sources import IMPORTED_FROM
from torch import nn

from collectives import (
    BarrierOptions,
    CollectiveTimeoutError,
    DistBackendError,
    GroupAbortedError,
    PeerLostError,
    ProcessGroup,
    ReduceOp,
)
from collectives.backends.nccl.options import Options
from collectives.core.types import AllreduceOptions
from collectives.ddp import DistributedDataParallel, GradBucket, GradientSyncError
from collectives.ddp.hooks.default_hooks import allreduce_hook

CPU = torch.device("cpu")


class TwoHeads(torch.nn.Module):
    """A layer, and one that a rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor, with_head: bool = True) -> torch.Tensor:
        rows = self.body(rows)
        return self.head(rows) if with_head else rows


def model(group: ProcessGroup, **arguments: Any) -> Any:
    torch.manual_seed(7)
    return DistributedDataParallel(TwoHeads(), process_group=group, **arguments)


def rows(rank: int) -> torch.Tensor:
    return torch.arange(12.0).view(3, 4) / 10 + rank


def passes(module: Any, group: ProcessGroup, count: int, fresh: bool = False) -> None:
    """Runs backward passes; with fresh gradients, or adds to those that there are."""
    for _ in range(count):
        if fresh:
            module.zero_grad()
        module(rows(group.rank())).sum().backward()


def step(module: Any, optimizer: Any, given: torch.Tensor) -> None:
    optimizer.zero_grad()
    module(given).square().mean().backward()
    optimizer.step()


def no_wait(group: ProcessGroup) -> None:
    """However late the device is, after the first pass no host waits for it."""
    device = DoubleDevice.shared(CPU)
    module = model(group)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        step(module, optimizer, rows(group.rank()))
    device.synchronize(device.current_stream())
    with host_refusing_to_wait():
        device.sleep(device.current_stream(), 0.5)
        for _ in range(8):
            step(module, optimizer, rows(group.rank()))
        with module.no_sync():
            module(rows(group.rank())).sum().backward()
        loss = module(rows(group.rank())).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    with torch.no_grad():
        expected = [p.clone() for p in module.parameters()]
    group.broadcast(expected[0], root=0).wait()
    assert torch.equal(expected[0], next(module.parameters()))


def settled(group: ProcessGroup) -> None:
    """Waits until the next forward of every rank knows how the last pass went."""
    device = DoubleDevice.shared(CPU)
    device.synchronize(device.current_stream())
    gate(f"settled {next(_meetings)}", group)


_meetings = itertools.count()


def missing_on_one(group: ProcessGroup) -> None:
    """The rank at fault raises at once, the others name it at a later forward; then all go on."""
    for first in (False, True):
        module = model(group)
        for _ in range(0 if first else 3):
            module(rows(group.rank())).sum().backward()
        module.zero_grad()
        if group.rank() == 1:
            with pytest.raises(GradientSyncError, match=r"head\.weight") as caught:
                module(rows(1), with_head=False).sum().backward()
            settled(group)
        else:
            module(rows(group.rank())).sum().backward()
            settled(group)
            with pytest.raises(
                GradientSyncError,
                match=r"backward pass before this forward.*because of rank 1, where the error",
            ) as caught:
                module(rows(group.rank()))
        assert set(caught.value.reasons) == {1}
        passes(module, group, 3, fresh=True)
        gradient = module.module.head.bias.grad
        assert gradient.tolist() == [3.0] * 2


def told_some_passes_later(group: ProcessGroup) -> None:
    """Ranks whose device is late run further passes before they learn of the error."""
    device = DoubleDevice.shared(CPU)
    module = model(group)
    passes(module, group, 2)
    settled(group)
    goes_on = threading.Event()
    device.call(device.current_stream(), goes_on.wait)
    if group.rank() == 1:
        with pytest.raises(GradientSyncError, match=r"head\.weight"):
            module(rows(1), with_head=False).sum().backward()
    else:
        module(rows(group.rank())).sum().backward()
    passes(module, group, 2)
    goes_on.set()
    settled(group)
    if group.rank() != 1:
        with pytest.raises(GradientSyncError, match=r"last backward pass but 2 .*because of rank 1"):
            module(rows(group.rank()))
    module.zero_grad()
    module(rows(group.rank())).sum().backward()
    assert module.module.head.bias.grad.tolist() == [3.0] * 2


def broken_off_on_one(group: ProcessGroup) -> None:
    """An exception in the user's own code ends the pass there, and is told to the others."""
    module = model(group)

    def fails(gradient: torch.Tensor) -> None:
        raise KeyError("of the user")

    passes(module, group, 3)
    given = rows(group.rank()).requires_grad_()
    hidden = module.module.body.register_forward_hook(
        lambda _module, _given, output: output.register_hook(fails) and None if group.rank() == 1 else None
    )
    loss = module(given).sum()
    hidden.remove()
    if group.rank() == 1:
        with pytest.raises(KeyError, match="of the user"):
            loss.backward()
        settled(group)
    else:
        loss.backward()
        settled(group)
        with pytest.raises(GradientSyncError, match="because of rank 1"):
            module(given)
    passes(module, group, 2, fresh=True)
    assert module.module.head.bias.grad.tolist() == [3.0] * 2


def late_by_turns(group: ProcessGroup, turn: int) -> None:
    """Makes the hosts of the ranks read what is on the device at different passes."""
    device = DoubleDevice.shared(CPU)
    device.sleep(device.current_stream(), 0.02 * ((turn + group.rank()) % 3))
    if (turn + group.rank()) % 2:
        time.sleep(0.02)


def out_of_step(group: ProcessGroup) -> None:
    """All ranks find out before the same forward, and say where each of them stood."""
    for stray in (1, 0):
        module = model(group)
        passes(module, group, 2)
        if group.rank() == stray:
            with module.no_sync():
                module(rows(1)).sum().backward()
        raised = None
        for turn in range(40):
            late_by_turns(group, turn)
            try:
                module(rows(group.rank())).sum().backward()
            except GradientSyncError as error:
                raised = turn, error
                break
        assert raised is not None
        assert "1 backward passes under no_sync" in str(raised[1])
        assert set(raised[1].reasons) == {0, 1}
        turns = torch.tensor([raised[0], -raised[0]])
        group.allreduce(turns, ReduceOp.MAX).wait()
        assert turns.tolist() == [raised[0], -raised[0]], "the ranks raised before different passes"
        module.zero_grad()
        module(rows(group.rank())).sum().backward()
        module(rows(group.rank()))


class Turning(torch.nn.Module):
    """Four weights whose gradients come in an order that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.full((3,), float(i + 1)) for i in range(4))

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(x * self.weights[index])
        return x


def laid_out_again(group: ProcessGroup) -> None:
    """All ranks change their buckets before the same pass, though they read the request at different ones."""
    module = DistributedDataParallel(Turning(), process_group=group, bucket_cap_mb=0)
    seen = []
    for turn in range(40):
        late_by_turns(group, turn)
        order = (0, 1, 2, 3) if turn < 4 else (2, 3, 0, 1)
        module.zero_grad()
        module(torch.ones(3), order).sum().backward()
        buckets = module.reducer.gradients.buckets
        seen.append([bucket.indices for bucket in buckets])
        assert module.module.weights[0].grad is not None
    changed = [turn for turn in range(1, 40) if seen[turn] != seen[turn - 1]]
    assert len(changed) <= 2
    assert changed[-1] > 4
    turns = torch.tensor([changed[-1], -changed[-1]])
    group.allreduce(turns, ReduceOp.MAX).wait()
    assert turns.tolist() == [changed[-1], -changed[-1]], "the ranks changed before different passes"


def at_once_where_waits_block(group: ProcessGroup) -> None:
    module = model(group)
    passes(module, group, 2)
    with pytest.raises(GradientSyncError, match=r"rank 1: .*head\.weight"):
        module(rows(group.rank()), with_head=group.rank() != 1).sum().backward()


def at_once_where_uses_are_counted(group: ProcessGroup) -> None:
    module = model(group, find_unused_parameters=True)
    for with_head in (True, False):
        module.zero_grad()
        module(rows(group.rank()), with_head=with_head).sum().backward()
        assert (module.module.head.bias.grad is None) is not with_head


def ends_of_passes(group: ProcessGroup) -> None:
    for body in (
        no_wait,
        told_some_passes_later,
        broken_off_on_one,
        out_of_step,
        laid_out_again,
        at_once_where_uses_are_counted,
    ):
        body(group)


@pytest.mark.parametrize(("body", "size"), [(ends_of_passes, 2), (missing_on_one, 3)])
def test_the_end_of_a_pass(nccl_library: Path, body: Any, size: int) -> None:
    run_over_double(body, size, nccl_library, timeout=100)


def test_errors_at_the_end_of_the_pass(nccl_library: Path) -> None:
    run_over_double(
        at_once_where_waits_block, 2, nccl_library, options={"pg_options": Options(blocking_wait=True)}
    )


def lost(group: ProcessGroup, at_once: bool) -> None:
    """What a rank computed alone is taken for the average until the loss is found, and no longer."""
    module = model(group)
    module(rows(group.rank())).sum().backward()
    loss = module(rows(group.rank())).sum()
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if at_once:
        with pytest.raises(PeerLostError, match="rank 1 is lost"):
            loss.backward()
        return

    def goes_on() -> None:
        loss.backward()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            time.sleep(0.1)
            module(rows(0))

    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        goes_on()
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        module(rows(0)).sum().backward()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at_once", [False, True])
def test_a_rank_is_lost_in_a_pass(nccl_library: Path, at_once: bool) -> None:
    options = {"pg_options": Options(blocking_wait=at_once)}
    run_over_double(lost, 2, nccl_library, at_once, options=options, lost={1}, timeout=100)


def lost_in_the_last_pass(group: ProcessGroup) -> None:
    """The loss is logged without anybody asking, and raised by the end of the group."""
    module = model(group)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        step(module, optimizer, rows(group.rank()))
    loss = module(rows(group.rank())).sum()
    settled(group)
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with logged(logging.ERROR, "rank 1 is lost") as told:
        loss.backward()
        optimizer.step()
        assert eventually(lambda: bool(told)), "nothing was logged"
    assert "the group is broken" in told[0]
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        group.shutdown()
    group.shutdown()


def failed_in_the_last_pass(group: ProcessGroup) -> None:
    """What one rank raised alone, the end of the group tells the others; all have ended then."""
    module = model(group)
    passes(module, group, 2)
    if group.rank() == 1:
        with pytest.raises(GradientSyncError, match=r"head\.weight"):
            module(rows(1), with_head=False).sum().backward()
        group.shutdown()
    else:
        module(rows(group.rank())).sum().backward()
        with pytest.raises(GradientSyncError, match=r"one of the last backward passes.*because of rank 1"):
            group.shutdown()
    with pytest.raises(GroupAbortedError, match="shut down"):
        group.allreduce(torch.ones(1))


def out_of_step_in_the_last_pass(group: ProcessGroup) -> None:
    module = model(group)
    passes(module, group, 2)
    if group.rank() == 1:
        with module.no_sync():
            module(rows(1)).sum().backward()
    module(rows(group.rank())).sum().backward()
    with pytest.raises(GradientSyncError, match=r"out of step: this rank ran \d forwards"):
        group.shutdown()


def hook_failed_in_the_last_pass(group: ProcessGroup) -> None:
    """The rank of the hook raises in its pass, and the others at the end of the group."""
    module = model(group)
    store, fails_now = current_store(), False

    def hook(group: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if fails_now:
            store.wait(["rank 0 is through"])
            raise KeyError("in the hook")
        return allreduce_hook(group, bucket)

    module.register_comm_hook(group, hook)
    passes(module, group, 2)
    fails_now = group.rank() == 1
    told = r"because of rank 1:(.|\n)*hook hook failed on bucket 0(.|\n)*KeyError: 'in the hook'"
    if fails_now:
        with pytest.raises(GradientSyncError, match=told):
            module(rows(1)).sum().backward()
        group.shutdown()
    else:
        module(rows(group.rank())).sum().backward()
        store.set("rank 0 is through", "")
        assert eventually(lambda: group._first_cause() is not None)
        with pytest.raises(GradientSyncError, match=told + r"(.|\n)*load a checkpoint"):
            group.shutdown()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "body",
    [
        lost_in_the_last_pass,
        failed_in_the_last_pass,
        out_of_step_in_the_last_pass,
        hook_failed_in_the_last_pass,
    ],
    ids=lambda body: body.__name__,
)
def test_the_last_pass(nccl_library: Path, body: Any) -> None:
    lost = {1} if body is lost_in_the_last_pass else ()
    run_over_double(body, 2, nccl_library, lost=lost, timeout=100)


EXIT = """
import os, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
import torch
import collectives
from collectives.ddp import DistributedDataParallel
from nccl_double.device import DoubleDevice, tensors_on_device
from nccl_double.groups import make_group
rank = int(sys.argv[1])
store = collectives.FileStore(sys.argv[2], 2)
group = make_group(Path({library!r}), "cupy", rank, 2, store)
with tensors_on_device(), DoubleDevice.shared(torch.device("cpu")).activate():
    torch.manual_seed(1)
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    module = DistributedDataParallel(torch.nn.ModuleList([first, second]), process_group=group)
    module.module.forward = lambda x, both: second(first(x)) if both else first(x)
    for _ in range(2):
        module(torch.ones(1, 2), True).sum().backward()
    if rank == 1 and {dies}:
        os._exit(7)
    try:
        module(torch.ones(1, 2), rank == 0).sum().backward()
    except collectives.ddp.GradientSyncError:
        print("raised")
    except collectives.PeerLostError:  # where the death shows before the last operation is enqueued
        assert {dies}
    if not {dies}:
        group.barrier().wait()
print("saved")
"""


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize(
    ("dies", "told"),
    [(True, "rank 1 is lost"), (False, "because of rank 1, where the error was raised")],
)
def test_the_last_pass_before_the_process_ends(
    nccl_library: Path, tmp_path: Path, dies: bool, told: str
) -> None:
    """A program that ends without ending its group hears of it, and ends."""
    path = [str(folder) for folder in IMPORTED_FROM]
    program = EXIT.format(path=path, library=str(nccl_library), dies=dies)
    words = [sys.executable, "-c", program]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert ranks[0].returncode == 0, said[0][1][-3000:]
    assert said[0][0] == "saved\n"
    assert told in said[0][1]
    assert ranks[1].returncode == (7 if dies else 0)
    assert said[1][0] == ("" if dies else "raised\nsaved\n")
    assert told not in said[1][1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", failing_hooks.WHERE)
@pytest.mark.parametrize("name", ["plain", "allreduce", "fp16", "low rank", "one bit"])
def test_a_hook_fails_on_one_rank(nccl_library: Path, name: str, where: str) -> None:
    if where == "after" and name not in failing_hooks.EXACT:
        pytest.skip("what the hook began writes to its bucket on a stream that only the device waits for")
    ranks = run_over_double(failing_hooks.failing_later, 3, nccl_library, name, where, "middle", timeout=100)
    failing_hooks.check(ranks, name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", failing_hooks.WHERE)
def test_a_hook_fails_on_one_rank_where_waits_block(nccl_library: Path, where: str) -> None:
    """It is then as over other backends, on which every hook fails."""
    options = {"pg_options": Options(blocking_wait=True)}
    arguments = ("plain", where, "middle", True)
    ranks = run_over_double(failing_hooks.failing, 3, nccl_library, *arguments, options=options, timeout=100)
    failing_hooks.check(ranks, "plain")


# ---- graphs --------------------------------------------------------------------------------------------


def captured_collectives(group: ProcessGroup, path: Path) -> None:
    me, size = group.rank(), group.size()
    x, given = torch.full((6,), 1.0 + me), torch.full((3,), 1.0 + me)
    gathered, got = torch.zeros(3 * size), torch.zeros(3)
    after, before = (me + 1) % size, (me - 1) % size

    def everything() -> None:
        group.allreduce([x], AllreduceOptions(asyncOp=False)).wait()
        work = group.allreduce(x)
        group.all_gather_single(gathered, given).wait()
        work.wait()
        x.mul_(2.0)
        group.allreduce_coalesced([x[:2], x[2:]]).wait()
        with group._together():
            sent = group.send(given, after)
            received = group.recv(got, before)
        received.wait()
        sent.wait()
        assert work.is_completed()

    everything()
    group.barrier().wait()
    graph = Graph()
    with graph.capture():
        everything()
    total = float(sum(range(1, size + 1)))
    for turn in range(3):
        x.fill_(1.0 + me)
        given.fill_(turn + me)
        gathered.zero_()
        graph.replay()
        eager = torch.full((5,), float(turn))  # between replays, behind them
        group.allreduce(eager).wait()
        assert x.tolist() == [total * size * 2 * size] * 6
        assert gathered.view(size, 3).tolist() == [[float(turn + rank)] * 3 for rank in range(size)]
        assert got.tolist() == [float(turn + before)] * 3
        assert eager.tolist() == [float(turn * size)] * 5
    graph.reset()
    assert load(path).misuses() == 0


def captured_training(group: ProcessGroup, arguments: dict[str, Any]) -> None:
    """Forward, backward and optimizer as one graph train as they do without one."""
    me = group.rank()
    modules = [model(group, bucket_cap_mb=0.0001, **arguments) for _ in range(2)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in modules]
    given = rows(me).clone()
    for turn in range(12):
        given.copy_(rows(me) + turn)
        for module, optimizer in zip(modules, optimizers, strict=True):
            step(module, optimizer, given)
    eager, captured = modules
    graph = Graph()
    optimizers[1].zero_grad()
    with graph.capture():
        captured(given).square().mean().backward()
        optimizers[1].step()
    for turn in range(4):
        given.copy_(rows(me) - turn)
        step(eager, optimizers[0], given)
        graph.replay()
        for one, other in zip(eager.parameters(), captured.parameters(), strict=True):
            assert torch.equal(one, other)
    # Passes without the graph go on, and read what its last replay signalled.
    for module, optimizer in zip(modules, optimizers, strict=True):
        step(module, optimizer, given)
    for one, other in zip(eager.parameters(), captured.parameters(), strict=True):
        assert torch.equal(one, other)
    assert captured.reducer.passes == 14
    graph.reset()


# ---- replays -------------------------------------------------------------------------------------------


def captured_reduction(group: ProcessGroup, late_s: float = 0.0) -> tuple[torch.Tensor, Graph]:
    """Returns a tensor, and a graph that reduces it, after a while."""
    device, x = DoubleDevice.shared(CPU), torch.ones(3)
    group.allreduce(x).wait()
    group.barrier().wait()
    graph = Graph()
    with graph.capture():
        device.sleep(device.current_stream(), late_s)
        group.allreduce(x).wait()
    gate(f"captured {next(_meetings)}", group)
    return x, graph


def killed_in_a_replay(group: ProcessGroup) -> None:
    _, graph = captured_reduction(group)
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with logged(logging.ERROR, "rank 1 is lost") as told:
        graph.replay()
        assert eventually(lambda: bool(told)), "nothing was logged"
    assert "all_reduce #3 (SUM, in a CUDA graph, torch.float32 [3])" in told[0]
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        group.allreduce(torch.ones(1))
    graph.reset()


def missing_in_a_replay(group: ProcessGroup) -> None:
    """A rank that lives, and does not replay its graph, ends the others' replay after their limit."""
    _, graph = captured_reduction(group)
    if group.rank() == 1:
        current_store().wait(["expired"])
    else:
        with logged(logging.ERROR, "time limit") as told:
            graph.replay()
            assert eventually(lambda: bool(told)), "nothing was logged"
        what = "all_reduce #3 (SUM, in a CUDA graph, torch.float32 [3])"
        assert f"{what}: passed its time limit of 2 s" in told[0]
        assert "rank 1 waits in no operation" in told[0]
        current_store().set("expired", "")
        with pytest.raises(GroupAbortedError, match="time limit") as caught:
            group.allreduce(torch.ones(1))
        assert isinstance(caught.value.cause, CollectiveTimeoutError)
    graph.reset()


def replays_in_time(group: ProcessGroup) -> None:
    """The limit is for each operation of each replay, from when its stream has got to it."""
    device = DoubleDevice.shared(CPU)
    x, graph = captured_reduction(group, late_s=2.5)
    for _ in range(2):  # one behind the other
        graph.replay()
    device.synchronize(device.current_stream())
    graph.reset()
    x, graph = captured_reduction(group)
    for turn in range(40):
        x.fill_(1.0)
        graph.replay()
        if turn % 2:
            device.synchronize(device.current_stream())
            time.sleep(0.1)
    group.barrier().wait()
    assert x.tolist() == [2.0] * 3
    graph.reset()


@pytest.mark.parametrize(
    "body", [killed_in_a_replay, missing_in_a_replay, replays_in_time], ids=lambda body: body.__name__
)
def test_replays_are_watched(nccl_library: Path, body: Any) -> None:
    options = {} if body is killed_in_a_replay else {"timeout": timedelta(seconds=2)}
    lost = {1} if body is killed_in_a_replay else ()
    run_over_double(body, 2, nccl_library, options=options, lost=lost, timeout=100)


def refused_captures(group: ProcessGroup) -> None:
    graph = Graph()
    with pytest.raises(RuntimeError, match="run the operation once before the capture"), graph.capture():
        group.allreduce(torch.ones(1)).wait()
    group.allreduce(torch.ones(1)).wait()
    module = model(group, find_unused_parameters=True)
    module(rows(0)).sum().backward()
    with pytest.raises(RuntimeError, match="CUDA graph: find_unused_parameters"), Graph().capture():
        module(rows(0)).sum().backward()
    module(rows(0)).sum().backward()
    assert module.reducer.has_rebuilt_buckets, "the refusal has left something behind"
    outside = group.allreduce(torch.ones(2))
    with pytest.raises(RuntimeError, match="from outside"), Graph().capture():
        outside.wait()
    group.allreduce(torch.ones(1)).wait(timedelta(seconds=20))


def captured(group: ProcessGroup, path: Path) -> None:
    captured_collectives(group, path)
    for arguments in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        captured_training(group, arguments)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 3])
def test_captures(nccl_library: Path, size: int) -> None:
    run_over_double(captured, size, nccl_library, nccl_library, timeout=100)


def in_any_order(group: ProcessGroup, path: Path) -> None:
    no_wait(group)
    missing_on_one(group)
    laid_out_again(group)
    captured_collectives(group, path)
    captured_training(group, {"gradient_as_bucket_view": True})


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_training_on_streams_that_run_in_other_orders(nccl_library: Path, seed: int) -> None:
    run_over_double(in_any_order, 3, nccl_library, nccl_library, seed=seed, timeout=100)


def test_refused_captures(nccl_library: Path) -> None:
    run_over_double(refused_captures, 2, nccl_library)


LARGE = 300  # whose weights have more bytes than gradients that are reduced in place on the CPU


def launches_of_a_pass(
    group: ProcessGroup, path: Path, options: dict[str, Any]
) -> tuple[int, int, list[bool]]:
    torch.manual_seed(3)
    layers = [nn.Linear(LARGE, LARGE) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group, **options)
    alone = nn.Sequential(*[nn.Linear(LARGE, LARGE) for _ in range(4)])
    alone.load_state_dict(model.module.state_dict())
    device = DoubleDevice.shared(torch.device("cpu"))
    before = 0
    for _ in range(3):  # the second lays the buckets out again
        model.zero_grad()
        device.synchronize(device.current_stream())
        before = load(path).launches()
        model(torch.ones(2, LARGE) * (group.rank() + 1)).sum().backward()
    count = load(path).launches() - before
    for rank in range(group.size()):
        (alone(torch.ones(2, LARGE) * (rank + 1)).sum() / group.size()).backward()
    same = [
        torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    ]
    return count, len(model.reducer.gradients.buckets), same


def launches(group: ProcessGroup, path: Path) -> list[tuple[int, int, list[bool]]]:
    kinds = [{"bucket_cap_mb": 25}, {"bucket_cap_mb": 0.5}, {"gradient_as_bucket_view": True}]
    return [launches_of_a_pass(group, path, options) for options in kinds]


def test_a_bucket_is_one_launch(nccl_library: Path) -> None:
    for found in run_over_double(launches, 2, nccl_library, nccl_library):
        for count, buckets, same in found:
            assert count == buckets
            assert all(same)


AFTERWARDS = "cannot be part of a CUDA graph; run the operation once before the capture"


def before_the_first(group: ProcessGroup) -> None:
    """The communicator may be there already, where the group is bound to a device; connections are not."""
    x = torch.ones(2)
    graph = Graph()
    with pytest.raises(DistBackendError, match=AFTERWARDS), graph.capture():
        group.allreduce(x)
    group.allreduce(x).wait()
    assert x.tolist() == [group.size()] * 2
    graph = Graph()
    with graph.capture():
        group.allreduce(x).wait()
    graph.replay()
    assert x.tolist() == [group.size() ** 2] * 2
    graph.reset()


@pytest.mark.parametrize("bound", [True, False], ids=["bound to a device", "not bound"])
def test_a_capture_before_the_first_operation(nccl_library: Path, bound: bool) -> None:
    options = {"device_id": torch.device("cpu")} if bound else {}
    run_over_double(before_the_first, 2, nccl_library, options=options)


def on_another_device(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"on cpu:1, but the group is bound to cpu by its device_id; move"):
        group.barrier(BarrierOptions(device_ids=[1]))
    x = torch.ones(2)
    group.allreduce(x).wait()
    assert x.tolist() == [group.size()] * 2


def test_a_group_that_is_bound_takes_one_device(nccl_library: Path) -> None:
    run_over_double(on_another_device, 2, nccl_library, options={"device_id": torch.device("cpu")})
