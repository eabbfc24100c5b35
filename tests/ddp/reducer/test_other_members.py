"""Models over a group that has taken other members."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from failing_hooks import CULPRIT, Tower, done, rows
from harness import current_store, run_ranks
from on_ranks import on_ranks

import collectives as dist
from collectives.ddp import DistributedDataParallel, GradientSyncError

LONG = timedelta(seconds=30)


def train(steps, bad_steps, other):
    """Trains over the world with a hook over another group, which fails on one rank in some passes."""
    rank, size, bad = dist.get_rank(), dist.get_world_size(), False

    def hook(_, bucket):
        other.allreduce([bucket.buffer().div_(size)]).wait()
        if bad and rank == CULPRIT:
            raise KeyError("in the hook")
        return done(bucket.buffer())

    model = DistributedDataParallel(Tower(), bucket_cap_mb=0)
    model.register_comm_hook(None, hook)
    for step in range(steps):
        bad = step in bad_steps
        loss = model(rows(rank, step)).square().sum()
        if bad:
            with pytest.raises(GradientSyncError):
                loss.backward()
        else:
            loss.backward()
    return model


def handles_of(name, rank, ranks):
    store = current_store()
    store.set(f"{name} {rank}", dist.get_reconfigure_handle())
    return [store.get(f"{name} {other}").decode() for other in ranks]


@on_ranks(3, None, isolated=True)
def test_a_newcomer_counts_passes_as_the_others_do(rank, size):
    """Ranks 0 and 1 have trained and failed before; their models are still there."""
    former = []
    if rank < 2:
        dist.init_process_group("host", None, LONG, 2, rank, dist.PrefixStore("world", current_store()))
        former.append(train(4, {1}, dist.new_group([0, 1])))
    dist.reconfigure_world("grown", handles_of("all", rank, range(size)), timeout=LONG)
    model = train(5, {1, 3}, dist.new_group(list(range(size))))
    totals = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(totals, torch.tensor([float(model.reducer.passes)]))
    assert [int(total) for total in totals] == [3, 3, 3]
    dist.barrier()
    dist.destroy_process_group()


def shrinks_beside_a_group(rank, size):
    """The model's group goes on without a rank that the hook's other group still has."""
    part, other = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    handles = [None] * size
    dist.all_gather_object(handles, dist.get_reconfigure_handle(part))
    module, bad = Tower(), False

    def hook(_, bucket):
        if bad:
            other.send([torch.ones(1)], (rank + 2) % 4, 0).wait()  # not to rank 1, which has left
            if rank == 0:
                raise KeyError("in the hook")
        return done(bucket.buffer())

    model = DistributedDataParallel(module, process_group=part, bucket_cap_mb=0)
    model.register_comm_hook(None, hook)
    model(rows(rank, 0)).square().sum().backward()
    dist.barrier()
    if rank != 1:
        part.reconfigure("smaller", [handles[0], handles[2]], LONG)
        bad = True
        with pytest.raises(GradientSyncError):
            model(rows(rank, 1)).square().sum().backward()
        total = torch.ones(1)
        part.allreduce([total]).wait()
        assert total.item() == 2
    dist.barrier()


def test_a_group_of_ranks_that_have_left_is_not_connected_anew() -> None:
    run_ranks(shrinks_beside_a_group, 3, backend="host", world=True, isolated=True)
