"""Makes the world of ``collectives.init_process_group`` known to ``torch.distributed`` as well."""

from __future__ import annotations

import torch

from collectives.api.groups import local_turn
from collectives.api.world_state import default_group, get_backend, record_of, world
from collectives.core.forwarding import group_behind
from collectives.registry.backends import backend_spec
from collectives.store import PrefixStore
from collectives.torch_bridge import register_backend
from collectives.torch_bridge.creation import GroupThatExists

__all__ = ["register_world_with_torch"]


def register_world_with_torch() -> None:
    """Makes the default group that of ``torch.distributed`` as well; called by all ranks, does not block.

    Programs that look for the ranks in ``torch.distributed`` then find them: torchmetrics, distributed
    checkpoints, samplers, device meshes. Both layers use the same group, so that their calls count as one
    sequence, and ``torch.distributed.new_group`` makes groups on the same store. A second call does nothing.

    :func:`collectives.destroy_process_group` ends both worlds; ``torch.distributed.destroy_process_group``
    ends the groups of ``torch.distributed.new_group`` and leaves this one usable. After
    :func:`collectives.shrink_group` of the default group, end torch's world in this way and call this again.

    Raises:
        ValueError: there is no default group here, or another one in ``torch.distributed``, or several
            backends other than ``host`` and ``nccl`` make it up.

    Example:
        In a script that ``torchrun`` starts::

            collectives.init_process_group("host")
            collectives.register_world_with_torch()
            assert torch.distributed.get_rank() == collectives.get_rank()
            collectives.destroy_process_group()
    """
    with world.lock:
        default = default_group()
        world.refuse_in_child("register_world_with_torch")
        if torch.distributed.is_initialized():
            if group_behind(torch.distributed.group.WORLD) is default:
                return
            raise ValueError(
                f"[rank {default.rank()}] register_world_with_torch: torch.distributed has a default group "
                f"already ({torch.distributed.get_backend()}); end that by "
                "torch.distributed.destroy_process_group() first"
            )
        torch.distributed.init_process_group(
            _name_in_torch(default.rank(), record_of(default).config.names()),
            store=PrefixStore(f"torch/{local_turn('world of torch')}", world.store),
            rank=default.rank(),
            world_size=default.size(),
            timeout=default.timeout,
            pg_options=GroupThatExists(default),
            device_id=world.device if world.device is not None and world.device.type == "cuda" else None,
        )
        world.known_to_torch = True


def _name_in_torch(rank: int, backends: list[str]) -> str:
    """Returns the name of a world's backend in torch, which then knows it, for groups made there later."""
    if set(backends) <= {"host", "nccl"}:
        return "collectives"
    if len(set(backends)) > 1:
        raise ValueError(
            f"[rank {rank}] register_world_with_torch: torch has no name for the backend {get_backend()!r}; "
            'those of one kind are taken, and "cpu:host,cuda:nccl"'
        )
    name = f"collectives_{backends[0]}"
    if not torch.distributed.is_backend_available(name):
        register_backend(name, backends[0], backend_spec(backends[0]).devices)
    return name
