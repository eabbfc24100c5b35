"""Device meshes of torch over groups of this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed
from harness import run_world
from torch_world import run_torch

import collectives as dist
from collectives.backends.round_robin import RoundRobinOptions

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


def overrides(rank: int, size: int) -> None:
    """Options alone and with a backend, as records and as dicts, through torch's function as well as ours."""
    names = ("outer", "inner")
    lanes = RoundRobinOptions(lanes=2)
    ours: list[tuple[Any, int]] = [
        ({"inner": lanes}, 2), ({1: {"lanes": 4}}, 4), ({"inner": (None, {"lanes": 1})}, 1), ({}, 3),
        ({"inner": ("collectives_round_robin:4", None)}, 4),
        ({"inner": ("collectives_round_robin", {"lanes": 2, "backend": "gloo"})}, 2),
    ]  # fmt: skip
    for make, cases in (
        (dist.init_device_mesh, ours),
        (torch.distributed.init_device_mesh, [ours[0], ({1: ("collectives_round_robin", lanes)}, 2)]),
    ):
        for override, count in cases:
            given = dict(override)
            mesh = make("cpu", (2, 2), mesh_dim_names=names, backend_override=given)
            groups: list[Any] = [mesh.get_group(name) for name in names]
            assert [len(group.inner.lanes) for group in groups] == [3, count]
            tensor = torch.tensor([float(rank)])
            torch.distributed.all_reduce(tensor, group=groups[1])
            assert tensor.item() == (1.0 if rank < 2 else 5.0)
            assert make is not dist.init_device_mesh or given == override
    with pytest.raises(TypeError, match="unknown are loops; known are lanes"):
        dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override={"inner": {"loops": 2}})


def test_options_of_one_dimension() -> None:
    run_torch(overrides, 4, backend="collectives_round_robin")


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
