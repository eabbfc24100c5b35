"""What stands on an NCCL group: round-robin groups, DistributedDataParallel, functions; over the double."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from nccl_double.device import DoubleDevice
from nccl_double.groups import SEEDS, load, make_group, register_over_double, run_over_double
from optimizers_in_hooks import every_form
from ports import free_port

import collectives
from collectives import P2POp, ProcessGroup, ReduceOp, UnsupportedOperationError, dist2
from collectives.backends import nccl
from collectives.backends.nccl import NcclConfig, ProcessGroupNCCL, providers
from collectives.backends.nccl.device import CudaDevice
from collectives.backends.nccl.libnccl import NcclError
from collectives.backends.round_robin import round_robin_process_groups
from collectives.core import quantized
from collectives.ddp import DistributedDataParallel
from collectives.ddp.hooks.compression import QuantizedAllreduceState, quantized_allreduce_hook
from collectives.registry.backends import GroupOptions
from collectives.registry.by_device import ProcessGroupByDevice

ROWS, LANES = 24, 3
LIMIT = timedelta(seconds=30)


def network() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(10, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))


def trained(module: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


def trains_as_one_process(group: ProcessGroup) -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(ROWS, 10, generator=generator)
    targets = torch.randn(ROWS, 3, generator=generator)
    expected = trained(network(), inputs, targets)
    share = slice(group.rank() * ROWS // group.size(), (group.rank() + 1) * ROWS // group.size())
    module = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.001)
    for ours, alone in zip(trained(module, inputs[share], targets[share]), expected, strict=True):
        torch.testing.assert_close(ours, alone)
        everyones = [torch.empty_like(ours) for _ in range(group.size())]
        group.allgather(everyones, ours).wait()
        assert all(torch.equal(theirs, ours) for theirs in everyones), "the ranks differ"


def over_lanes(first: Any, path: Path) -> None:
    rank, size, store = first.rank(), first.size(), first.get_group_store()
    lanes = [first] + [
        make_group(path, "cupy", rank, size, torch_dist.PrefixStore(f"lane{n}", store), group_name=f"lane{n}")
        for n in range(1, LANES)
    ]
    group = round_robin_process_groups(lanes)
    tensors = [torch.full((n + 1,), float(n)) for n in range(3 * LANES)]
    for work in [group.allreduce(tensor) for tensor in tensors]:
        work.wait()
    assert [tensor.unique().tolist() for tensor in tensors] == [[float(n * size)] for n in range(3 * LANES)]
    group.barrier().wait()
    trains_as_one_process(group)
    group.shutdown()


def on_a_world(group: Any, path: Path) -> None:
    """The user functions, the registry and mixed groups reach it as they reach any backend."""
    rank, size = group.rank(), group.size()
    register_over_double("nccl_over_double", path, "pynccl")
    store = torch_dist.PrefixStore("world", group.get_group_store())
    collectives.init_process_group("nccl_over_double", store=store, rank=rank, world_size=size)
    x = torch.full((3,), 1.0 + rank)
    collectives.all_reduce(x, ReduceOp.MAX)
    assert x.tolist() == [size] * 3
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(3)
    batch = [P2POp(collectives.isend, x + rank, after), P2POp(collectives.irecv, got, before)]
    for work in collectives.batch_isend_irecv(batch):
        work.wait()
    assert got.tolist() == [size + before] * 3
    with collectives._coalescing_manager() as manager:
        tensors = [torch.ones(n + 1) for n in range(3)]
        for tensor in tensors:
            collectives.all_reduce(tensor)
    manager.wait()
    assert [tensor.tolist() for tensor in tensors] == [[size] * (n + 1) for n in range(3)]
    objects: list[Any] = [None] * size
    collectives.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    part = collectives.new_group([0, size - 1])
    if rank in {0, size - 1}:
        collectives.all_reduce(x, group=part)
        assert x.tolist() == [2 * size] * 3
    collectives.barrier()
    collectives.destroy_process_group()
    split_off(group, path)


def split_off(group: Any, path: Path) -> None:
    """Bound to a device, the world connects at once, and groups of its ranks are split off it."""
    double, (rank, size) = load(path), (group.rank(), group.size())
    store = torch_dist.PrefixStore("bound world", group.get_group_store())
    bound = {"store": store, "rank": rank, "world_size": size, "device_id": torch.device("cpu")}
    before = double.communicators()
    collectives.init_process_group("nccl_over_double", **bound)
    assert double.communicators() == before + 1
    double.fail_next("ncclCommInitRankConfig", 3, "not split, but made")
    pending = collectives.all_reduce(torch.ones(3), async_op=True)
    backwards = collectives.new_group([size - 1, 0], sort_ranks=False)
    assert pending is not None
    pending.wait()
    if rank in {0, size - 1}:
        assert (backwards.rank(), backwards.size()) == (0 if rank else 1, 2)
        x = torch.full((2,), float(rank))
        collectives.broadcast(x, group_src=0, group=backwards)
        assert x.tolist() == [size - 1.0] * 2
    else:
        assert backwards is collectives.GroupMember.NON_GROUP_MEMBER
    halves = collectives.split_group(split_ranks=[[0], list(range(1, size))])
    x = torch.ones(1)
    halves.allreduce(x).wait()
    assert x.item() == (1 if rank == 0 else size - 1)
    assert collectives.split_group(split_ranks=[[1]]) is None or rank == 1
    collectives.barrier()
    collectives.destroy_process_group()
    library = providers.load("pynccl")
    with pytest.raises(NcclError, match="not split, but made"):  # what was ordered, and has not been used
        library.init(library.unique_id(), 1, 0)
    assert double.communicators() == before


def mixed(group: Any, path: Path) -> None:
    by_device = ProcessGroupByDevice({"cpu": group})
    x, y = torch.ones(2), torch.empty(2)
    with by_device._together():
        by_device.send(x, (group.rank() + 1) % group.size())
        work = by_device.recv(y, (group.rank() - 1) % group.size())
    work.wait()
    assert y.tolist() == [1.0] * 2
    by_device.allreduce(torch.ones(1)).wait()
    before, counted = load(path).launches(), by_device.stats()["all_reduce"]["count"]
    tensors = [torch.ones(n + 1) for n in range(3)]
    by_device.allreduce_coalesced(tensors).wait()
    assert load(path).launches() == before + 1
    assert by_device.stats()["all_reduce"]["count"] == counted + 1
    assert [tensor.tolist() for tensor in tensors] == [[group.size()] * (n + 1) for n in range(3)]


def by_dist2(group: Any) -> None:
    """The backend itself, on the double's devices, with its options by name."""
    rank, size = group.rank(), group.size()
    for wrong in ({"colour": 1}, {"pg_options": {"colour": 1}}):
        with pytest.raises(
            TypeError, match="unknown are colour; known are is_high_priority_stream, config, provider"
        ):
            dist2.new_group("nccl", LIMIT, "cuda", **wrong)
    config = NcclConfig(split_share=True)
    if rank == 0:
        group.get_group_store().set("port", str(free_port()))
    port = group.get_group_store().get("port").decode()
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(size)}
    over_double = partial(ProcessGroupNCCL, devices=DoubleDevice)
    with (
        mock.patch.dict(os.environ, here),
        mock.patch.multiple(nccl, unavailable=lambda: None, ProcessGroupNCCL=over_double),
    ):
        for given in (
            {"provider": "cupy", "blocking_wait": True, "config": config},
            {"pg_options": {"provider": "cupy", "blocking_wait": True, "config": config}},
            {"pg_options": ProcessGroupNCCL.Options(provider="cupy", blocking_wait=True, config=config)},
        ):
            made = dist2.new_group("nccl", LIMIT, "cuda", group_desc="by name", **given)
            assert made.options == ProcessGroupNCCL.Options(False, config, "cupy", True)
            assert (made.group_desc, made.timeout) == ("by name", LIMIT)
            x = torch.ones(2)
            made.allreduce(x).wait()
            assert x.tolist() == [size] * 2
            made.shutdown()


