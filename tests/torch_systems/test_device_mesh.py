"""Device meshes of torch over our groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from bridge.torch_world import BACKEND, run_torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from collectives.backends.round_robin import RoundRobinOptions


def gathered(rank, group):
    found = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, torch.tensor([rank]), group=group)
    return [int(one) for one in found]


def dimensions(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    row, column = divmod(rank, 2)
    assert tuple(mesh.get_coordinate()) == (row, column)
    assert mesh.get_rank() == rank
    assert (mesh.get_local_rank("outer"), mesh.get_local_rank("inner")) == (row, column)
    assert gathered(rank, mesh.get_group("outer")) == [column, column + 2]
    assert gathered(rank, mesh.get_group(1)) == [2 * row, 2 * row + 1]
    assert [gathered(rank, group) for group in mesh.get_all_groups()] == [
        [column, column + 2], [2 * row, 2 * row + 1],
    ]  # fmt: skip
    assert mesh["inner"].get_group() is mesh.get_group("inner")
    assert gathered(rank, mesh._flatten("all").get_group()) == [0, 1, 2, 3]
    names = {group.group_name for group in mesh.get_all_groups()}
    assert len(names) == 2
    assert all(dist.get_backend(group) == BACKEND for group in mesh.get_all_groups())
    with mesh:  # must not need anything from the groups
        pass


def part_of_the_ranks(rank, size):
    mesh = DeviceMesh("cpu", [3, 1])
    if rank in (0, 2):
        assert mesh.get_coordinate() is None
    else:
        assert tuple(mesh.get_coordinate()) == ((3, 1).index(rank),)
        assert sorted(gathered(rank, mesh.get_group())) == [1, 3]


def of_groups(rank, size):
    line = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    assert gathered(rank, line.get_group()) == [0, 1, 2, 3]
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = [columns[rank % 2], rows[rank // 2]]
    mesh = DeviceMesh.from_group(mine, "cpu", [[0, 1], [2, 3]], mesh_dim_names=("outer", "inner"))
    assert tuple(mesh.get_coordinate()) == divmod(rank, 2)
    assert mesh.get_group("inner") is mine[1]
    assert gathered(rank, mesh.get_group("outer")) == [rank % 2, rank % 2 + 2]


def backend_of_each_dimension(rank, size):
    mesh = init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("outer", "inner"),
        backend_override={"outer": ("collectives_round_robin", RoundRobinOptions(lanes=3)), 1: "gloo"},
    )
    row, column = divmod(rank, 2)
    assert dist.get_backend(mesh.get_group("outer")) == "collectives_round_robin"
    assert dist.get_backend(mesh.get_group("inner")) == "gloo"
    assert len(mesh.get_group("outer").inner.lanes) == 3
    assert gathered(rank, mesh.get_group("outer")) == [column, column + 2]
    assert gathered(rank, mesh.get_group("inner")) == [2 * row, 2 * row + 1]


def test_dimensions():
    run_torch(dimensions, 4)


def test_part_of_the_ranks():
    run_torch(part_of_the_ranks, 4)


def test_of_groups():
    run_torch(of_groups, 4)


def test_backend_of_each_dimension():
    run_torch(backend_of_each_dimension, 4)
