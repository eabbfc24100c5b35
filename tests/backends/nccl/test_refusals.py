"""What NCCL refuses when ranks connect: a GPU of two ranks, and different versions; over the double."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.test_works import gate
from nccl_double import NcclDouble
from nccl_double.groups import in_turn, load, on, run_over_double, shared_id, tell_version

from collectives import DistBackendError
from collectives.backends.nccl import providers
from collectives.backends.nccl.libnccl import NcclError, NcclLibrary, NcclStatus

GPU = 0x98000


def refusal(double: NcclDouble, library: NcclLibrary, rank: int, size: int) -> NcclError:
    with pytest.raises(NcclError) as caught:
        library.init(shared_id(library, rank), size, rank)
    assert double.communicators() == 0
    return caught.value


def one_gpu(rank: int, size: int, provider: str, path: Path) -> None:
    """Only those who share it know why; the others see that ranks are gone."""
    double = NcclDouble(path)
    library = providers.load(provider)
    if rank != 1:
        double.set_gpu(GPU)
    error = refusal(double, library, rank, size)
    if rank == 1:
        assert error.status == NcclStatus.REMOTE_ERROR
        assert "has closed its connection" in error.detail
    else:
        assert error.status == NcclStatus.INVALID_USAGE
        why = f"Duplicate GPU detected : rank {rank} and rank {2 - rank} both on CUDA device 98000"
        assert error.detail.endswith(why)
    double.set_gpu(0)
    library.init(shared_id(library, rank), size, rank).destroy()


def one_gpu_of_several_hosts(rank: int, size: int, provider: str, path: Path) -> None:
    """As GPUs are shared in tests: what NCCL takes for hosts are ranks."""
    os.environ["NCCL_HOSTID"] = f"host{rank}"
    double = NcclDouble(path)
    library = providers.load(provider)
    double.set_gpu(GPU)
    library.init(shared_id(library, rank), size, rank).destroy()


def several_versions(rank: int, size: int, provider: str, path: Path) -> None:
    tell_version(path, 23003 if rank == 2 else 23007)
    double = NcclDouble(path)
    library = providers.load(provider)
    error = refusal(double, library, rank, size)
    assert error.status == NcclStatus.INVALID_USAGE
    mine, theirs, other = (23003, 23007, 0) if rank == 2 else (23007, 23003, 2)
    assert error.detail.endswith(
        f"Mismatched NCCL version detected : rank {other} version {theirs} rank {rank} version {mine}"
    )


@pytest.mark.parametrize("bodies", [[one_gpu, several_versions], [one_gpu_of_several_hosts]])
def test_ranks_that_do_not_fit(nccl_library: Path, provider: str, bodies: list[Any]) -> None:
    on(provider, nccl_library, in_turn, 3, bodies)


def told_to_the_user(group: Any, path: Path) -> None:
    """The error names the communicator, the ranks and the GPU; the group can be used when that is mended."""
    double = load(path)
    double.set_gpu(GPU)
    with pytest.raises(
        DistBackendError,
        match=r"making the communicator of ranks 0, 1 .*ncclInvalidUsage \(5\).*"
        "give each rank a GPU of its own.*Duplicate GPU detected : "
        rf"rank {group.rank()} and rank {1 - group.rank()} both on CUDA device 98000",
    ):
        group.allreduce(torch.ones(1))
    gate("refused", group)
    double.set_gpu(0)
    x = torch.ones(1)
    group.allreduce(x).wait()
    assert x.item() == 2.0


def a_pair_of_three(group: Any, path: Path) -> None:
    """A message between two ranks is refused, and those that fit go on."""
    double = load(path)
    if group.rank() != 2:
        double.set_gpu(GPU)
        with pytest.raises(DistBackendError, match="Duplicate GPU detected"):
            group.send(torch.ones(1), 1 - group.rank())
    gate("refused", group)
    for peer in (2,) if group.rank() == 0 else (0,) if group.rank() == 2 else ():
        with group._together():
            group.send(torch.ones(1), peer)
            received = group.recv(got := torch.empty(1), peer)
        received.wait()
        assert got.item() == 1.0


def of_other_versions(group: Any, path: Path) -> None:
    load(path).set_version(23007 - group.rank())
    with pytest.raises(
        DistBackendError,
        match=r"making the communicator of ranks 0, 1 .*install the same NCCL .*"
        "Mismatched NCCL version detected : "
        rf"rank {1 - group.rank()} version {23006 + group.rank()} rank {group.rank()} version",
    ):
        group.allreduce(torch.ones(1))
    gate("refused", group)


@pytest.mark.parametrize(
    ("body", "size"), [(told_to_the_user, 2), (a_pair_of_three, 3), (of_other_versions, 2)]
)
def test_groups_that_do_not_fit(nccl_library: Path, body: Any, size: int) -> None:
    run_over_double(body, size, nccl_library, nccl_library)
