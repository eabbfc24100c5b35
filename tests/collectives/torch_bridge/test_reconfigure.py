"""torch.distributed's own way to change a group's members, which torch has from 2.15 on."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import current_store, run_ranks
from torch._C import _distributed_c10d as c10d
from torch.distributed import _functional_collectives as functional
from torch_world import BACKEND

from collectives import GroupAbortedError, PeerLostError
from collectives.ddp import DistributedDataParallel

HAS_IT = hasattr(dist.distributed_c10d, "_reconfigure")
needs_it = pytest.mark.skipif(not HAS_IT, reason="this torch cannot change a group's members")
LONG = timedelta(seconds=30)


def unformed(rank, size, path, backend=BACKEND):
    dist.init_process_group(
        backend,
        store=dist.FileStore(path, size),
        rank=rank,
        world_size=size,
        timeout=LONG,
        enable_reconfigure=True,
    )


def handles_of(name, rank, members):
    store = current_store()
    store.set(f"{name}/{rank}", dist._get_reconfigure_handle())
    return [store.get(f"{name}/{member}").decode() for member in members]


def meet(name, rank, size):
    store = current_store()
    store.set(f"{name} {rank}", "")
    store.wait([f"{name} {other}" for other in range(size)])


def reconfigure(uuid, handles, **more):
    work = dist._reconfigure(uuid, handles, **more)
    assert work.wait()
    assert work.is_completed()


def total(group=None):
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    return int(tensor[0])


def follows(rank, size):
    """All places where torch looks for rank and size say what the group has now."""
    world = dist.group.WORLD
    backend = dist.ProcessGroup._get_backend(world, torch.device("cpu"))
    assert (dist.get_rank(), dist.get_world_size(), total()) == (rank, size, size)
    assert (world.rank(), world.size()) == (rank, size)
    assert (backend.rank(), backend.size()) == (rank, size)
    assert dist.get_process_group_ranks(None) == list(range(size))
    assert world._get_sequence_number_for_group() == 1
    gathered = [None] * size
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(size))
    received = torch.zeros(1)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group_peer=(rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    assert received.item() == (rank - 1) % size


def grows_and_shrinks(rank, size, path, backend):
    unformed(rank, size, path, backend)
    assert dist._supports_reconfigure()
    assert dist.get_backend_impl(dist.group.WORLD, torch.device("cpu")).supports_reconfigure
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    with pytest.raises(RuntimeError, match="it has no members yet: call reconfigure"):
        total()
    handles = handles_of("all", rank, range(size))
    if rank == 0:
        reconfigure(1, handles[:1], timeout=LONG)
        assert (dist.get_rank(), dist.get_world_size(), total()) == (0, 1, 1)
    reconfigure(2, handles, timeout=LONG)
    follows(rank, size)
    meet("grown", rank, size)
    if rank != 1:
        reconfigure(3, handles[:1] + handles[2:])
        follows(max(rank - 1, 0), size - 1)
    reconfigure(4, handles[::-1])
    follows(size - 1 - rank, size)
    meet("turned", rank, size)
    reconfigure(5, set(handles))
    follows(sorted(handles).index(handles[rank]), size)
    part = dist.new_group([0, size - 1])
    if dist.get_rank() in (0, size - 1):
        assert total(part) == 2
    with pytest.raises(RuntimeError, match="5 was already used"):
        dist._reconfigure(5, handles)
    with pytest.raises(ValueError, match="takes no hints"):
        dist._reconfigure(6, handles, hints={"a": "hint"})
    assert total() == size
    dist.barrier()
    dist.destroy_process_group()


@needs_it
@pytest.mark.parametrize("backend", [BACKEND, "collectives_round_robin"])
def test_a_group_grows_and_shrinks(backend, tmp_path):
    run_ranks(grows_and_shrinks, 3, f"{tmp_path}/store", backend)


def trains(rank, size, path):
    """torch's own data parallel module asks the group in C++ how many ranks it has."""
    unformed(rank, size, path)
    handles = handles_of("all", rank, range(size))
    reconfigure(1, handles)
    meet("formed", rank, size)
    if rank == 2:
        current_store().wait(["trained 0", "trained 1"])
        return dist.destroy_process_group()
    reconfigure(2, handles[:2])
    for wrap in (torch.nn.parallel.DistributedDataParallel, DistributedDataParallel):
        torch.manual_seed(0)
        model = wrap(torch.nn.Linear(3, 1, bias=False))
        model(torch.full((1, 3), float(rank + 1))).sum().backward()
        assert torch.equal(next(model.parameters()).grad, torch.full((1, 3), 1.5))
    current_store().set(f"trained {rank}", "")
    return dist.destroy_process_group()


