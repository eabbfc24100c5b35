"""``init_device_mesh``: torch's device meshes over groups of this package."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from collectives.core.forwarding import group_behind

__all__ = ["DeviceMesh", "init_device_mesh"]


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: dict[Any, Any] | None = None,
) -> DeviceMesh:
    """Makes torch's mesh over the world of ``torch.distributed``; called by all ranks, and blocks for them.

    A mesh looks its groups up in ``torch.distributed``. So the program begins with
    ``torch.distributed.init_process_group("collectives")``, or tells torch of its world by
    :func:`collectives.register_world_with_torch`; the functions of this package take the groups of that
    world, too.

    Args:
        device_type: type of the devices, such as ``"cpu"``.
        mesh_shape: number of ranks along each dimension; the same on all ranks, as are the others.
        mesh_dim_names: names of the dimensions.
        backend_override: by dimension, or its name: the backend of its groups, their options, or both.

    Returns:
        The mesh.

    Raises:
        ValueError: the default group of ``torch.distributed`` is none of this package.
    """
    if not torch.distributed.is_initialized():
        _refuse("which is not initialised", "first, or collectives.register_world_with_torch()")
    if group_behind(torch.distributed.group.WORLD) is None:
        _refuse(f"which was initialised with {torch.distributed.get_backend()!r}", "instead")
    return device_mesh.init_device_mesh(
        device_type, mesh_shape, mesh_dim_names=mesh_dim_names, backend_override=backend_override
    )


def _refuse(state: str, when: str) -> NoReturn:
    raise ValueError(
        f"device meshes run on the world of torch.distributed, {state}: call "
        f'torch.distributed.init_process_group("collectives") {when}'
    )
