"""What the gloo backend needs of torch's ProcessGroupGloo beyond its operations: options, devices, an end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed

from collectives.backends.gloo.failures import TIMED_OUT
from collectives.core.dtypes import native_count
from collectives.errors import DistBackendError
from collectives.registry.backends import GroupOptions, refuse_unknown_options

__all__ = [
    "TorchGroup",
    "agree_on_devices",
    "all_gather_single",
    "all_to_all_single",
    "as_bytes",
    "break_connections",
    "byte_count",
    "connects_on_demand",
    "gloo_options",
    "option_names",
]

_ABORT_TAG = 2**31 - 2

_CONNECTING_SECONDS = 1.0
"""How long an end waits for connections that are made only to be closed."""


def option_names() -> tuple[str, ...]:
    """Returns the names of the options, which are those of torch."""
    return ("_threads", "_devices")


def gloo_options(options: GroupOptions) -> Any:
    """Returns the options of torch's group: those that the user gave, completed.

    Raises:
        TypeError: the user gave something else.
    """
    kind: Any = torch_distributed.ProcessGroupGloo._Options  # type: ignore[attr-defined]
    given = options.pg_options
    if isinstance(given, Mapping):
        where = f"[rank {options.rank}] pg_options of the gloo backend:"
        refuse_unknown_options(given, option_names(), where)
        given = _from_fields(kind(), given, where)
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


def _from_fields(record: Any, given: Mapping[str, Any], where: str) -> Any:
    """Returns torch's record with some of its fields set."""
    name = ""
    try:
        for name in given:
            setattr(record, name, given[name])
    except TypeError as error:
        raise TypeError(f"{where} {name} cannot be {given[name]!r}: {error}") from error
    return record


def agree_on_devices(options: GroupOptions, count: int) -> None:
    """Raises on every rank where they would connect in different ways; called by all of them, and waits.

    Gloo would wait for the connections that the others do not make.

    Args:
        options: what the group is made of.
        count: number of devices of this rank.

    Raises:
        RuntimeError: a rank did not come.
        DistBackendError: the ranks differ.
    """
    store: Any = torch_distributed.PrefixStore("devices", options.store)  # type: ignore[attr-defined]
    store.set(str(options.rank), f"{count}{' on demand' if connects_on_demand() else ''}")
    ranks = [str(rank) for rank in range(options.size)]
    store.wait(ranks, options.timeout)
    told = [store.get(rank).decode() for rank in ranks]
    for rank, other in enumerate(told):
        if other != told[0]:
            raise DistBackendError(
                f"[rank {options.rank}] gloo group {options.group_name!r}: all ranks must use the same "
                "number of network interfaces and connect at the same time, but rank 0 has "
                f"{_said(told[0])}, and rank {rank} {_said(other)}; set COLLECTIVES_SOCKET_IFNAME (or "
                "GLOO_SOCKET_IFNAME) to as many names, and TORCH_GLOO_LAZY_INIT to the same "
                "value, on every rank"
            )


def _said(told: str) -> str:
    count, _, when = told.partition(" ")
    plural = "" if count == "1" else "s"
    return f"{count} interface{plural}, connected {when or 'at once'}"


class TorchGroup:
    """Holds torch's group, and sees to it that none of its own threads is the one that ends it.

    Its end waits for its threads. One of them may run a callback that aborts the group, or be the last to
    let go of it.

    Args:
        inner: torch's group.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def release(self) -> None:
        """Lets go of torch's group, which ends when its threads have run what is queued.

        Blocks until then, unless the calling thread is none of Python's, as Gloo's are.
        """
        held = [self.inner]
        self.inner = None
        if held[0] is None or not isinstance(threading.current_thread(), threading._DummyThread):
            held.clear()
            return
        with contextlib.suppress(RuntimeError):  # at the interpreter's end no thread begins
            threading.Thread(target=held.clear, name="gloo end", daemon=True).start()
            return
        _never_ended.append(held)

    def leave(self) -> None:
        """Forgets torch's group in a forked child; its end would wait for threads that are the parent's."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.inner))
        self.inner = None

    def __del__(self) -> None:
        self.release()


_never_ended: list[object] = []
"""Groups of torch that only their own threads could have ended."""


def break_connections(group: Any, rank: int, size: int, contexts: int) -> None:
    """Closes the connections to all ranks; whoever waits on them, here or there, gets an error at once.

    Gloo has no call for it. But when a receive passes its time limit, Gloo closes every connection of its
    context; a receive that nobody will answer, with a limit of 1 ms, is such a call.

    Where connections are made on demand, Gloo makes each within that receive, and blocks until the other rank
    takes part: one thread for each does so, here for a moment, and goes on to close what a rank may connect
    that has not been waiting yet.
    """
    peers = [peer for peer in range(size) if peer != rank]
    if not connects_on_demand():
        for context in range(contexts):
            any(_close(group, peer, _ABORT_TAG - context) for peer in peers)
        return
    threads = [
        threading.Thread(target=_close, args=(group, peer, _ABORT_TAG - context), daemon=True)
        for context in range(contexts)
        for peer in peers
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _CONNECTING_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _close(group: Any, peer: int, tag: int) -> bool:
    """Lets a receive pass its limit; returns whether it did, and thereby closed a context."""
    nothing = torch.empty(1, dtype=torch.uint8)
    try:
        group.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        return TIMED_OUT.search(str(error)) is not None
    return False


def connects_on_demand() -> bool:
    """Returns whether ``TORCH_GLOO_LAZY_INIT`` asks to connect two ranks only when they first need it."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").strip().lower() in {"1", "t", "true", "y", "yes"}


def _interfaces() -> Iterator[str | None]:
    names = os.environ.get("COLLECTIVES_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    yield from chosen or (None,)


def _device(interface: str | None) -> Any:
    kind = torch_distributed.ProcessGroupGloo
    try:
        if interface is None:
            return kind.create_default_device(lazy_init=connects_on_demand())
        return kind.create_device(interface=interface, lazy_init=connects_on_demand())
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
    return native_count(tensor) * tensor.element_size()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a dense tensor as a flat tensor of bytes."""
    if not tensor.is_quantized:
        # A tensor of one element or none counts as contiguous whatever its strides are.
        return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    offset = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(), offset, (byte_count(tensor),), (1,)
    )
