"""Functions of torch.distributed beside the collectives that ours share, and forms that only torch has."""

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


def all_gather_coalesced(rank, size):
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    with pytest.warns(FutureWarning):
        dist.all_gather_coalesced(outputs, [mine(rank, 2), mine(rank, 3)])
    for r, (two, three) in enumerate(outputs):
        equal(two, mine(r, 2))
        equal(three, mine(r, 3))


def gather_single(rank, size):
    """A function of newer versions of torch; the method is there for all."""
    group = dist.group.WORLD
    group.gather_single(output := torch.zeros(4 * size), mine(rank)).wait()
    assert output.tolist() == (everyone(size).flatten().tolist() if rank == 0 else [0.0] * 4 * size)
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
    """The forms that users call on the group itself take torch's arguments and options."""
    group = dist.group.WORLD
    for arguments, options, expected in (
        ((), {}, size * (size + 1) / 2),
        ((dist.ReduceOp.MAX,), {}, size),
        ((), {"op": dist.ReduceOp.MIN, "timeout": timedelta(seconds=20)}, 1),
    ):
        for lay in (lambda tensor: tensor, lambda tensor: [tensor]):
            tensor = torch.full((2,), rank + 1.0)
            group.allreduce(lay(tensor), *arguments, **options).wait(timedelta(seconds=20))
            equal(tensor, torch.full((2,), float(expected)))
    parts = [torch.zeros(2) for _ in range(size)]
    group.allgather(output_tensors=parts, input_tensor=torch.full((2,), rank + 1.0)).wait()
    assert [part[0].item() for part in parts] == [r + 1 for r in range(size)]
    output = torch.zeros(1)
    group._reduce_scatter_base(output, torch.arange(size) * 1.0, dist.ReduceScatterOptions()).wait()
    equal(output, torch.full((1,), rank * size * 1.0))
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
    all_gather_coalesced, gather_single, barrier, point_to_point, batch_isend_irecv, object_collectives,
    coalescing_manager, methods_of_the_group, results_on_their_way,
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_function(body, size):
    run_torch(body, size)
