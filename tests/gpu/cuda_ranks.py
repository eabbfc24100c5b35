"""Ranks with CUDA devices: one each where there are enough, else shared, by
``collectives.bench.core.devices``.

On a shared device an operation takes 5 to 20 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from harness import current_store, run_ranks

from collectives.bench.core import devices

NO_DEVICE = None if torch.cuda.is_available() else "torch finds no CUDA device here"

needs_device = [pytest.mark.gpu, pytest.mark.skipif(NO_DEVICE is not None, reason=str(NO_DEVICE))]


def run_on_cuda(
    body: Callable[..., Any],
    *args: Any,
    provider: str | None = None,
    size: int = 2,
    limit: float = 60.0,
    bound: bool = False,
    timeout: float = 110.0,
) -> list[Any]:
    """Runs ``body(group, *args)`` on every rank, in new processes, with an NCCL group of ``provider``.

    Args:
        body: a module-level function; the rank's device is the current one.
        *args: further arguments.
        provider: the provider; skips where it cannot be used.
        size: number of ranks.
        limit: time limit of operations in seconds.
        bound: whether the group is bound to the device and connects at once.
        timeout: seconds until the ranks are stopped.
    """
    return run_ranks(_in_group, size, provider, limit, bound, body, args, isolated=True, timeout=timeout)


def _in_group(
    rank: int,
    size: int,
    provider: str | None,
    limit: float,
    bound: bool,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    device = take_device(rank, size)
    from collectives.backends.nccl import ProcessGroupNCCL, create, providers
    from collectives.registry.backends import GroupOptions

    reason = providers.unavailable(provider)
    if reason is not None:
        pytest.skip(reason)
    group = create(
        GroupOptions(
            current_store(),
            rank,
            size,
            timeout=timedelta(seconds=limit),
            group_name="on cuda",
            device_id=device if bound else None,
            pg_options=ProcessGroupNCCL.Options(provider=provider),
        )
    )
    try:
        value = body(group, *args)
    except BaseException:
        group.abort()
        raise
    torch.cuda.synchronize()
    group.shutdown()
    return value


def take_device(rank: int, size: int) -> torch.device:
    """Makes this rank's device the current one; before anything of NCCL has been called."""
    devices.CudaDevice().take(rank, size)
    return torch.device("cuda", torch.cuda.current_device())
