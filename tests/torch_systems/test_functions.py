"""Every function of torch.distributed that communicates, with its values."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch_world import run_torch

SIZES = [2, 3]


def mine(rank, n=4, dtype=torch.float32):
    return (torch.arange(n) + 10 * rank).to(dtype)


def equal(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got, expected), f"{got} is not {expected}"


def everyone(size, n=4, dtype=torch.float32):
    return torch.stack([mine(r, n, dtype) for r in range(size)])


def all_reduce(rank, size):
    stack = everyone(size)
    expected = {
        dist.ReduceOp.SUM: stack.sum(0),
        dist.ReduceOp.PRODUCT: stack.prod(0),
        dist.ReduceOp.MIN: stack.amin(0),
        dist.ReduceOp.MAX: stack.amax(0),
        dist.ReduceOp.AVG: stack.mean(0),
    }
    for op, values in expected.items():
        tensor = mine(rank)
        assert dist.all_reduce(tensor, op=op) is None
        torch.testing.assert_close(tensor, values)
    bits = everyone(size, dtype=torch.int32)
    for op, function in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ):
        tensor = mine(rank, dtype=torch.int32)
        dist.all_reduce(tensor, op=op)
        values = bits[0]
        for other in bits[1:]:
            values = function(values, other)
        equal(tensor, values)
    complex_one = torch.full((2,), complex(rank + 1, 1))
    dist.all_reduce(complex_one)
    equal(complex_one, torch.full((2,), complex(size * (size + 1) / 2, size)))
    scaled = mine(rank)
    dist.all_reduce(scaled, op=torch._C._distributed_c10d._make_nccl_premul_sum(0.5))
    torch.testing.assert_close(scaled, 0.5 * stack.sum(0))


def all_reduce_dtypes(rank, size):
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8):
        tensor = torch.full((5,), rank + 1, dtype=dtype)
        dist.all_reduce(tensor)
        equal(tensor, torch.full((5,), size * (size + 1) // 2, dtype=dtype))
    strided = torch.zeros(4, 6)[:, ::2]
    strided += rank
    dist.all_reduce(strided)
    equal(strided.contiguous(), torch.full((4, 3), sum(range(size)) * 1.0))
    empty = torch.empty(0)
    dist.all_reduce(empty)


def all_reduce_coalesced(rank, size):
    tensors = [torch.full((2,), rank + 1.0), torch.full((3, 2), rank + 2.0)]
    with pytest.warns(FutureWarning):
        dist.all_reduce_coalesced(tensors)
    total = size * (size + 1) / 2
    equal(tensors[0], torch.full((2,), total))
    equal(tensors[1], torch.full((3, 2), total + size))


def broadcast(rank, size):
    for src in range(size):
        tensor = mine(rank) if rank == src else torch.zeros(4)
        dist.broadcast(tensor, src)
        equal(tensor, mine(src))
    with_group_rank = mine(rank)
    dist.broadcast(with_group_rank, group_src=size - 1)
    equal(with_group_rank, mine(size - 1))


def reduce(rank, size):
    for dst in range(size):
        tensor = mine(rank)
        dist.reduce(tensor, dst, op=dist.ReduceOp.SUM)
        equal(tensor, everyone(size).sum(0) if rank == dst else mine(rank))


def all_gather(rank, size):
    parts = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(parts, mine(rank))
    for r, part in enumerate(parts):
        equal(part, mine(r))


def all_gather_into_tensor(rank, size):
    together = torch.zeros(4 * size)
    dist.all_gather_into_tensor(together, mine(rank))
    equal(together, everyone(size).flatten())
    stacked = torch.zeros(size, 4)
    dist.all_gather_into_tensor(stacked, mine(rank))
    equal(stacked, everyone(size))


def all_gather_coalesced(rank, size):
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    with pytest.warns(FutureWarning):
        dist.all_gather_coalesced(outputs, [mine(rank, 2), mine(rank, 3)])
    for r, (two, three) in enumerate(outputs):
        equal(two, mine(r, 2))
        equal(three, mine(r, 3))


def gather(rank, size):
    for dst in range(size):
        parts = [torch.zeros(4) for _ in range(size)] if rank == dst else None
        dist.gather(mine(rank), parts, dst=dst)
        for r, part in enumerate(parts or []):
            equal(part, mine(r))


def gather_single(rank, size):
    """A function of newer versions of torch; the method is there for all."""
    group = dist.group.WORLD
    options = dist.GatherOptions()
    options.rootRank = size - 1
    for output in (torch.zeros(4 * size), torch.zeros(size, 8)[:, ::2]):
        group.gather_single(output, mine(rank), options).wait()
        expected = everyone(size) if rank == size - 1 else torch.zeros(size, 4)
        equal(output.reshape(size, 4), expected)
    output = torch.zeros(size, 8)[:, ::2]  # is written, too, where nobody waits or asks
    group.gather_single(output, mine(rank), options)
    until = time.monotonic() + 30
    while rank == size - 1 and not torch.equal(output, everyone(size)):
        assert time.monotonic() < until
        time.sleep(0.001)
    if rank == size - 1:
        with pytest.raises(ValueError, match="elements"):
            group.gather_single(torch.zeros(3), mine(rank), options)
    if hasattr(dist, "gather_single"):
        output = torch.zeros(4 * size) if rank == 0 else None
        dist.gather_single(mine(rank), output, dst=0)
        assert rank or torch.equal(output, everyone(size).flatten())


def scatter(rank, size):
    for src in range(size):
        tensor = torch.zeros(4)
        dist.scatter(tensor, [mine(r + src) for r in range(size)] if rank == src else None, src=src)
        equal(tensor, mine(rank + src))


def reduce_scatter(rank, size):
    output = torch.zeros(4)
    dist.reduce_scatter(output, [mine(rank + r) for r in range(size)])
    equal(output, sum(mine(r + rank) for r in range(size)))


def reduce_scatter_tensor(rank, size):
    output = torch.zeros(4)
    dist.reduce_scatter_tensor(output, torch.cat([mine(rank + r) for r in range(size)]))
    equal(output, sum(mine(r + rank) for r in range(size)))
    dist.reduce_scatter_tensor(
        output, torch.stack([mine(rank + r) for r in range(size)]), op=dist.ReduceOp.MAX
    )
    equal(output, mine(size - 1 + rank))


def all_to_all(rank, size):
    outputs = [torch.zeros(4) for _ in range(size)]
    dist.all_to_all(outputs, [mine(100 * rank + r) for r in range(size)])
    for r, output in enumerate(outputs):
        equal(output, mine(100 * r + rank))
    uneven = [torch.zeros(r + 1) for r in range(size)]
    dist.all_to_all(uneven, [torch.full((rank + 1,), 10.0 * rank + r) for r in range(size)])
    for r, output in enumerate(uneven):
        equal(output, torch.full((r + 1,), 10.0 * r + rank))


def all_to_all_single(rank, size):
    output = torch.zeros(size, 2)
    dist.all_to_all_single(output, torch.stack([mine(10 * rank + r, 2) for r in range(size)]))
    equal(output, torch.stack([mine(10 * r + rank, 2) for r in range(size)]))
    sent = torch.cat([torch.full((r + 1,), 10.0 * rank + r) for r in range(size)])
    received = torch.zeros(size * (rank + 1))
    dist.all_to_all_single(received, sent, [rank + 1] * size, [r + 1 for r in range(size)])
    equal(received, torch.cat([torch.full((rank + 1,), 10.0 * r + rank) for r in range(size)]))


def barrier(rank, size):
    assert dist.barrier() is None
    work = dist.barrier(async_op=True)
    work.wait()
    assert work.is_completed()
    dist.barrier(device_ids=None)


def point_to_point(rank, size):
    following, previous = (rank + 1) % size, (rank - 1) % size
    outgoing = dist.isend(mine(rank), following, tag=3)
    tensor = torch.zeros(4)
    assert dist.recv(tensor, previous, tag=3) == previous
    outgoing.wait()
    equal(tensor, mine(previous))
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            source = dist.recv(tensor)
            equal(tensor, mine(source))
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(mine(rank), 0)
    # A tag of its own: the receives from any rank above are for one message of each.
    request = dist.irecv(tensor, previous, tag=5)
    dist.send(mine(rank, 4), following, tag=5)
    request.wait()
    equal(tensor, mine(previous))


def batch_isend_irecv(rank, size):
    tensor = torch.zeros(4)
    following, previous = (rank + 1) % size, (rank - 1) % size
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine(rank), following), dist.P2POp(dist.irecv, tensor, previous)]
    )
    for request in requests:
        request.wait()
    equal(tensor, mine(previous))


def object_collectives(rank, size):
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    shared = [("from", rank), rank]
    dist.broadcast_object_list(shared, src=size - 1)
    assert shared == [("from", size - 1), size - 1]
    collected = [None] * size if rank == 0 else None
    dist.gather_object([rank], collected, dst=0)
    assert rank or collected == [[r] for r in range(size)]
    part = [None]
    dist.scatter_object_list(part, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert part == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list(["a", 1], dst=1)
    elif rank == 1:
        received = [None, None]
        assert dist.recv_object_list(received, src=0) == 0
        assert received == ["a", 1]


def coalescing_manager(rank, size):
    total = size * (size + 1) / 2
    tensors = [torch.full((n,), rank + 1.0) for n in (1, 2, 3)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for n, tensor in enumerate(tensors, 1):
        equal(tensor, torch.full((n,), total))
    outputs = [torch.zeros(size * n) for n in (1, 2)]
    with dist._coalescing_manager(async_ops=True) as block:
        for n, output in enumerate(outputs, 1):
            dist.all_gather_into_tensor(output, mine(rank, n))
    block.wait()
    for n, output in enumerate(outputs, 1):
        equal(output, everyone(size, n).flatten())
    scattered = [torch.zeros(n) for n in (1, 2)]
    with dist._coalescing_manager():
        for n, output in enumerate(scattered, 1):
            dist.reduce_scatter_tensor(output, torch.ones(n * size))
    for n, output in enumerate(scattered, 1):
        equal(output, torch.full((n,), float(size)))
    # with a device, every kind of operation may stand in the block, in another order on every rank
    tensor = torch.zeros(4)
    following, previous = (rank + 1) % size, (rank - 1) % size
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as block:
        if rank % 2:
            dist.recv(tensor, previous)
            dist.send(mine(rank), following)
        else:
            dist.send(mine(rank), following)
            dist.recv(tensor, previous)
    block.wait()
    equal(tensor, mine(previous))


def methods_of_the_group(rank, size):
    """The forms that users call on the group itself."""
    group = dist.group.WORLD
    total = size * (size + 1) / 2
    tensor = torch.full((2,), rank + 1.0)
    group.allreduce(tensor).wait()
    equal(tensor, torch.full((2,), total))
    tensor.fill_(rank)
    group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    equal(tensor, torch.full((2,), size - 1.0))
    tensor.fill_(rank)
    group.allreduce(tensor, op=dist.ReduceOp.MIN, timeout=timedelta(seconds=20)).wait()
    equal(tensor, torch.zeros(2))
    tensor.fill_(rank)
    group.broadcast(tensor, root=1).wait(timedelta(seconds=20))
    equal(tensor, torch.ones(2))
    tensor.fill_(rank)
    group.reduce(tensor, root=0, op=dist.ReduceOp.SUM).wait()
    equal(tensor, torch.full((2,), sum(range(size)) * 1.0 if rank == 0 else rank * 1.0))
    parts = [torch.zeros(2) for _ in range(size)]
    group.allgather(parts, torch.full((2,), rank * 1.0)).wait()
    assert [part[0].item() for part in parts] == list(range(size))
    group.allgather(output_tensors=parts, input_tensor=torch.full((2,), rank + 1.0)).wait()
    assert [part[0].item() for part in parts] == [r + 1 for r in range(size)]
    group.gather(parts if rank == 0 else [], torch.full((2,), rank * 3.0), root=0).wait()
    assert rank or [part[0].item() for part in parts] == [3 * r for r in range(size)]
    group.scatter(tensor, [torch.full((2,), r * 2.0) for r in range(size)] if rank == 0 else [], 0).wait()
    equal(tensor, torch.full((2,), rank * 2.0))
    group.reduce_scatter(tensor, [torch.full((2,), r * 1.0) for r in range(size)]).wait()
    equal(tensor, torch.full((2,), rank * size * 1.0))
    output = torch.zeros(size)
    group._allgather_base(output, torch.full((1,), rank * 1.0)).wait()
    equal(output, torch.arange(size) * 1.0)
    group._reduce_scatter_base(tensor[:1], torch.arange(size) * 1.0, dist.ReduceScatterOptions()).wait()
    equal(tensor[:1], torch.full((1,), rank * size * 1.0))
    group.alltoall_base(output, torch.arange(size) * 1.0, [], []).wait()
    equal(output, torch.full((size,), rank * 1.0))
    group.alltoall(
        [torch.zeros(1) for _ in range(size)], [torch.zeros(1) for _ in range(size)], timedelta(seconds=9)
    ).wait()
    group.barrier(timedelta(seconds=20)).wait()
    group.barrier(dist.BarrierOptions()).wait()


def results_on_their_way(rank, size):
    """What functional collectives gave, and nobody waited for yet, is an operand of any other collective."""

    def given():
        tensor = functional.all_reduce(mine(rank, size), "sum", dist.group.WORLD)
        assert type(tensor) is functional.AsyncCollectiveTensor
        return tensor

    def onto(issue, *others):
        tensor = given()
        issue(tensor, *others)
        return tensor + 0

    total = everyone(size, size).sum(0)
    equal(onto(dist.all_reduce), total * size)
    equal(onto(dist.broadcast, size - 1), total)
    equal(onto(dist.reduce, 0), total * size if rank == 0 else total)
    many = [torch.zeros(size) for _ in range(size)]
    dist.all_gather(many, given())
    equal(torch.stack(many), total.expand(size, size))
    together = torch.zeros(size * size)
    dist.all_gather_into_tensor(together, given())
    equal(together, total.repeat(size))
    dist.gather(given(), many if rank == 0 else None)
    every = [given() for _ in range(size)]
    equal(onto(dist.scatter, every if rank == 0 else None), total)
    one = torch.zeros(1)
    dist.reduce_scatter_tensor(one, given())
    equal(one, total[rank : rank + 1] * size)
    swapped = torch.zeros(size)
    dist.all_to_all_single(swapped, given())
    equal(swapped, total[rank].repeat(size))
    dist.all_to_all(many, [given() for _ in range(size)])
    equal(torch.stack(many), total.expand(size, size))
    outgoing = functional.all_to_all_single(mine(rank, size), None, None, dist.group.WORLD)
    incoming, left = given(), (rank - 1) % size
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, outgoing, (rank + 1) % size), dist.P2POp(dist.irecv, incoming, left)]
    )
    for work in works:
        work.wait()
    equal(incoming + 0, everyone(size, size)[:, left])


BODIES = [
    all_reduce, all_reduce_dtypes, all_reduce_coalesced, broadcast, reduce, all_gather,
    all_gather_into_tensor,
    all_gather_coalesced, gather, gather_single, scatter, reduce_scatter, reduce_scatter_tensor, all_to_all,
    all_to_all_single,
    barrier, point_to_point, batch_isend_irecv, object_collectives, coalescing_manager, methods_of_the_group,
    results_on_their_way,
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_function(body, size):
    run_torch(body, size)
