"""The host backend by itself: forming a group, the paths that sizes choose, failures of peers."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_distributed
import torch.multiprocessing as multiprocessing

import collectives
from collectives.backends.host import ProcessGroupHost

TIMEOUT = timedelta(seconds=30)
# Inline, one-shot, and long messages; the last two need several chunks with an uneven end.
COUNTS = [0, 1, 22, 23, 4099, 16385, 100_003, 1_000_003]


def run(body, size, tmp_path, *args):
    """Runs ``body(group, rank, size, *args)`` in ``size`` processes."""
    multiprocessing.spawn(_main, (body, size, str(tmp_path / "store"), args), nprocs=size)


def _main(rank, body, size, path, args):
    torch.set_num_threads(1)
    store = torch_distributed.FileStore(path, size)
    group = ProcessGroupHost(store, rank, size, TIMEOUT, group_name="test")
    body(group, rank, size, *args)
    group.shutdown()


def _sums(group, rank, size):
    for asynchronous in (False, True):
        for count in COUNTS:
            tensor = torch.arange(count, dtype=torch.float32) % 1000 + rank
            group.allreduce([tensor], collectives.AllreduceOptions(asyncOp=asynchronous)).wait()
            expected = (torch.arange(count, dtype=torch.float32) % 1000) * size + size * (size - 1) / 2
            assert torch.equal(tensor, expected), count


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_on_every_path(size, tmp_path):
    run(_sums, size, tmp_path)


def _broadcasts(group, rank, size):
    for root in range(size):
        for count in COUNTS:
            tensor = torch.arange(count) * (rank + 1)
            group.broadcast([tensor], collectives.BroadcastOptions(asyncOp=False, rootRank=root))
            assert torch.equal(tensor, torch.arange(count) * (root + 1)), (root, count)
    group.barrier().wait()


@pytest.mark.parametrize("size", [2, 3])
def test_broadcast_on_every_path(size, tmp_path):
    run(_broadcasts, size, tmp_path)
