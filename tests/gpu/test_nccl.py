"""The nccl backend on CUDA tensors: values, order on streams, memory, graphs, training, failures."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from conformance.oracle import Report, close, place, reduced, values
from gpu.cuda_ranks import needs_device, run_on_cuda, take_device
from harness import current_store, run_ranks
from optimizers_in_hooks import every_form

import collectives
from collectives import CollectiveTimeoutError, ProcessGroup, ReduceOp
from collectives.backends.nccl import providers
from collectives.bench.core.devices import numbers_of_ranks
from collectives.core.types import AllreduceOptions, make_premul_sum
from collectives.ddp import DistributedDataParallel

pytestmark = needs_device
SIZES = numbers_of_ranks(torch.cuda.device_count())
sizes = pytest.mark.parametrize("size", SIZES)
everywhere = pytest.mark.parametrize(
    ("provider", "size"), [(name, size) for size in SIZES for name in providers.PROVIDERS]
)

CYCLES = 100_000_000
"""What torch.cuda._sleep takes; 50 to 100 ms on today's devices."""

DTYPES = (
    torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
)  # fmt: skip
OPS = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG, make_premul_sum(0.3))


def on_device(
    dtype: torch.dtype, rank: int, count: int, layout: str = "dense", salt: int = 0
) -> torch.Tensor:
    placed = place(values(dtype, rank, count, salt), layout).tensor
    moved = torch.empty(placed.shape, dtype=dtype, device="cuda") if layout == "dense" else None
    if moved is None:
        moved = torch.empty(3 * count + 2, dtype=dtype, device="cuda")[1 : 1 + 3 * count : 3]
    moved.copy_(placed)
    return moved


def reductions(group: ProcessGroup) -> None:
    report, me, size = Report(group), group.rank(), group.size()
    turn = 0
    for dtype in DTYPES:
        for op in OPS:
            if not group.supports("all_reduce", device="cuda", dtype=dtype, op=op) or (
                op is ReduceOp.AVG and not dtype.is_floating_point
            ):
                continue
            for layout in ("dense", "strided"):
                turn += 1
                inputs = [values(dtype, rank, 1009) for rank in range(size)]
                mine = on_device(dtype, me, 1009, layout)
                options = AllreduceOptions(reduceOp=op, asyncOp=turn % 2 == 0)
                case = f"{dtype} {op.name} {layout}"
                report.run(case, lambda m=mine, o=options: group.allreduce([m], o).wait())
                report.expect(case, close(mine.cpu(), reduced(inputs, op), inputs, op))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            if not group.supports("all_reduce", device="cuda", dtype=dtype, op=op):
                continue
            inputs = [((torch.arange(1009) + rank) % 3).to(dtype) for rank in range(size)]
            mine = inputs[me].cuda()
            case, options = f"{dtype} {op.name}", AllreduceOptions(reduceOp=op)
            report.run(case, lambda m=mine, o=options: group.allreduce([m], o).wait())
            stacked = torch.stack([tensor.float() for tensor in inputs])
            expected = stacked.sum(0) if op is ReduceOp.SUM else stacked.amax(0)  # held exactly
            report.same(case, mine.cpu().float(), expected)
    report.finish(30)


def movements(group: ProcessGroup) -> None:
    me, size = group.rank(), group.size()
    for dtype in (torch.float32, torch.int16, torch.complex128):
        for layout in ("dense", "strided"):
            parts = [on_device(dtype, 9, 65 + rank, layout) for rank in range(size)]
            group.allgather(parts, on_device(dtype, me, 65 + me, layout)).wait()
            same = [torch.empty(65, dtype=dtype, device="cuda") for _ in range(size)]
            group.allgather(same, on_device(dtype, me, 65, layout)).wait()
            for rank in range(size):
                assert torch.equal(parts[rank].cpu(), values(dtype, rank, 65 + rank))
                assert torch.equal(same[rank].cpu(), values(dtype, rank, 65))
            x = on_device(dtype, me, 131, layout)
            group.broadcast(x, root=size - 1).wait()
            assert torch.equal(x.cpu(), values(dtype, size - 1, 131))
            outputs = [on_device(dtype, 9, 33, layout) for _ in range(size)]
            inputs = [on_device(dtype, me, 33, layout, salt=to) for to in range(size)]
            group.alltoall(outputs, inputs).wait()
            for rank in range(size):
                assert torch.equal(outputs[rank].cpu(), values(dtype, rank, 33, salt=me))
            gathered = [on_device(dtype, 9, 7) for _ in range(size)] if me == 0 else None
            group.gather(gathered, on_device(dtype, me, 7, layout), root=0).wait()
            for rank, tensor in enumerate(gathered or ()):
                assert torch.equal(tensor.cpu(), values(dtype, rank, 7))
            got = on_device(dtype, 9, 7, layout)
            given = [on_device(dtype, 5, 7, layout, salt=to) for to in range(size)] if me == 0 else None
            group.scatter(got, given, root=0).wait()
            assert torch.equal(got.cpu(), values(dtype, 5, 7, salt=me))
    part = torch.empty(5, device="cuda")
    group.reduce_scatter_single(part, torch.ones(5 * size, device="cuda")).wait()
    assert part.tolist() == [float(size)] * 5
    tensors = [torch.ones(n, device="cuda") for n in (1, 10, 100)]
    group.allreduce_coalesced(tensors).wait()
    assert all((tensor == size).all() for tensor in tensors)
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
def test_values(provider: str, size: int) -> None:
    run_on_cuda(reductions, provider=provider, size=size)


@everywhere
def test_movements(provider: str, size: int) -> None:
    run_on_cuda(movements, provider=provider, size=size)


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
