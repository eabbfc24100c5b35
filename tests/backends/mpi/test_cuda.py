"""Whether MPI takes CUDA tensors, and what is said where it does not; no device is needed."""

from __future__ import annotations

import os

import pytest
import torch
from cuda_aware_mpi import cuda_aware, every_operation
from harness import current_store
from mpi_team import Teams

import collectives as dist
from collectives.registry.backends import GroupOptions, create_group
from collectives.store import PrefixStore

VARIABLE = "COLLECTIVES_MPI_CUDA"


def decided(rank: int, size: int) -> list[str | None]:
    found = []
    for turn, word in enumerate(("", "0", "1")):
        os.environ[VARIABLE] = word
        group = create_group(
            "mpi", GroupOptions(PrefixStore(f"t{turn}", current_store()), rank, size, group_name=f"t{turn}")
        )
        found.append(group.capabilities.why_not("broadcast", device="cuda", dtype=torch.float32))
        assert group.supports("broadcast", device="cuda") == (found[-1] is None)
        assert group.supports("broadcast", device="cpu")
        group.allreduce(x := torch.ones(3)).wait()
        assert x.tolist() == [size] * 3
        group.shutdown()
    os.environ[VARIABLE] = "perhaps"
    with pytest.raises(ValueError, match=f"{VARIABLE} must be 1 or 0, but is 'perhaps'"):
        create_group("mpi", GroupOptions(current_store(), rank, size))

    del os.environ[VARIABLE]
    with pytest.raises(ValueError, match=r"takes no tensors on cuda: .*CUDA-aware.*nccl") as refused:
        dist.init_process_group(
            "cuda:mpi", store=PrefixStore("named", current_store()), rank=rank, world_size=size
        )
    assert str(found[0]).partition(": ")[2] in str(refused.value)
    store = PrefixStore("alone", current_store())
    dist.init_process_group("mpi", store=store, rank=rank, world_size=size)
    dist.all_reduce(x := torch.ones(2))
    assert x.tolist() == [size] * 2
    dist.destroy_process_group()
    return found


def test_cuda_tensors_are_taken_where_mpi_takes_their_memory(mpi: Teams) -> None:
    (asked, denied, claimed), _ = mpi.run(decided, 2, backend=None)
    assert asked is not None
    assert denied is not None
    assert claimed is None
    for words in ("tensors on cuda are not taken, only on cpu", "nccl", f"{VARIABLE}=1"):
        assert words in asked
        assert words in denied
    assert f"{VARIABLE} is 0" in denied
    assert "MPIX_Query_cuda_support" in asked
    assert mpi.installation.title in asked


def over_double(rank: int, size: int) -> None:
    with cuda_aware():
        group = create_group("mpi", GroupOptions(current_store(), rank, size, group_name="over the double"))
        assert group.supports("all_reduce", device="cuda")
        every_operation(group, "cpu")
        group.shutdown()


@pytest.mark.parametrize("size", [2, 3], ids=["2ranks", "3ranks"])
def test_every_operation_on_a_device(mpi: Teams, size: int) -> None:
    mpi.run_alone(over_double, size, backend=None, timeout=110.0)
