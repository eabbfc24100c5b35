"""Groups in torch: names, sub-groups, other backends beside ours, debug level, end and new start."""

from __future__ import annotations

import copy
import inspect
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch_world import BACKEND, run_torch

from collectives.errors import CollectiveMismatchError, UnsupportedOperationError


def summed(number, group=None):
    tensor = torch.full((3,), float(number))
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, tensor[:1].expand(3))
    return tensor[0].item()


def identity(rank, size):
    world = dist.group.WORLD
    assert dist.get_backend() == BACKEND
    served = dist.Backend.backend_capability[BACKEND]
    assert dist.get_backend_config() == ",".join(f"{device}:{BACKEND}" for device in served)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert (world.rank(), world.size(), world.name()) == (rank, size, BACKEND)
    assert world._get_backend_name() == BACKEND
    assert dist.ProcessGroup.name(world) == BACKEND  # what C++ is told
    assert world.group_name == dist.ProcessGroup.group_name.__get__(world)
    assert world.group_desc == dist.ProcessGroup.group_desc.__get__(world) == "default_pg"
    assert dist.distributed_c10d._resolve_process_group(world.group_name) is world
    assert dist.ProcessGroup.unbox(world.boxed()) is world
    assert world._device_types == [torch.device("cpu")]
    assert dist.distributed_c10d._device_capability() == ["cpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert dist.distributed_c10d._get_pg_default_device() == torch.device("cpu")
    assert world._get_backend(torch.device("cpu")) is world
    with pytest.raises(RuntimeError, match="nccl"):
        world._get_backend(torch.device("cuda"))
    assert world.options.backend == BACKEND
    assert world.options._timeout == timedelta(seconds=33)
    world.set_timeout(timedelta(seconds=44))
    assert world.options._timeout == timedelta(seconds=44)
    store = world.get_group_store()
    store.set(f"key{rank}", str(rank))
    assert store.get(f"key{size - 1}") == str(size - 1).encode()


def test_identity():
    run_torch(identity, 2, init={"timeout": timedelta(seconds=33)})


def sequence_numbers(rank, size):
    world = dist.group.WORLD
    before = world._get_sequence_number_for_group()
    for _ in range(3):
        summed(rank)
    with pytest.raises(ValueError, match="root"):
        world.broadcast(torch.ones(1), root=size)
    assert world._get_sequence_number_for_group() == before + 3


def test_sequence_numbers():
    run_torch(sequence_numbers)


def sub_groups(rank, size):
    pairs = [dist.new_group([0, 2], group_desc="outer"), dist.new_group([1, 2])]
    for group, ranks in zip(pairs, ([0, 2], [1, 2]), strict=True):
        if rank not in ranks:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert dist.get_process_group_ranks(group) == ranks
        assert summed(rank, group) == sum(ranks)
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, src=ranks[1], group=group)
        assert tensor.tolist() == [ranks[1]] * 2
        tensor = torch.full((2,), float(rank))
        dist.reduce(tensor, dst=ranks[1], group=group)
        assert tensor[0].item() == (sum(ranks) if rank == ranks[1] else rank)
        objects = [None, None]
        dist.all_gather_object(objects, rank, group=group)
        assert objects == ranks
    if rank == 0:
        assert pairs[0].group_desc == "outer"
    assert summed(rank) == 3
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:  # not yet in torch 2.11
        backwards = dist.new_group([2, 1, 0], sort_ranks=False)
        parts = [torch.empty(1) for _ in range(3)]
        dist.all_gather(parts, torch.full((1,), float(rank)), group=backwards)
        assert [part.item() for part in parts] == [2, 1, 0]
    mine, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    assert summed(1, mine) == (1 if rank == 2 else 2)
    dist.destroy_process_group(mine)
    assert summed(rank) == 3
    local = dist.new_group([rank], use_local_synchronization=True)
    assert summed(rank, local) == rank


def test_sub_groups():
    run_torch(sub_groups, 3)


