"""NCCL groups on tensors of the CPU, over the double."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from harness import current_store, run_ranks

from collectives.registry.backends import GroupOptions
from nccl_double import NcclDouble, cuda
from nccl_double.device import DoubleDevice, tensors_on_device, use, watch_as_one

SEED_VARIABLE = "COLLECTIVES_TEST_STREAMS_SEED"
"""Environment variable with the seed by which streams are held."""

SEEDS = (1, 2, 3)
"""Those of the full tier."""

_doubles: dict[Path, NcclDouble] = {}


def load(path: Path) -> NcclDouble:
    """Loads the double, before either provider is."""
    if path not in _doubles:
        _doubles[path] = NcclDouble(path)
        cuda.install()
        watch_as_one()
        os.environ["NUMBA_NCCLLIB"] = str(path.parent)
        use(path)
    return _doubles[path]


def make_group(path: Path, provider: str, rank: int, size: int, store: Any = None, **options: Any) -> Any:
    """Returns a group over the double; ``options`` are further fields of :class:`GroupOptions`."""
    load(path)
    from collectives.backends.nccl import ProcessGroupNCCL
    from collectives.backends.nccl.libnccl import providers

    fields = {"timeout": timedelta(seconds=20), "group_name": "over the double", **options}
    given = GroupOptions(current_store() if store is None else store, rank, size, **fields)
    return ProcessGroupNCCL(given, providers.load(provider), DoubleDevice)


def run_over_double(
    body: Callable[..., Any],
    size: int,
    path: Path,
    *args: Any,
    provider: str = "cupy",
    options: dict[str, Any] | None = None,
    on_device: bool = True,
    seed: int = 0,
    **more: Any,
) -> list[Any]:
    """Runs ``body(group, *args)`` on every rank, in new processes; returns the results by rank.

    ``more`` are arguments of :func:`harness.run_ranks`. Without ``on_device``, torch's operations do not run
    on the device's streams: the modes that carry that out would show in torch's front end. With a ``seed``,
    streams are held for a while before tasks that it draws, others on each rank.
    """
    about = path, provider, options or {}, on_device, seed
    return run_ranks(_in_group, size, *about, body, args, isolated=True, **more)


def _in_group(
    rank: int,
    size: int,
    path: Path,
    provider: str,
    options: dict[str, Any],
    on_device: bool,
    seed: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    if seed:
        os.environ[SEED_VARIABLE] = str(seed * size + rank)
    group = make_group(path, provider, rank, size, **options)
    try:
        with (
            tensors_on_device() if on_device else nullcontext(),
            DoubleDevice.shared(torch.device("cpu")).activate(),
        ):
            value = body(group, *args)
    except BaseException:
        group.abort()
        if SEED_VARIABLE in os.environ:
            sys.stderr.write(f"streams were held with {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}\n")
        raise
    group.shutdown()
    assert load(path).misuses() == 0, "calls used a communicator after its end"
    assert load(path).contexts() <= {DoubleDevice.number}, "a thread used another rank's device"
    return value
