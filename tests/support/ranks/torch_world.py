"""Runs test bodies on ranks whose torch.distributed is initialised on the backend under test."""

from __future__ import annotations

import os

import torch.distributed as dist
from folders import Folder
from harness import run_ranks

from collectives.torch_bridge import register_backend

BACKEND = os.environ.get("COLLECTIVES_TEST_TORCH_BACKEND", "collectives")
"""Name in torch of the backend under test."""

register_backend("collectives_gloo", "gloo")

_torchs: list[dist.ProcessGroup] = []
"""Groups of torch's Gloo, for the life of the process: one whose last reference a callback on its own thread
drops, after ``destroy_process_group``, joins that thread from itself, and the process is aborted."""


def run_torch(body, size=2, *args, backend=BACKEND, init=None, **options):
    """Runs ``body(rank, size, *args)`` with the default group of torch; returns the results by rank.

    Args:
        body: a module-level function.
        size: number of ranks.
        *args: further arguments.
        backend: name in torch.
        init: further arguments of ``init_process_group``.
        **options: as for :func:`harness.run_ranks`.
    """
    # a file, because torch's TCPStore looks the name of every peer's address up, which can take seconds
    with Folder("torch") as folder:
        return run_ranks(_in_world, size, body, args, f"{folder}/store", backend, init or {}, **options)


def _in_world(rank, size, body, args, path, backend, init):
    store = dist.FileStore(path, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **init)
    if backend == "gloo":
        _torchs.append(dist.group.WORLD)
        # torch's own returns once this rank is connected; one that leaves now fails those that are not
        store.set(f"connected/{rank}", b"")
        store.wait([f"connected/{one}" for one in range(size)])
    try:
        return body(rank, size, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