@needs_it
def test_data_parallel_training_on_a_changed_group(tmp_path):
    run_ranks(trains, 3, f"{tmp_path}/store")


def breaks_and_mends(rank, size, path):
    unformed(rank, size, path)
    handles = handles_of("all", rank, range(size))
    reconfigure(1, handles)
    world, kinds = dist.group.WORLD, c10d.ErrorType
    backend = dist.get_backend_impl(world, torch.device("cpu"))
    assert backend.get_error() == kinds.SUCCESS
    meet("formed", rank, size)
    world.abort()
    assert backend.get_error() == world.get_error() == kinds.SUCCESS  # as over Gloo
    with pytest.raises(GroupAbortedError):
        total()
    meet("aborted", rank, size)
    reconfigure(2, handles)
    assert total() == size
    meet("mended", rank, size)
    world.set_timeout(timedelta(milliseconds=50))
    if rank == 1:
        with pytest.raises(RuntimeError, match="timed out"):
            dist.all_reduce(torch.ones(4), async_op=True).wait()
    meet("timed out", rank, size)
    assert backend.get_error() == kinds.TIMEOUT
    world.set_timeout(LONG)
    reconfigure(3, handles)
    assert (backend.get_error(), total()) == (kinds.SUCCESS, size)
    meet("mended again", rank, size)
    if rank == 1:
        dist.group.WORLD.inner.abort()
    meet("aborted by rank 1", rank, size)
    assert backend.get_error() == (kinds.COMM_ERROR if rank == 1 else kinds.REMOTE_ERROR)
    reconfigure(4, handles)
    assert total() == size
    dist.barrier()
    dist.destroy_process_group()


@needs_it
def test_an_abort_and_a_time_limit_are_mended(tmp_path):
    run_ranks(breaks_and_mends, 3, f"{tmp_path}/store")


def replaces_a_dead_rank(rank, size, path):
    """Rank 3 comes later, in the place of rank 1."""
    unformed(min(rank, 2), 3, path)
    if rank < 3:
        handles = handles_of("first", rank, range(3))
        reconfigure(1, handles)
        assert total() == 3
        meet("formed", rank, 3)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError) as lost:
            total()
        assert lost.value.rank == 1
        assert dist.group.WORLD.get_error() == c10d.ErrorType.REMOTE_ERROR
    handles = handles_of("healed", rank, [0, 3, 2])
    reconfigure(2, handles, timeout=LONG)
    follows({0: 0, 3: 1, 2: 2}[rank], 3)
    dist.barrier()
    dist.destroy_process_group()


@needs_it
@pytest.mark.full
def test_a_new_process_takes_the_place_of_a_dead_one(tmp_path):
    run_ranks(replaces_a_dead_rank, 4, f"{tmp_path}/store", isolated=True, lost=[1])


def as_before(rank, size, path):
    dist.init_process_group(BACKEND, store=dist.FileStore(path, size), rank=rank, world_size=size)
    world = dist.group.WORLD
    assert world.get_error() == c10d.ErrorType.SUCCESS
    assert total() == size
    world.abort()
    assert world.get_error() == c10d.ErrorType.SUCCESS
    dist.destroy_process_group()


def test_every_torch_asks_for_a_groups_error():
    with TemporaryDirectory() as folder:
        run_ranks(as_before, 2, str(Path(folder) / "store"))


def goes_on_after_an_abort(rank, size, path):
    """Our kernels stay in place, where a group has no backend of its own, until its end."""
    from collectives.torch_bridge import operators

    operators.can_be_made = lambda: False
    dist.init_process_group(BACKEND, store=dist.FileStore(path, size), rank=rank, world_size=size)
    world = dist.group.WORLD
    store = current_store()
    store.set(f"handle {rank}", world.get_reconfigure_handle())
    handles = [store.get(f"handle {other}").decode() for other in range(size)]
    for number in range(2):
        world.abort()
        options = SimpleNamespace(uuid=number, handles=handles, timeout=LONG, hints={})
        assert world.reconfigure(options).wait()
        assert operators._users == 1
        reduced = functional.all_reduce(torch.ones(4), "sum", world)  # by an operator
        assert reduced[0] == size
    dist.barrier()
    dist.destroy_process_group()
    del world
    assert operators._users == 0


def test_an_aborted_group_that_takes_members_is_still_carried_out():
    with TemporaryDirectory() as folder:
        # torch 2.15 gives its recorder to a Backend, which the group does not have here
        env = {"TORCH_FR_BUFFER_SIZE": "0"}
        run_ranks(goes_on_after_an_abort, 2, str(Path(folder) / "store"), isolated=True, env=env)
