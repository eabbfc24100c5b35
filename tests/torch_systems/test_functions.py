"""Functions of torch.distributed that torch's own suite does not try on two ranks without GPUs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch_world import run_torch


def mine(rank, n=4, dtype=torch.float32):
    return (torch.arange(n) + 10 * rank).to(dtype)


def equal(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got, expected), f"{got} is not {expected}"


def everyone(size, n=4, dtype=torch.float32):
    return torch.stack([mine(r, n, dtype) for r in range(size)])


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


@pytest.mark.parametrize(
    "body",
    [gather_single, object_collectives, coalescing_manager, results_on_their_way],
    ids=lambda body: body.__name__,
)
def test_function(body):
    run_torch(body, 3)
