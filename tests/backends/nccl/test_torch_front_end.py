"""What torch's own functions make of a group over NCCL; over the double."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from nccl_double.device import DoubleDevice
from nccl_double.groups import make_group, run_over_double

from collectives.registry.backends import BackendSpec, register_backend_spec
from collectives.torch_bridge import register_backend


def seen(tensor: torch.Tensor) -> list[float]:
    """Returns the values of a tensor when the current stream has passed what it holds."""
    device = DoubleDevice.shared(tensor.device)
    device.synchronize(device.current_stream())
    values: list[float] = tensor.tolist()
    return values


def in_torchs_world(group: Any, path: Path) -> None:
    rank, size = group.rank(), group.size()

    def create(options: Any) -> Any:
        about = {"timeout": options.timeout, "group_name": options.group_name}
        return make_group(path, "cupy", options.rank, options.size, options.store, **about)

    register_backend_spec(BackendSpec("over_double", ("cpu",), create))
    register_backend("over_double", "over_double")
    store = torch_dist.PrefixStore("torch", group.get_group_store())
    torch_dist.init_process_group("over_double", store=store, rank=rank, world_size=size)
    batches(rank, size)
    torch_dist.destroy_process_group()


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


@pytest.mark.parametrize("size", [2, 3, 4], ids=lambda size: f"{size}ranks")
def test_functions_of_torch(nccl_library: Path, size: int) -> None:
    run_over_double(in_torchs_world, size, nccl_library, nccl_library, on_device=False, timeout=100)
