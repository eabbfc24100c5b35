"""Calls that reach a group from C++: c10d operators, functional collectives, and their second forms."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch_world import run_torch

from collectives.errors import CollectiveTimeoutError
from collectives.torch_bridge import operators as kernels

SIZES = [2, 3]
CPU_OPERATORS = {
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_",
    "allgather_coalesced_", "allgather_into_tensor_coalesced_", "gather_", "scatter_", "reduce_scatter_",
    "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "barrier",
    "monitored_barrier_", "send", "recv_", "recv_any_source_",
}  # fmt: skip


def value(number, n=2):
    return torch.full((n,), float(number))


def equal(got, *numbers):
    flat = torch.cat([t.flatten() for t in got]) if isinstance(got, (list, tuple)) else got.flatten()
    expected = torch.tensor([float(number) for number in numbers]).repeat_interleave(
        flat.numel() // len(numbers)
    )
    assert torch.equal(flat, expected), f"{flat} is not {expected}"


def finish(result):
    """Waits for the Work that an operator returned."""
    dist.Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result).wait()


def c10d_operators(rank, size):
    ops, group, add = torch.ops.c10d, dist.group.WORLD.boxed(), torch.classes.c10d.ReduceOp()
    total = sum(range(size))
    tensor = value(rank)
    finish(ops.allreduce_([tensor], group, add, None))
    equal(tensor, total)
    finish(ops.allreduce_([tensor], group, add, None, False, 5000))
    equal(tensor, total * size)
    tensors = [value(rank), value(rank + 1)]
    finish(ops.allreduce_coalesced_(tensors, group, add))
    equal(tensors, total, total + size)
    tensor = value(rank)
    finish(ops.broadcast_([tensor], group, 1, 0))
    equal(tensor, 1)
    tensor = value(rank)
    finish(ops.reduce_([tensor], group, add, 1, 0))
    equal(tensor, total if rank == 1 else rank)
    parts = [value(-1) for _ in range(size)]
    finish(ops.allgather_([parts], [value(rank)], group))
    equal(parts, *range(size))
    output = torch.empty(2 * size)
    finish(ops._allgather_base_(output, value(rank), group))
    equal(output, *range(size))
    lists = [[value(-1), value(-1)] for _ in range(size)]
    finish(ops.allgather_coalesced_(lists, [value(rank), value(rank + 10)], group))
    for r, pair in enumerate(lists):
        equal(pair, r, r + 10)
    outputs = [torch.empty(2 * size), torch.empty(3 * size)]
    finish(ops.allgather_into_tensor_coalesced_(outputs, [value(rank), value(rank + 10, 3)], group))
    equal(outputs[0], *range(size))
    equal(outputs[1], *range(10, 10 + size))
    parts = [value(-1) for _ in range(size)]
    finish(ops.gather_([parts] if rank == 0 else [], [value(rank)], group, 0))
    equal(parts, *(range(size) if rank == 0 else [-1] * size))
    tensor = value(-1)
    finish(ops.scatter_([tensor], [[value(r + 5) for r in range(size)]] if rank == 1 else [], group, 1))
    equal(tensor, rank + 5)
    finish(ops.reduce_scatter_([tensor], [[value(rank + r) for r in range(size)]], group, add))
    equal(tensor, total + size * rank)
    finish(ops._reduce_scatter_base_(tensor, torch.cat([value(r) for r in range(size)]), group, add))
    equal(tensor, size * rank)
    outputs = [value(-1), value(-1, 1)]
    inputs = [torch.cat([value(r) for r in range(size)]), torch.arange(size) * 1.0]
    finish(ops.reduce_scatter_tensor_coalesced_(outputs, inputs, group, add))
    equal(outputs[0], size * rank)
    equal(outputs[1], size * rank)
    outputs = [value(-1) for _ in range(size)]
    finish(ops.alltoall_(outputs, [value(10 * rank + r) for r in range(size)], group))
    equal(outputs, *(10 * r + rank for r in range(size)))
    output = torch.empty(size)
    finish(ops.alltoall_base_(output, torch.arange(size) + 10.0 * rank, group, [], []))
    equal(output, *(10 * r + rank for r in range(size)))
    finish(ops.barrier(torch.empty(1), group, []))
    ops.monitored_barrier_(torch.empty(0), group, [], 5000, True)
    tensor = value(-1)
    if rank == 0:
        finish(ops.send([value(7)], group, 1, 4))
        finish(ops.recv_any_source_([tensor], group, 4))
        equal(tensor, 8)
    elif rank == 1:
        finish(ops.recv_([tensor], group, 0, 4))
        equal(tensor, 7)
        finish(ops.send([value(8)], group, 0, 4))


def sparse_and_hidden_factor(rank, size):
    group = dist.group.WORLD
    indices = torch.tensor([[0], [0]])
    add = torch.classes.c10d.ReduceOp()
    if not kernels.can_be_made():  # else a kernel of torch's own drops them
        with pytest.raises(RuntimeError, match="sparse"):
            torch.ops.c10d.allreduce_([torch.ones(2)], group.boxed(), add, indices)
    half = torch._C._distributed_c10d._make_nccl_premul_sum(0.5)
    options = dist.ReduceOptions()
    options.reduceOp = half
    if kernels.can_be_made():
        tensor = torch.ones(2)
        dist.ProcessGroup.reduce(group, [tensor], options).wait()
        equal(tensor, size / 2 if rank == 0 else 1)
    else:
        with pytest.raises(RuntimeError, match="PREMUL_SUM"):
            dist.ProcessGroup.reduce(group, [torch.ones(2)], options)
    tensor = torch.ones(2)
    dist.reduce(tensor, 0, op=half)
    equal(tensor, size / 2 if rank == 0 else 1)


def base_class_methods(rank, size):
    """What C++ calls where it does not know of the Python method."""
    group, base = dist.group.WORLD, dist.ProcessGroup
    tensor = value(rank)
    base.allreduce(group, [tensor]).wait()
    equal(tensor, sum(range(size)))
    base.broadcast(group, value(1), 0).wait()
    parts = [value(-1) for _ in range(size)]
    base.gather(group, [parts] if rank == 0 else [], [value(rank)]).wait()
    equal(parts, *(range(size) if rank == 0 else [-1] * size))
    base.alltoall(group, parts, [value(10 * rank + r) for r in range(size)]).wait()
    equal(parts, *(10 * r + rank for r in range(size)))
    output = torch.empty(2 * size)
    base._allgather_base(group, output, value(rank)).wait()
    equal(output, *range(size))
    base.barrier(group).wait()
    base.monitored_barrier(group)
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match="rank"):
            base.monitored_barrier(group, timedelta(seconds=0.2), True)


def functional_collectives(rank, size):
    world = dist.group.WORLD
    total = sum(range(size))
    tensor = value(rank)
    equal(functional.wait_tensor(functional.all_reduce(tensor, "sum", world)), total)
    equal(tensor, rank)
    equal(functional.all_reduce_coalesced([value(rank), value(1)], "sum", world), total, size)
    equal(functional.all_reduce(value(rank), "avg", world) + 0, total / size)
    equal(functional.all_reduce(value(rank), "max", world) + 0, size - 1)
    equal(functional.all_gather_tensor(value(rank), 0, world) + 0, *range(size))
    gathered = functional.all_gather_tensor(torch.full((1, 2), rank * 1.0), 1, world) + 0
    assert gathered.tolist() == [[r * 1.0 for r in range(size) for _ in range(2)]]
    outputs = functional.all_gather_into_tensor_coalesced([value(rank), value(rank)], world)
    for output in outputs:
        equal(output + 0, *range(size))
    scattered = functional.reduce_scatter_tensor(torch.cat([value(r) for r in range(size)]), "sum", 0, world)
    equal(scattered + 0, size * rank)
    pair = functional.reduce_scatter_tensor_coalesced([torch.ones(size)] * 2, "sum", [0, 0], world)
    equal([part + 0 for part in pair], size, size)
    exchanged = functional.all_to_all_single(torch.arange(size) + 10.0 * rank, None, None, world)
    equal(exchanged + 0, *(10 * r + rank for r in range(size)))
    splits = [r + 1 for r in range(size)]
    sent = torch.cat([value(10 * rank + r, r + 1) for r in range(size)])
    uneven = functional.all_to_all_single(sent, [rank + 1] * size, splits, world) + 0
    equal(uneven, *(10 * r + rank for r in range(size)))
    equal(functional.broadcast(value(rank), 1, world) + 0, 1)
    complex_sum = functional.all_reduce(torch.full((2,), complex(rank, 1)), "sum", world) + 0
    assert torch.equal(complex_sum, torch.full((2,), complex(total, size)))


def functional_operators(rank, size):
    """The forms that write into a given tensor, and those for graphs."""
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    wait = ops.wait_tensor
    tensor = value(rank)
    assert wait(ops.all_reduce_(tensor, "sum", name)) is not None
    equal(tensor, sum(range(size)))
    tensors = [value(rank), value(1)]
    for output in ops.all_reduce_coalesced_(tensors, "sum", name):
        wait(output)
    equal(tensors, sum(range(size)), size)
    output = torch.empty(2 * size)
    wait(ops.all_gather_into_tensor_out(value(rank), size, name, out=output))
    equal(output, *range(size))
    part = torch.empty(2)
    wait(ops.reduce_scatter_tensor_out(output, "sum", size, name, out=part))
    equal(part, rank * size)
    tensor = value(rank)
    wait(ops.broadcast_(tensor, 1, name))
    equal(tensor, 1)
    if hasattr(ops, "batch_p2p_ops"):  # not yet in torch 2.11
        functional_messages(rank, size)


def functional_messages(rank, size):
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    wait = ops.wait_tensor
    tensor = value(-1)
    if rank == 0:
        wait(ops.isend(value(3), 1, 0, name))
    elif rank == 1:
        wait(ops.irecv(tensor, 0, 0, name))
        equal(tensor, 3)
    peers = [(rank + 1) % size, (rank - 1) % size]
    outputs = ops.batch_p2p_ops(["isend", "irecv"], peers, [5, 5], [value(rank), tensor], name)
    for output in outputs:
        wait(output)
    equal(tensor, (rank - 1) % size)
    equal(outputs[1], (rank - 1) % size)
    assert outputs[0].numel() == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "body",
    [
        c10d_operators, sparse_and_hidden_factor, base_class_methods, functional_collectives,
        functional_operators,
    ],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_operator(body, size):
    run_torch(body, size)


def test_no_operator_of_a_group_keeps_the_kernel_of_torch():
    takes_a_group = {
        schema.name.removeprefix("c10d::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("c10d::") and any(a.name == "process_group" for a in schema.arguments)
    }
    assert set(kernels._OPERATORS) == CPU_OPERATORS
    assert takes_a_group == CPU_OPERATORS or kernels.can_be_made()
