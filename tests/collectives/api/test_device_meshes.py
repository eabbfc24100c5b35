"""Device meshes of torch over groups of this package."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
from harness import run_world
from torch_world import run_torch

import collectives as dist

WAY_OUT = r'call torch.distributed.init_process_group\("collectives"\)'


def meshes(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    assert isinstance(mesh, dist.DeviceMesh)
    assert [mesh.get_local_rank("outer"), mesh.get_local_rank("inner")] == [rank // 2, rank % 2]
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mesh.get_group("inner"))  # type: ignore[arg-type]
    assert tensor.item() == (1.0 if rank < 2 else 5.0)


def test_groups_of_a_mesh_are_groups_of_ours() -> None:
    run_torch(meshes, 4)


def in_the_world_of_gloo(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"initialised with 'gloo': {WAY_OUT} instead"):
        dist.init_device_mesh("cpu", (2,))


def test_a_world_of_torchs_own_is_refused() -> None:
    run_torch(in_the_world_of_gloo, 2, backend="gloo")


def without_torchs_world(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"is not initialised: {WAY_OUT} first"):
        dist.init_device_mesh("cpu", (2,))


def test_our_world_alone_says_what_a_mesh_needs() -> None:
    run_world(without_torchs_world, 2)