def beside_gloo(rank, size):
    theirs = dist.new_group(backend="gloo")
    assert type(theirs) is dist.ProcessGroup
    for group in (theirs, None, theirs):
        assert summed(rank, group) == 1
        parts = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(parts, torch.full((2,), float(rank)), group=group)
        assert [part[0].item() for part in parts] == [0, 1]
        output = torch.empty(2)
        dist.all_gather_into_tensor(output, torch.full((1,), float(rank)), group=group)
        assert output.tolist() == [0, 1]
        dist.barrier(group=group)
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, 1, group=group)
        assert tensor[0].item() == 1
        name = (group or dist.group.WORLD).group_name
        result = torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", name)
        assert torch.ops._c10d_functional.wait_tensor(result).item() == 2
    dist.monitored_barrier(theirs, timeout=timedelta(seconds=20))
    boxed, add = theirs.boxed(), torch.classes.c10d.ReduceOp()
    tensor = torch.ones(1)
    dist.Work.unbox(torch.ops.c10d.allreduce_([tensor], boxed, add, None)[1]).wait()
    assert tensor.item() == 2
    if rank:
        dist.send(torch.ones(1), 0, group=theirs)
    else:
        assert dist.recv(tensor, group=theirs) == 1
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=theirs)
    model(torch.full((1, 1), float(rank))).backward()
    assert model.module.weight.grad.item() == 0.5


def test_gloo_group_beside_ours():
    run_torch(beside_gloo)


def gloo_for_long(rank, size):
    """Gloo's threads take the GIL while they hold a lock that whoever issues an operation needs."""
    theirs = dist.new_group(backend="gloo")
    boxed, add = theirs.boxed(), torch.classes.c10d.ReduceOp()
    for _ in range(150):
        dist.all_reduce(torch.ones(3), group=theirs, async_op=True)
        dist.barrier(group=theirs)
        tensor = torch.ones(1)
        dist.Work.unbox(torch.ops.c10d.allreduce_([tensor], boxed, add, None)[1]).wait()
        assert tensor.item() == size
        dist.all_gather([torch.zeros(2) for _ in range(size)], torch.ones(2), group=theirs)


def test_gloo_group_is_not_locked_up():
    run_torch(gloo_for_long, 3)


def ours_beside_gloo(rank, size):
    ours = dist.new_group(backend=BACKEND)
    assert dist.get_backend(ours) == BACKEND
    assert summed(rank, ours) == 1
    assert summed(rank) == 1
    assert dist.get_backend() == "gloo"


def test_our_group_beside_gloo():
    run_torch(ours_beside_gloo, backend="gloo")


def with_a_device(rank, size):
    assert dist.get_backend_config() == f"cpu:{BACKEND}"
    assert summed(rank) == 1


def test_backend_of_a_device():
    run_torch(with_a_device, backend=f"cpu:{BACKEND}")


def general_options(rank, size):
    limit = timedelta(seconds=11)
    group = dist.new_group(pg_options=c10d.Backend.Options(BACKEND, limit))
    assert group.inner.timeout == limit
    assert summed(rank, group) == 1


def test_general_options_of_torch_give_their_time_limit():
    run_torch(general_options, 2)


def refusals(rank, size):
    world = dist.group.WORLD
    calls = [
        lambda: dist.ProcessGroup.split_group(world, [0]),
        lambda: world.merge_remote_group(world.get_group_store(), 4),
        lambda: dist.ProcessGroup.merge_remote_group(world, world.get_group_store(), 4),
        lambda: dist.ProcessGroup._register_on_completion_hook(world, print),
        world._enable_collectives_timing,
    ]
    names = ["shrink", "new_window", "allocate_tensor"]
    if not hasattr(dist.ProcessGroup, "register_pre_hook"):
        names += ["register_pre_hook", "register_post_hook"]
    for call in calls + [getattr(world, name) for name in names]:
        with pytest.raises(RuntimeError):
            call()
    assert summed(rank) == 1


def test_what_is_not_offered_raises():
    run_torch(refusals)


