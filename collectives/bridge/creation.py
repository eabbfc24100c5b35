"""Makes the groups that torch asks for."""

from __future__ import annotations

from typing import Any

from collectives.bridge import kernels, torch_backend
from collectives.bridge.torch_group import TorchGroup
from collectives.registry import GroupOptions, create_group

__all__ = ["create"]


def create(name: str, backend: str, options: Any, pg_options: Any) -> TorchGroup:
    """Returns a group for torch; called by all its members.

    A ``ProcessGroup`` of Python serves Python callers without a way through C++. What C++ looks up beside it
    is a ``Backend`` of Python where torch lets us make one, and our kernels where not.

    Args:
        name: name of the backend in torch.
        backend: its name in the registry.
        options: torch's record of store, rank, size, time limit and names.
        pg_options: options of the backend itself.
    """
    size = options.group_size
    inner = create_group(
        backend,
        GroupOptions(
            store=options.store,
            rank=options.group_rank,
            size=size,
            timeout=options.timeout,
            group_name=options.group_id,
            global_ranks=tuple(options.global_ranks_in_group) or tuple(range(size)),
            pg_options=pg_options,
        ),
    )
    if torch_backend.can_be_made():
        group = TorchGroup(inner, name, options.group_id)
        torch_backend.attach(group)
        return group
    kernels.acquire()
    return TorchGroup(inner, name, options.group_id, ended=kernels.release)
