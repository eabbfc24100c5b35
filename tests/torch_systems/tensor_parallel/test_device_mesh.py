"""Device meshes of torch over our groups."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import current_store, run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch_world import BACKEND, run_torch

from collectives.backends.round_robin import RoundRobinOptions
from collectives.store import TCPStore


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


def forms_of_overrides(rank, size):
    """A name, options, or both, by the index of a dimension or its name; nothing else."""
    lanes = RoundRobinOptions(lanes=2)
    names = ("outer", "inner")
    for override, expected in (
        ({0: "collectives_round_robin:4"}, [("collectives_round_robin:4", 4), (BACKEND, None)]),
        ({"inner": ("collectives_round_robin", lanes)}, [(BACKEND, None), ("collectives_round_robin", 2)]),
        ({0: ("gloo", dist.ProcessGroupGloo._Options()), "inner": "gloo"}, [("gloo", None)] * 2),
    ):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=override)
        for group, (backend, count) in zip(mesh.get_all_groups(), expected, strict=True):
            assert dist.get_backend(group) == backend
            assert count is None or len(group.inner.lanes) == count
        row, column = divmod(rank, 2)
        assert gathered(rank, mesh.get_group("outer")) == [column, column + 2]
        assert gathered(rank, mesh.get_group("inner")) == [2 * row, 2 * row + 1]
    with pytest.raises(TypeError, match="host backend has no pg_options"):  # options alone, of another one
        init_device_mesh("cpu", (4,), backend_override={0: lanes})
    for override, complaint in (
        ({0: "gloo", "outer": "gloo"}, "redundant dim index 0"),
        ({"middle": "gloo"}, "invalid keys"),
        ({2: "gloo"}, "invalid keys"),
    ):
        with pytest.raises(RuntimeError, match=complaint):
            init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=override)
    with pytest.raises(TypeError, match="_Options"):  # options of another backend than the world's
        init_device_mesh("cpu", (2, 2), backend_override={1: dist.ProcessGroupGloo._Options()})


def refusals(rank, size):
    """What a mesh cannot be is told before anything is communicated."""
    for arguments, complaint in (
        ({"mesh_shape": (2, 4)}, "bigger than default world size"),
        ({"mesh_shape": (2, 2), "mesh_dim_names": ("one",)}, "same length"),
        ({"mesh_shape": (2, 2), "mesh_dim_names": ("one", "one")}, "unique"),
        ({"mesh_shape": (4,), "device_type": "cpu:0"}, "Device type with index"),
    ):
        with pytest.raises(RuntimeError, match=complaint):
            init_device_mesh(**{"device_type": "cpu", **arguments})
    mesh = init_device_mesh("cpu", (4,))
    assert mesh.get_group() is dist.group.WORLD  # no other group where the world is one already
    assert gathered(rank, mesh.get_group()) == [0, 1, 2, 3]


def without_a_world(rank, size):
    """A mesh initialises the world from the environment; its dimensions can be on our backends."""
    where = current_store()
    if rank == 0:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where.set("without_a_world", str(server.port))
    port = where.get("without_a_world").decode()
    found = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    with mock.patch.dict(os.environ, found):
        assert not dist.is_initialized()
        mesh = init_device_mesh("cpu", (2, 2), backend_override={0: BACKEND, 1: "collectives_round_robin"})
    try:
        assert dist.is_initialized()
        backends = [dist.get_backend(group) for group in mesh.get_all_groups()]
        assert backends == [BACKEND, "collectives_round_robin"]
        row, column = divmod(rank, 2)
        assert gathered(rank, mesh.get_group(0)) == [column, column + 2]
        assert gathered(rank, mesh.get_group(1)) == [2 * row, 2 * row + 1]
        dist.barrier()
    finally:
        dist.destroy_process_group()
        where.add("left", 1)
        if rank == 0:
            while where.add("left", 0) < size:  # the server goes last
                time.sleep(0.001)
            server.close()


def test_forms_of_overrides():
    run_torch(forms_of_overrides, 4)


def test_refusals():
    run_torch(refusals, 4)


def test_without_a_world():
    run_ranks(without_a_world, 4)


def test_dimensions():
    run_torch(dimensions, 4)


def test_part_of_the_ranks():
    run_torch(part_of_the_ranks, 4)


def test_of_groups():
    run_torch(of_groups, 4)


def test_backend_of_each_dimension():
    run_torch(backend_of_each_dimension, 4)