def refuses_tensors_of_the_cpu(group: Any, path: Path) -> None:
    """Names them before anything is sent, so that one rank alone hears of it; on the real devices."""
    double, library = load(path), providers.load("cupy")
    store = torch_dist.PrefixStore("real", group.get_group_store())
    real = ProcessGroupNCCL(GroupOptions(store, group.rank(), group.size(), LIMIT), library)
    with mock.patch.object(CudaDevice, "reduces_float8", return_value=False):  # it would ask the driver
        assert real.capabilities.devices == {"cuda"}
    if group.rank() == 0:
        before, x = double.communicators(), torch.ones(2)
        several = [torch.ones(2) for _ in range(group.size())]
        for call in (
            lambda: real.broadcast(x),
            lambda: real.allreduce(x),
            lambda: real.allreduce_coalesced([x]),
            lambda: real.reduce(x),
            lambda: real.allgather(several, x),
            lambda: real.gather(several, x),
            lambda: real.scatter(x, several),
            lambda: real.reduce_scatter(x, several),
            lambda: real.alltoall(several, several),
            lambda: real.send(x, 1),
            lambda: real.recv(x, 1),
        ):
            with pytest.raises(UnsupportedOperationError, match="tensors on cpu are not taken, only on cuda"):
                call()
        assert double.communicators() == before
    real.abort()


