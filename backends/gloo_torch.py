"""What the gloo backend needs of torch's ProcessGroupGloo beyond its operations: options, devices, an end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed

from collectives.errors import DistBackendError
from collectives.registry import GroupOptions

__all__ = [
    "TIMED_OUT",
    "all_gather_single",
    "all_to_all_single",
    "as_bytes",
    "break_connections",
    "byte_count",
    "gloo_options",
]

TIMED_OUT = re.compile(r"timed out", re.IGNORECASE)
"""Matches Gloo's messages about a limit that passed."""

_ABORT_TAG = 2**31 - 2


def gloo_options(options: GroupOptions) -> Any:
    """Returns the options of torch's group: those that the user gave, completed.

    Raises:
        TypeError: the user gave something else.
    """
    kind: Any = torch_distributed.ProcessGroupGloo._Options  # type: ignore[attr-defined]
    given = options.pg_options
    if given is not None and not isinstance(given, kind):
        raise TypeError(
            f"[rank {options.rank}] pg_options of the gloo backend must be a "
            f"torch.distributed.ProcessGroupGloo._Options, but is {given!r} of type "
            f"{type(given).__name__}"
        )
    made = kind() if given is None else given
    made._timeout = options.timeout
    if not made._devices:
        made._devices = [_device(name) for name in _interfaces()]
    return made


def break_connections(group: Any, rank: int, size: int, contexts: int) -> None:
    """Closes the connections to all ranks; whoever waits on them, here or there, gets an error at once.

    Gloo has no call for it. But when a receive passes its time limit, Gloo closes every connection of its
    context; a receive that nobody will answer, with a limit of 1 ms, is such a call.
    """
    for context in range(contexts):
        for peer in range(size):
            if peer == rank:
                continue
            nothing = torch.empty(1, dtype=torch.uint8)
            try:
                group.recv([nothing], peer, _ABORT_TAG - context).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if TIMED_OUT.search(str(error)):
                    break


def _interfaces() -> Iterator[str | None]:
    names = os.environ.get("COLLECTIVES_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    yield from chosen or (None,)


def _device(interface: str | None) -> Any:
    kind = torch_distributed.ProcessGroupGloo
    try:
        return kind.create_default_device() if interface is None else kind.create_device(interface=interface)
    except RuntimeError as error:
        raise DistBackendError(
            f"Gloo cannot use the network interface {interface or 'of the host name'!r}: {error}; set "
            "COLLECTIVES_SOCKET_IFNAME to one that is up, such as lo on a single machine"
        ) from error


def all_gather_single(inner: Any) -> Callable[..., Any]:
    """Returns the gathering of torch's group into one tensor."""
    return _either(inner, "all_gather_single", "_allgather_base")


def all_to_all_single(inner: Any) -> Callable[..., Any]:
    """Returns the exchange of torch's group between single tensors."""
    return _either(inner, "all_to_all_single", "alltoall_base")


def _either(inner: Any, new: str, old: str) -> Callable[..., Any]:
    """Returns a method under the name of newer releases of torch, or of older ones."""
    found: Callable[..., Any] = getattr(inner, new, None) or getattr(inner, old)
    return found


def byte_count(tensor: torch.Tensor) -> int:
    """Returns the number of bytes of a dense tensor's elements."""
    packed = {torch.quint4x2: 2, torch.quint2x4: 4}.get(tensor.dtype, 1)
    return -(-tensor.numel() * tensor.element_size() // packed)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a dense tensor as a flat tensor of bytes."""
    if not tensor.is_quantized:
        # A tensor of one element or none counts as contiguous whatever its strides are.
        return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    offset = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(), offset, (byte_count(tensor),), (1,)
    )
