"""CUDA tensors over Gloo, which go by way of the host; no device is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import cuda_aware_mpi as double
import pytest
import torch
from harness import current_store, run_ranks
from nccl_double.accesses import tensors_in
from torch.utils._python_dispatch import _disable_current_modes

import collectives as dist
import collectives.backends.gloo as product
from collectives.core.arguments import staging
from collectives.registry.backends import GroupOptions, create_group

PRODUCT = (str(Path(product.__file__).parent), staging.__file__)


class HostOnly:
    """torch's group, which is given no memory of the device."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            assert not any(map(double._is_of_device, tensors_in((args, {}))))
            with _disable_current_modes():  # Gloo's threads inherit those of the call
                return method(*args)

        return call


def over_double(rank: int, size: int) -> None:
    with mock.patch.object(double, "_PRODUCT", PRODUCT), double._modes():
        group = create_group("gloo", GroupOptions(current_store(), rank, size, group_name="over the double"))
        group._health.inner = HostOnly(group._health.inner)  # type: ignore[attr-defined]
        double.every_operation(group, "cpu")
        group.shutdown()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 3], ids=["2ranks", "3ranks"])
def test_every_operation_on_a_device(size: int) -> None:
    run_ranks(over_double, size, timeout=110.0, isolated=True)


def named(rank: int, size: int) -> list[str]:
    found = []
    for turn, backend in enumerate(("cpu:gloo,cuda:gloo", "gloo", "cpu:host,cuda:gloo")):
        store = dist.PrefixStore(str(turn), current_store())
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        dist.all_reduce(x := torch.ones(2))
        assert x.tolist() == [size, size]
        assert dist.group.WORLD.supports("all_reduce", device="cuda", dtype=torch.float32)
        found.append(dist.get_backend_config())
        dist.destroy_process_group()
    return found


def test_names() -> None:
    """As in torch, Gloo may be named for both, and on machines without such a device."""
    for both, alone, apart in run_ranks(named, 2):
        assert both == alone == "cpu:gloo,cuda:gloo"
        assert apart == "cpu:host,cuda:gloo"
