"""The functions of torch.distributed, each called once, for tests of what watches them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def every_function(rank, size):
    """Every function of torch.distributed once; returns what it wrote."""
    one, two = torch.full((2,), rank + 1.0), torch.full((2,), rank + 1.0)
    rows, columns = [torch.zeros(2) for _ in range(size)], [torch.zeros(2) for _ in range(size)]
    parts = [torch.full((2,), 10.0 * rank + r) for r in range(size)]
    flat, mine, piece, total = torch.zeros(2 * size), torch.zeros(2), torch.zeros(2), torch.zeros(2)
    dist.all_reduce(one, op=dist.ReduceOp.MAX)
    dist.all_reduce(total, async_op=True).wait()
    dist.broadcast(two, 1)
    dist.reduce(total, 1)
    dist.all_gather(rows, torch.full((2,), float(rank)))
    dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)))
    dist.gather(torch.full((2,), float(rank)), columns if rank == 0 else None)
    dist.scatter(mine, parts if rank == 1 else None, src=1)
    dist.reduce_scatter(piece, parts)
    summed, turned, split = torch.zeros(2), torch.zeros(2 * size), torch.zeros(2 * size)
    dist.reduce_scatter_tensor(summed, torch.cat(parts))
    dist.all_to_all_single(turned, torch.cat(parts))
    dist.all_to_all_single(split, torch.cat(parts), [2] * size, [2] * size)
    dist.barrier()
    passed = torch.zeros(2)
    if rank == 0:
        dist.send(one, 1, tag=3)
    elif rank == 1:
        dist.recv(passed, 0, tag=3)
        assert dist.isend(one, 0).wait()
    if rank == 0:
        assert dist.recv(passed) == 1
    return [one, two, total, *rows, flat, *columns, mine, piece, summed, turned, split, passed]
