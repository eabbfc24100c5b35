"""The nccl backend on CUDA tensors: values, order on streams, memory, graphs, training, failures."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from conformance.oracle import NcclReport
from conformance.test_values import NAMES, right_values
from gpu.cuda_ranks import needs_device, run_on_cuda, take_device
from harness import current_store, run_ranks
from optimizers_in_hooks import every_form

import collectives
from collectives import CollectiveTimeoutError, ProcessGroup
from collectives.backends.nccl import providers
from collectives.bench.core.devices import numbers_of_ranks
from collectives.core.types import AllreduceOptions
from collectives.ddp import DistributedDataParallel

pytestmark = needs_device
SIZES = numbers_of_ranks(torch.cuda.device_count())
sizes = pytest.mark.parametrize("size", SIZES)
everywhere = pytest.mark.parametrize(
    ("provider", "size"), [(name, size) for size in SIZES for name in providers.PROVIDERS]
)

CYCLES = 100_000_000
"""What torch.cuda._sleep takes; 50 to 100 ms on today's devices."""


def every_collective(group: ProcessGroup) -> None:
    for name in NAMES:
        right_values(group, name, NcclReport, device="cuda")


def messages(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    got, partner = torch.zeros(1000, device="cuda"), me ^ 1
    # One after the other. Sent first on all ranks, also around a ring, each would wait for the next one.
    for sender in sorted((me, partner)) if partner < size else ():
        if sender == me:
            group.send(got, partner).wait()
        else:
            group.recv(got.clone(), partner).wait()
    after, before = (me + 1) % size, (me - 1) % size
    with group._together():
        group.send(torch.full((1000,), float(me), device="cuda"), after)
        receive = group.recv(got, before)
    receive.wait()
    assert got.unique().tolist() == [float(before)]
    group.barrier().wait()


@everywhere
@pytest.mark.parametrize("body", [every_collective, messages])
def test_values(provider: str, size: int, body: Callable[[ProcessGroup], None]) -> None:
    run_on_cuda(body, provider=provider, size=size)


def streams(group: ProcessGroup) -> None:
    """A producer that is late on the current stream, and consumers that only streams hold back."""
    me, size = group.rank(), group.size()
    group.allreduce(torch.ones(1, device="cuda")).wait()
    own, other = torch.cuda.Stream(), torch.cuda.Stream()
    total = float(sum(range(1, size + 1)))
    # CUDA loads a kernel when it is first used, and may wait for the device then: not in turns that count.
    for cycles, asynchronous in ((0, True), (0, False), (CYCLES, True), (CYCLES, False)):
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(own):
            torch.cuda._sleep(cycles)
            x.fill_(1.0 + me)
            work = group.allreduce([x], AllreduceOptions(asyncOp=asynchronous))
            assert not (cycles and work._pending.completed()), "the host waited"
            work.wait()
            seen = x.clone()
        with torch.cuda.stream(other):
            work.wait()
            elsewhere = x.clone()
        with torch.cuda.stream(own):
            torch.cuda._sleep(cycles)
            y = torch.full((10,), 1.0 + me, device="cuda")
            doubled = group.allreduce(y).get_future().then(lambda done: done.value()[0] * 2)
        assert doubled.wait().tolist() == [2 * total] * 10
        torch.cuda.synchronize()
        assert seen.unique().tolist() == [total]
        assert elsewhere.unique().tolist() == [total]


@everywhere
def test_streams(provider: str, size: int) -> None:
    run_on_cuda(streams, provider=provider, size=size)


def to_oneself(group: ProcessGroup) -> None:
    """The copy that stands for a message is not given out again before a late receiver has read it."""
    sender, receiver = torch.cuda.Stream(), torch.cuda.Stream()
    got = torch.zeros(1 << 18, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(sender):
        group.send(torch.full((1 << 18,), 3.0, device="cuda"), group.rank())
    with torch.cuda.stream(receiver):
        torch.cuda._sleep(CYCLES)
        group.recv(got, group.rank()).wait()
    with torch.cuda.stream(sender):
        for _ in range(4):  # would take the memory of the copy
            torch.full((1 << 18,), -1.0, device="cuda")
    torch.cuda.synchronize()
    assert got.unique().tolist() == [3.0]


def memory(group: ProcessGroup) -> None:
    """Tensors that nobody keeps are not given out again while NCCL uses them."""
    size = group.size()
    kept = []
    for turn in range(20):
        torch.cuda._sleep(CYCLES // 20)
        x = torch.full((1 << 18,), float(turn), device="cuda")
        result = torch.empty(size << 18, device="cuda")
        kept.append(result)
        group.all_gather_single(result, x)
        group.allreduce(torch.ones(3 << 18, device="cuda")[::3])
        del x
        for _ in range(4):  # would take the memory of x
            torch.full((1 << 18,), -1.0, device="cuda")
    gc.collect()
    group.barrier().wait()
    torch.cuda.synchronize()
    to_oneself(group)
    assert [tensor.unique().tolist() for tensor in kept] == [[float(turn)] for turn in range(20)]


@everywhere
def test_memory(provider: str, size: int) -> None:
    run_on_cuda(memory, provider=provider, size=size)


def graphs(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    x = torch.full((1000,), 1.0 + me, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for asynchronous in (True, False):
            group.allreduce([x], AllreduceOptions(asyncOp=asynchronous)).wait()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group.allreduce([x], AllreduceOptions(asyncOp=False)).wait()
        work = group.allreduce(x)
        work.wait()
    assert work.is_completed()
    for _ in range(3):
        x.fill_(1.0 + me)
        graph.replay()
        torch.cuda.synchronize()
        assert x.unique().tolist() == [float(size * sum(range(1, size + 1)))]
    group.allreduce(x).wait()
    group.barrier().wait()


@everywhere
def test_cuda_graphs(provider: str, size: int) -> None:
    run_on_cuda(graphs, provider=provider, size=size)


def network() -> torch.nn.Module:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5)]
    return torch.nn.Sequential(*layers).cuda()


def trained(module: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


def training(group: ProcessGroup) -> None:
    rows, me, size = 32, group.rank(), group.size()
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(rows, 40, generator=generator).cuda()
    targets = torch.randn(rows, 5, generator=generator).cuda()
    expected = trained(network(), inputs, targets)
    share = slice(me * rows // size, (me + 1) * rows // size)
    module = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.01)
    for ours, alone in zip(trained(module, inputs[share], targets[share]), expected, strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-5)

    # Named by its local rank, a device gets inputs of the CPU.
    local_rank = torch.cuda.current_device()
    named = DistributedDataParallel(
        network(), process_group=group, device_ids=[local_rank], output_device=local_rank
    )
    assert (named.device_ids, named.output_device) == ([local_rank], local_rank)
    given = inputs[share].cpu()
    torch.testing.assert_close(named(given), named(inputs[share]))
    assert named(given).device == torch.device("cuda", local_rank)


@everywhere
def test_training(provider: str, size: int) -> None:
    run_on_cuda(training, provider=provider, size=size)


def optimizers_in_hooks(group: ProcessGroup) -> None:
    assert every_form(group, "cuda") == []


@everywhere
def test_steps_in_hooks_equal_steps_after_backward(provider: str, size: int) -> None:
    run_on_cuda(optimizers_in_hooks, provider=provider, size=size)


def too_late(group: ProcessGroup) -> None:
    group.allreduce(torch.ones(1, device="cuda")).wait()
    store = current_store()
    if group.rank() == 0:
        with pytest.raises(CollectiveTimeoutError, match="rank 1 waits in no operation"):
            group.allreduce(torch.ones(3, device="cuda"), timeout=timedelta(seconds=4)).wait(
                timedelta(seconds=40)
            )
        store.set("expired", "yes")
    else:
        store.wait(["expired"])
    group.abort()
    torch.cuda.synchronize()  # nothing spins on the device any more
    assert torch.ones(3, device="cuda").sum().item() == 3.0


@everywhere
def test_a_time_limit(provider: str, size: int) -> None:
    run_on_cuda(too_late, provider=provider, size=size)


def needs_a_provider() -> None:
    from collectives.backends import nccl

    reason = nccl.unavailable()
    if reason is not None:
        pytest.skip(reason)


def in_a_world(rank: int, size: int) -> None:
    needs_a_provider()
    device = take_device(rank, size)
    collectives.init_process_group(
        "cpu:host,cuda:nccl", store=current_store(), rank=rank, world_size=size, device_id=device
    )
    x, y = torch.ones(3, device="cuda"), torch.ones(3)
    collectives.all_reduce(x)
    collectives.all_reduce(y)
    assert x.tolist() == y.tolist() == [size] * 3
    part = collectives.new_group([size - 1])
    if rank == size - 1:
        collectives.all_reduce(x, group=part)
    assert x.tolist() == [size] * 3
    collectives.destroy_process_group()


def in_torchs_world(rank: int, size: int, path: str) -> None:
    needs_a_provider()
    take_device(rank, size)
    store = torch_dist.FileStore(path, size)
    torch_dist.init_process_group("collectives", store=store, rank=rank, world_size=size)
    x, y = torch.ones(3, device="cuda"), torch.ones(3)
    torch_dist.all_reduce(x)
    torch_dist.all_reduce(y)
    assert x.tolist() == y.tolist() == [size] * 3
    got = torch.empty(3, device="cuda")
    batch = [
        torch_dist.P2POp(torch_dist.isend, x * rank, (rank + 1) % size),
        torch_dist.P2POp(torch_dist.irecv, got, (rank - 1) % size),
    ]
    for work in torch_dist.batch_isend_irecv(batch):
        work.wait()
    assert got.tolist() == [float(size * ((rank - 1) % size))] * 3
    module: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2).cuda())
    module(torch.ones(2, 4, device="cuda")).sum().backward()
    assert next(module.parameters()).grad.unique().tolist() == [2.0]
    torch_dist.destroy_process_group()


@sizes
def test_world(size: int) -> None:
    run_ranks(in_a_world, size, isolated=True, timeout=110)


@sizes
def test_world_of_torch(size: int, tmp_path: Any) -> None:
    run_ranks(in_torchs_world, size, f"{tmp_path}/store", isolated=True, timeout=110)
