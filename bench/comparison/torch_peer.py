"""Groups of ``torch.distributed`` as peers: ``torch:NAME`` is torch's functions on its backend NAME."""

from __future__ import annotations

import torch
import torch.distributed as torch_dist

from collectives.bench.comparison.operations import Operation
from collectives.bench.comparison.peers import Bind, function_peer
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.groups import TIMEOUT

__all__ = ["NCCL", "PREFIX", "close", "nccl_version", "open_peer", "why_not", "why_unavailable"]

PREFIX = "torch:"
"""What the names of such peers begin with."""

NCCL = f"{PREFIX}nccl"
"""The peer for tensors on CUDA devices."""


def why_unavailable(name: str, device: str = "cpu") -> str | None:
    """Returns why a peer cannot be used here, ``None`` where torch has its backend.

    Args:
        name: name of the peer.
        device: type of the device that the tensors are on.
    """
    backend = name.removeprefix(PREFIX)
    if not torch_dist.is_available():
        return "this torch has no torch.distributed"
    if backend not in torch_dist.Backend.backend_list or not torch_dist.is_backend_available(backend):
        return f"torch.distributed has no backend {backend!r} here"
    if device not in torch_dist.Backend.backend_capability[backend]:
        return f"serves no tensors on {'the CPU' if device == 'cpu' else device}"
    return None


def nccl_version() -> str:
    """Returns the versions of torch's NCCL and of torch in words."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return f"NCCL {'.'.join(map(str, version))} by way of torch {torch.__version__}"


def open_peer(name: str, redop: str) -> Bind:
    """Returns a peer with a group of its own; called by all ranks.

    Args:
        name: name of the peer.
        redop: name of the reduction of operations that reduce.
    """
    group = torch_dist.new_group(backend=name.removeprefix(PREFIX), timeout=TIMEOUT)
    op = getattr(torch_dist.ReduceOp, redop.upper())
    return function_peer(torch_dist, group, op)


def why_not(peer: Bind, operation: Operation, dtype: torch.dtype, device: str = "cpu") -> str | None:
    """Returns why a peer cannot do an operation, ``None`` where it can; tries it, so all ranks call it.

    Raises:
        torch.distributed.DistBackendError: NCCL failed; that is no refusal.
    """
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    given = torch.zeros(operation.input_count(size, rank, size), dtype=dtype, device=device)
    result = given
    if not operation.in_place:
        result = torch.zeros(operation.output_count(size, rank, size), dtype=dtype, device=device)
    try:
        DEVICES[device].completing(peer(operation, given, result))()
    except torch_dist.DistBackendError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error).split("\n")[0]
    return None


def close() -> None:
    """Ends all groups of torch."""
    torch_dist.destroy_process_group()