def parts(rank, size):
    world, limit = dist.group.WORLD, timedelta(seconds=11)
    options = copy.deepcopy(world.options)  # as torch's split_group does
    assert (options.backend, options._timeout) == (BACKEND, world.inner.timeout)
    alone = world.split_group([rank], limit, options, group_desc="alone")
    assert (alone.rank(), alone.size(), alone.group_desc, alone.inner.timeout) == (0, 1, "alone", limit)
    turned = world.split_group([2, 0], opts=options)
    assert (turned is None) is (rank == 1)
    if turned is not None:
        assert turned.inner.timeout == world.inner.timeout
        tensor = torch.tensor([float(rank)])
        turned.broadcast([tensor]).wait()
        assert tensor.item() == 2
        again = turned.split_group([turned.rank()], group_name="named")
        assert (again.size(), again.group_name) == (1, "named")
    for wrong in ([], [0, 0], [3], [-1]):
        with pytest.raises(ValueError, match="ranks must be different ones from 0 to 2"):
            world.split_group(wrong)
    assert summed(rank) == 3


def test_parts_of_a_group():
    run_torch(parts, 3)


def bound(rank, size):
    assert dist.group.WORLD.bound_device_id == torch.device("cpu:0")
    assert summed(rank) == 3
    for backend in (None, "collectives_round_robin", "gloo"):
        assert summed(rank, dist.new_group(backend=backend)) == 3
        part = dist.new_group([0, 2], backend=backend)  # the rank that is left out takes no part
        assert rank == 1 or summed(rank, part) == 2


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="this torch binds groups to accelerators only")
def test_bound_to_a_device():
    run_torch(bound, 3, init={"device_id": torch.device("cpu:0")})


def cannot_change_its_members(rank, size):
    """Backends that cannot change a group's members do not look at the flag."""
    assert summed(rank) == 1
    assert not dist.distributed_c10d._supports_reconfigure()
    with pytest.raises(UnsupportedOperationError, match="gloo cannot give a group other members"):
        dist.distributed_c10d._reconfigure(uuid=1, handles=["a", "b"])


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="this torch cannot change a group's members")
def test_groups_that_cannot_change_their_members():
    run_torch(cannot_change_its_members, 2, backend="collectives_gloo", init={"enable_reconfigure": True})


def again_and_again(rank, size):
    shared = dist.group.WORLD.get_group_store()
    dist.destroy_process_group()
    for turn in range(3):
        store = dist.PrefixStore(str(turn), shared)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
        assert summed(rank + turn) == 1 + 2 * turn
        assert dist.group.WORLD.group_name == "0"
        dist.destroy_process_group()
        assert not dist.is_initialized()


def test_destroy_and_init_again():
    run_torch(again_and_again)


def debug_level_detail(rank, size):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
        assert summed(rank, group) == 1
        assert summed(rank) == 1
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        model(torch.ones(1, 2) * rank).sum().backward()
        assert model.module.weight.grad.tolist() == [[0.5, 0.5]]
    finally:
        dist.set_debug_level_from_env()


def detail_compares(rank, size, backend):
    """Also over a backend that would wait for ever, or give wrong values, where ranks differ."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(backend=backend)
    finally:
        dist.set_debug_level_from_env()
    with pytest.raises(CollectiveMismatchError, match="rank 1") as caught:
        dist.all_reduce(torch.ones(2 + rank), group=group)
    assert str(caught.value).count(f"called at {__file__}:") == size
    with pytest.raises(CollectiveMismatchError, match="differ in shape"):
        dist.all_reduce(torch.ones(2 + rank, 3 - rank), group=group)
    calls = [
        lambda: dist.broadcast(torch.ones(2), 0, group=group),
        lambda: dist.all_reduce(torch.ones(2), group=group),
    ]
    with pytest.raises(CollectiveMismatchError, match="broadcast"):
        calls[rank]()
    with pytest.raises(CollectiveMismatchError):
        torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(torch.ones(2 + rank), "sum", group.group_name)
        )
    assert summed(rank, group) == 1


@pytest.mark.parametrize("backend", [BACKEND, "collectives_gloo", "collectives_round_robin"])
def test_detail_compares(backend):
    run_torch(detail_compares, 2, backend)


def test_debug_level_detail():
    run_torch(debug_level_detail)
