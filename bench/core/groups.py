"""Groups for measurements and the demo, made through the public functions."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as torch_dist
from torch._C import _distributed_c10d as c10d

import collectives
from collectives.store import TCPStore

__all__ = ["LOCALHOST", "TIMEOUT", "initialize", "initialize_torch", "parent_store"]

LOCALHOST = "127.0.0.1"

TIMEOUT = timedelta(seconds=60)
"""Time limit of operations, so that a broken peer ends a run with an error."""


def parent_store(host: str = LOCALHOST) -> TCPStore:
    """Returns a store that this process serves on a free port; ranks :func:`initialize` with the port.

    Args:
        host: its address, where ranks can reach it.
    """
    return TCPStore(host, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)


def initialize(rank: int, size: int, port: int, backend: str, host: str = LOCALHOST) -> None:
    """Makes the default group of a rank; called by all ranks, blocks until they are connected.

    Args:
        rank: the rank that this process is.
        size: number of ranks.
        port: of the store that the parent serves.
        backend: name of the default group's backend.
        host: where that store listens.
    """
    store = TCPStore(host, port, is_master=False, timeout=TIMEOUT)
    collectives.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def initialize_torch(rank: int, size: int, port: int, backend: str, host: str = LOCALHOST) -> None:
    """Makes the default group of ``torch.distributed``; arguments as of :func:`initialize`."""
    # Not torch's own client, which cannot prove the job's secret.
    store = c10d.PrefixStore("torch", TCPStore(host, port, is_master=False, timeout=TIMEOUT))
    torch_dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
