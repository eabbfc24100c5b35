"""Groups for measurements and the demo, made through the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist
from torch._C import _distributed_c10d as c10d

import collectives
from collectives.registry.backends import BackendSpec, backend_spec
from collectives.store import TCPStore

__all__ = [
    "LOCALHOST",
    "TIMEOUT",
    "initialize",
    "initialize_torch",
    "lane_of",
    "new_group",
    "parent_store",
    "split_lanes",
]

LOCALHOST = "127.0.0.1"

TIMEOUT = timedelta(seconds=60)
"""Time limit of operations, so that a broken peer ends a run with an error."""


def parent_store(host: str = LOCALHOST) -> TCPStore:
    """Returns a store that this process serves on a free port; ranks :func:`initialize` with the port.

    Args:
        host: its address, where ranks can reach it.
    """
    return TCPStore(host, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)


def split_lanes(name: str) -> tuple[str, dict[str, Any] | None]:
    """Returns the backend of a name, and the options that the name stands for.

    Args:
        name: of a backend, or ``round_robin:LANES`` or ``round_robin:LANES:BACKEND``.

    Raises:
        ValueError: the name has another form, or no such backend is known.
    """
    head, *rest = name.split(":")
    spec = backend_spec(head)
    if not rest:
        return spec.name, None
    if spec.name != "round_robin" or len(rest) > 2 or not rest[0].isdecimal() or int(rest[0]) < 1:
        raise ValueError(
            f"{name!r} names no backend; lanes and their backend are named round_robin:LANES or "
            "round_robin:LANES:BACKEND, such as round_robin:3:gloo"
        )
    lane = backend_spec(rest[1]).name if len(rest) == 2 else "host"
    return spec.name, {"lanes": int(rest[0]), "backend": lane}


def lane_of(name: str) -> BackendSpec:
    """Returns the backend that a name's tensors go through: that of the lanes, where it has some."""
    backend, options = split_lanes(name)
    return backend_spec(backend if options is None else options["backend"])


def new_group(name: str, ranks: Sequence[int]) -> Any:
    """Returns a group of some ranks; called by all ranks of the default group.

    Args:
        name: of a backend, as of :func:`split_lanes`.
        ranks: the members.
    """
    backend, options = split_lanes(name)
    return collectives.new_group(ranks, timeout=TIMEOUT, backend=backend, pg_options=options)


def initialize(rank: int, size: int, port: int, backend: str, host: str = LOCALHOST) -> None:
    """Makes the default group of a rank; called by all ranks, blocks until they are connected.

    Args:
        rank: the rank that this process is.
        size: number of ranks.
        port: of the store that the parent serves.
        backend: name of the default group's backend, as of :func:`split_lanes`.
        host: where that store listens.
    """
    store = TCPStore(host, port, is_master=False, timeout=TIMEOUT)
    name, options = split_lanes(backend)
    collectives.init_process_group(
        name, store=store, rank=rank, world_size=size, timeout=TIMEOUT, pg_options=options
    )


def initialize_torch(rank: int, size: int, port: int, backend: str, host: str = LOCALHOST) -> None:
    """Makes the default group of ``torch.distributed``; arguments as of :func:`initialize`."""
    # Not torch's own client, which cannot prove the job's secret.
    store = c10d.PrefixStore("torch", TCPStore(host, port, is_master=False, timeout=TIMEOUT))
    torch_dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