def test_groups_by_device(nccl_library: Path) -> None:
    run_over_double(mixed, 2, nccl_library, nccl_library)


def compositions(group: Any, path: Path) -> None:
    refuses_tensors_of_the_cpu(group, path)
    by_dist2(group)
    trains_as_one_process(group)
    assert every_form(group) == []
    on_a_world(group, path)
    over_lanes(group, path)


@pytest.mark.full
def test_compositions(nccl_library: Path) -> None:
    """All in one start of ranks: importing what training needs takes longer than the rest."""
    run_over_double(compositions, 3, nccl_library, nccl_library, timeout=100)


def on_streams(group: Any, path: Path) -> None:
    mixed(group, path)
    on_a_world(group, path)
    over_lanes(group, path)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_compositions_on_streams_that_run_in_other_orders(nccl_library: Path, seed: int) -> None:
    run_over_double(on_streams, 3, nccl_library, nccl_library, seed=seed, timeout=100)


def numbers(rank: int) -> torch.Tensor:
    return torch.randn(5000, generator=torch.Generator().manual_seed(rank)).pow(5)


def quantized_on_streams(group: ProcessGroup) -> list[torch.Tensor]:
    found = []
    for dtype in quantized.FORMATS:
        tensor = numbers(group.rank())
        work = quantized.allreduce(group, tensor, ReduceOp.AVG, dtype=dtype, block=100)
        other = group.allreduce(torch.ones(3))  # behind it, in the same order on all ranks
        work.wait()
        other.wait()
        found.append(group.to_host(tensor).clone())
    model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.001)
    model.register_comm_hook(QuantizedAllreduceState(group), quantized_allreduce_hook)
    inputs = torch.ones(4, 10) * group.rank()
    trained(model, inputs, torch.ones(4, 3))
    found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone())
    return found


def test_quantized_all_reduce_on_streams(nccl_library: Path) -> None:
    """Ranks have the same bits, and those that the core finds."""
    ranks = run_over_double(quantized_on_streams, 3, nccl_library, timeout=100)
    for place, results in enumerate(zip(*ranks, strict=True)):
        assert all(torch.equal(results[0], other) for other in results)
        if place == len(quantized.FORMATS):
            continue
        parts = quantized.Parts(5000, 3, quantized.FORMATS[place], 100, average=True)
        sent = torch.stack([parts.encode(numbers(rank)).view(3, -1) for rank in range(3)])
        reduced = torch.cat([parts.reduce(sent[:, rank].flatten(), rank) for rank in range(3)])
        expected = torch.empty(5000)
        parts.decode(reduced, expected)
        assert torch.equal(results[0], expected)
