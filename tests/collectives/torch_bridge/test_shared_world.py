"""register_world_with_torch: the world of this package is that of torch.distributed, too."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch
import torch.distributed as torch_dist
from harness import run_world
from torch.utils.data import DistributedSampler

import collectives as dist


def total(functions, group=None):
    tensor = torch.ones(3)
    functions.all_reduce(tensor, group=group)
    return int(tensor[0])


def both_layers(rank, size):
    dist.register_world_with_torch()
    dist.register_world_with_torch()
    assert (torch_dist.get_rank(), torch_dist.get_world_size()) == (rank, size)
    assert total(dist) == total(torch_dist) == size
    assert torch_dist.group.WORLD.inner is dist.group.WORLD
    pair = torch_dist.new_group([0, 2])
    ours = dist.new_group([0, 2])
    if rank != 1:
        assert total(torch_dist, pair) == total(dist, pair) == total(dist, ours) == 2
    parts = torch_dist.group.WORLD.split_group([0, 1] if rank < 2 else [2])
    assert total(torch_dist, parts) == (2 if rank < 2 else 1)
    mesh = dist.init_device_mesh("cpu", (size,))
    assert total(dist, mesh.get_group()) == size
    assert list(DistributedSampler(range(6), shuffle=False)) == [rank, rank + 3]
    dist.destroy_process_group()
    assert not torch_dist.is_initialized()


@pytest.mark.parametrize("backend", ["host", "round_robin"])
def test_both_layers_use_one_world(backend) -> None:
    run_world(both_layers, 3, backend=backend)


def again(rank, size):
    for _ in range(2):
        dist.register_world_with_torch()
        assert total(torch_dist, torch_dist.new_group([0, 1])) == 2
        torch_dist.destroy_process_group()
        assert total(dist) == size


def test_the_end_of_torchs_world_leaves_ours() -> None:
    run_world(again, 2)


def shrunk(rank, size):
    dist.register_world_with_torch()
    if rank == 1:
        return
    dist.shrink_group([1])
    with pytest.raises(dist.GroupAbortedError):
        total(torch_dist)
    torch_dist.destroy_process_group()
    dist.register_world_with_torch()
    assert torch_dist.get_world_size() == total(torch_dist) == 2


def test_a_smaller_world_is_registered_again() -> None:
    run_world(shrunk, 3, isolated=True)


def saved(rank, size, folder):
    from torch.distributed import checkpoint  # takes seconds to load

    dist.register_world_with_torch()
    state = {"mine": torch.full((2,), float(rank))} if rank else {"first": torch.ones(2)}
    checkpoint.save(state, checkpoint_id=folder)
    keys = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert set(keys) == {"first", "mine"}, "one rank's checkpoint took the place of the other's"


def test_distributed_checkpoints_hold_the_tensors_of_all_ranks(tmp_path) -> None:
    run_world(saved, 2, str(tmp_path))


def refusals(rank, size, path):
    torch_dist.init_process_group("gloo", store=torch_dist.FileStore(path, size), rank=rank, world_size=size)
    with pytest.raises(ValueError, match=r"has a default group already \(gloo\)"):
        dist.register_world_with_torch()
    dist.barrier()  # torch's own returns while others still connect
    torch_dist.destroy_process_group()


def test_another_world_of_torchs_is_refused(tmp_path) -> None:
    run_world(refusals, 2, str(tmp_path / "store"))
    with pytest.raises(ValueError, match="there is no default process group"):
        dist.register_world_with_torch()


def ends(rank, size, registers):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("collectives")
    logger.addHandler(handler)
    if registers:
        dist.register_world_with_torch()
        torch_dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchmetrics", types.ModuleType("torchmetrics"))
        dist.destroy_process_group()
    logger.removeHandler(handler)
    return [line for line in lines if "torchmetrics looks for ranks" in line]


@pytest.mark.parametrize("registers", [True, False])
def test_what_did_not_find_the_world_is_named_at_its_end(registers) -> None:
    first, second = run_world(ends, 2, registers)
    assert not second
    assert bool(first) is not registers
    assert all("call collectives.register_world_with_torch()" in line for line in first)
