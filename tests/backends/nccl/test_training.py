"""DistributedDataParallel over nccl: passes that do not wait for the device, with errors one pass later."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import current_store
from nccl_double.device import DoubleDevice, Graph
from nccl_double.groups import SEEDS, load, run_over_double

from collectives import PeerLostError, ProcessGroup
from collectives.backends.nccl.options import Options
from collectives.core.types import AllreduceOptions
from collectives.ddp import DistributedDataParallel, GradientSyncError

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


def step(module: Any, optimizer: Any, given: torch.Tensor) -> None:
    optimizer.zero_grad()
    module(given).square().mean().backward()
    optimizer.step()


def meet(group: ProcessGroup, name: str) -> None:
    store = current_store()
    store.set(f"{name}/{group.rank()}", "")
    store.wait([f"{name}/{rank}" for rank in range(group.size())])


@contextmanager
def reads_counted() -> Iterator[list[str]]:
    """Notes where the host waits for an event."""
    seen: list[str] = []
    block = DoubleDevice.block

    def counted(device: DoubleDevice, event: int) -> None:
        seen.append("event")
        block(device, event)

    DoubleDevice.block = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        DoubleDevice.block = block  # type: ignore[method-assign]


def one_read_a_pass(group: ProcessGroup) -> None:
    """The end of a pass is read at the next synchronised forward, or at the next pass of the same one."""
    module = model(group)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        step(module, optimizer, rows(group.rank()))
    with reads_counted() as seen:
        loss = module(rows(group.rank())).sum()
        assert len(seen) == 1
        loss.backward(retain_graph=True)
        assert len(seen) == 1
        loss.backward()
        assert len(seen) == 2
        with module.no_sync():
            module(rows(group.rank())).sum().backward()
        assert len(seen) == 2
    with torch.no_grad():
        expected = [p.clone() for p in module.parameters()]
    group.broadcast(expected[0], root=0).wait()
    assert torch.equal(expected[0], next(module.parameters()))


def missing_on_one(group: ProcessGroup) -> None:
    """The rank at fault raises at once, the others name it at their next forward; then all go on."""
    for first in (False, True):
        module = model(group)
        for _ in range(0 if first else 3):
            module(rows(group.rank())).sum().backward()
        module.zero_grad()
        if group.rank() == 1:
            with pytest.raises(GradientSyncError, match=r"head\.weight") as caught:
                module(rows(1), with_head=False).sum().backward()
        else:
            module(rows(group.rank())).sum().backward()
            with pytest.raises(
                GradientSyncError, match="because of rank 1, where the error was raised"
            ) as caught:
                module(rows(group.rank()))
        assert set(caught.value.reasons) == {1}
        for _ in range(3):
            module.zero_grad()
            module(rows(group.rank())).sum().backward()
        gradient = module.module.head.bias.grad
        assert gradient.tolist() == [3.0] * 2


def broken_off_on_one(group: ProcessGroup) -> None:
    """An exception in the user's own code ends the pass there, and is told to the others."""
    module = model(group)

    def fails(gradient: torch.Tensor) -> None:
        raise KeyError("of the user")

    for _ in range(3):
        module(rows(group.rank())).sum().backward()
    given = rows(group.rank()).requires_grad_()
    hidden = module.module.body.register_forward_hook(
        lambda _module, _given, output: output.register_hook(fails) and None if group.rank() == 1 else None
    )
    loss = module(given).sum()
    hidden.remove()
    if group.rank() == 1:
        with pytest.raises(KeyError, match="of the user"):
            loss.backward()
    else:
        loss.backward()
        with pytest.raises(GradientSyncError, match="because of rank 1"):
            module(given)
    for _ in range(2):
        module.zero_grad()
        module(rows(group.rank())).sum().backward()
    assert module.module.head.bias.grad.tolist() == [3.0] * 2


def out_of_step(group: ProcessGroup) -> None:
    """All ranks find out at their next forward, and say where each of them stood."""
    module = model(group)
    for _ in range(2):
        module(rows(group.rank())).sum().backward()
    if group.rank() == 1:
        with module.no_sync():
            module(rows(1)).sum().backward()
    module(rows(group.rank())).sum().backward()
    with pytest.raises(GradientSyncError, match="1 backward passes under no_sync") as caught:
        module(rows(group.rank()))
    assert set(caught.value.reasons) == {0, 1}
    module.zero_grad()
    module(rows(group.rank())).sum().backward()
    module(rows(group.rank()))


def at_once_where_waits_block(group: ProcessGroup) -> None:
    module = model(group)
    for _ in range(2):
        module(rows(group.rank())).sum().backward()
    with pytest.raises(GradientSyncError, match=r"rank 1: .*head\.weight"):
        module(rows(group.rank()), with_head=group.rank() != 1).sum().backward()


def at_once_where_uses_are_counted(group: ProcessGroup) -> None:
    module = model(group, find_unused_parameters=True)
    for with_head in (True, False):
        module.zero_grad()
        module(rows(group.rank()), with_head=with_head).sum().backward()
        assert (module.module.head.bias.grad is None) is not with_head


@pytest.mark.parametrize(
    "body", [one_read_a_pass, missing_on_one, broken_off_on_one, out_of_step, at_once_where_uses_are_counted],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_the_end_of_a_pass(nccl_library: Path, body: Any) -> None:
    run_over_double(body, 2 if body is not missing_on_one else 3, nccl_library)


def test_errors_at_the_end_of_the_pass(nccl_library: Path) -> None:
    run_over_double(
        at_once_where_waits_block, 2, nccl_library, options={"pg_options": Options(blocking_wait=True)}
    )


def lost(group: ProcessGroup, at_once: bool) -> None:
    """What a rank computed alone is never taken for the average for longer than a pass."""
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


@pytest.mark.parametrize("size", [2, 3])
def test_captured_collectives(nccl_library: Path, size: int) -> None:
    run_over_double(captured_collectives, size, nccl_library, nccl_library)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "arguments", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str
)
def test_captured_training(nccl_library: Path, arguments: dict[str, Any]) -> None:
    run_over_double(captured_training, 2, nccl_library, arguments)


def in_any_order(group: ProcessGroup, path: Path) -> None:
    one_read_a_pass(group)
    missing_on_one(group)
    captured_collectives(group, path)
    captured_training(group, {"gradient_as_bucket_view": True})


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_training_on_streams_that_run_in_other_orders(nccl_library: Path, seed: int) -> None:
    run_over_double(in_any_order, 3, nccl_library, nccl_library, seed=seed, timeout=100)


def test_refused_captures(nccl_library: Path) -> None:
    run_over_double(refused_captures, 2, nccl_library)
