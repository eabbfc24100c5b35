"""What torch's own functions make of a group over NCCL; over the double."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from nccl_double.device import DoubleDevice
from nccl_double.groups import load, register_over_double, run_over_double

from collectives.backends.nccl import providers
from collectives.backends.nccl.libnccl import NcclError
from collectives.torch_bridge import register_backend


def seen(tensor: torch.Tensor) -> list[float]:
    """Returns the values of a tensor when the current stream has passed what it holds."""
    device = DoubleDevice.shared(tensor.device)
    device.synchronize(device.current_stream())
    values: list[float] = tensor.tolist()
    return values


def in_torchs_world(group: Any, path: Path) -> None:
    rank, size = group.rank(), group.size()
    register_over_double("over_double", path)
    register_backend("over_double", "over_double")
    store = torch_dist.PrefixStore("torch", group.get_group_store())
    torch_dist.init_process_group("over_double", store=store, rank=rank, world_size=size)
    batches(rank, size)
    bound_to_a_device(rank, size, path)
    torch_dist.destroy_process_group()


def bound_to_a_device(rank: int, size: int, path: Path) -> None:
    """A world with a ``device_id``: connected at once, and split without new connections where all take part.

    torch takes no CPU for it, so that its calls are made here.
    """
    world, double, cpu = torch_dist.group.WORLD, load(path), torch.device("cpu", 0)
    whole = torch_dist.new_group()  # nothing of which is connected
    for group in (world, whole):
        before = double.communicators()
        assert group._get_backend(cpu).supports_splitting  # torch's condition
        group._get_backend(cpu).eager_connect_single_device(cpu)
        assert group.bound_device_id == cpu
        assert double.communicators() == before + 1
        total = torch.ones(2)
        torch_dist.all_reduce(total, group=group)
        assert seen(total) == [float(size)] * 2
        assert double.communicators() == before + 1

    # new_group asks for what it hands to torch's own backends, and for who else has to call
    assert torch_dist.distributed_c10d._get_split_source(world, "over_double") is None

    double.fail_next("ncclCommInitRankConfig", 3, "not split, but made")
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=cpu),
    ):
        half = torch_dist.split_group(split_ranks=halves, group_desc="a half")
        alone = torch_dist.split_group(split_ranks=[[size - 1]])
    members = halves[rank >= size // 2]
    assert (half.rank(), half.size(), half.group_desc) == (members.index(rank), len(members), "a half")
    assert half.bound_device_id == cpu
    total = torch.full((2,), float(rank))
    torch_dist.all_reduce(total, group=half)
    assert seen(total) == [float(sum(members))] * 2
    assert (alone is None) is (rank != size - 1)
    library = providers.load("cupy")
    with pytest.raises(NcclError, match="not split, but made"):  # what was ordered, and has not been used
        library.init(library.unique_id(), 1, 0)
    with pytest.raises(ValueError, match="must be different ones from 0 to"):
        world.split_group([0, size])


def batches(rank: int, size: int) -> None:
    """Messages around a ring start together, so that none waits for the connection of another."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for turn in range(2):
        x, got = torch.full((3,), float(rank + turn)), torch.empty(3)
        batch = [
            torch_dist.P2POp(torch_dist.isend, x, after),
            torch_dist.P2POp(torch_dist.irecv, got, before),
        ]
        (work,) = torch_dist.batch_isend_irecv(batch)
        work.wait()
        assert seen(got) == [float(before + turn)] * 3
    pairs = torch_dist.new_group(backend="over_double")
    got = torch.empty(3)
    _, received = torch.ops._c10d_functional.batch_p2p_ops(
        ["isend", "irecv"], [after, before], [0, 0], [x, got], pairs.group_name
    )
    torch.ops._c10d_functional.wait_tensor(received)
    assert seen(got) == [float(before + 1)] * 3
    with pytest.raises(ValueError, match="isend and irecv"):
        torch.ops._c10d_functional.batch_p2p_ops(["allreduce"], [after], [0], [x], pairs.group_name)
    for wrong in (None, [torch_dist.isend]):
        with pytest.raises(ValueError, match="Invalid ``p2p_op_list``"):
            torch_dist.batch_isend_irecv(wrong)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "size", [2, 3, 4, pytest.param(8, marks=pytest.mark.full)], ids=lambda size: f"{size}ranks"
)
def test_functions_of_torch(nccl_library: Path, size: int) -> None:
    run_over_double(in_torchs_world, size, nccl_library, nccl_library, on_device=False, timeout=100)
