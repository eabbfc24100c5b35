"""Hooks of torch's groups, and its flight recorder, see the operations of ours."""

from __future__ import annotations

import pickle
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rank_watch import RankFailedError
from torch._C import _distributed_c10d as c10d
from torch.distributed import _functional_collectives as functional
from torch_analyzer import analyzed
from torch_calls import every_function
from torch_world import BACKEND, run_torch

from collectives import CollectiveTimeoutError, GroupAbortedError

HAS_HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")
needs_hooks = pytest.mark.skipif(not HAS_HOOKS, reason="hooks of groups need torch 2.14 or newer")
needs_recorder = pytest.mark.skipif(
    not hasattr(c10d, "_dump_fr_trace_file"),
    reason="its recorder of other groups needs torch 2.15",
)


def everything(rank, size):
    """Operations in all the forms in which torch's functions, and users of its groups, issue them."""
    world, mine, pair = dist.group.WORLD, torch.full((4,), rank + 1.0), torch.zeros(size)
    rows = [torch.zeros(4) for _ in range(size)]
    every_function(rank, size)
    both = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, rows[0], 1 - rank)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    with dist._coalescing_manager():
        for row in rows:
            dist.all_reduce(row)
    with dist._coalescing_manager():
        for row in rows:
            dist.all_gather_into_tensor(torch.zeros(4 * size), row)
    dist.all_gather_object([None] * size, rank)
    functional.wait_tensor(functional.all_reduce(mine, "sum", world))
    warnings.simplefilter("ignore", FutureWarning)  # for names that torch 2.15 replaces
    functional.wait_tensor(functional.all_gather_tensor(mine, 0, world))
    functional.wait_tensor(functional.reduce_scatter_tensor(mine, "sum", 0, world))
    functional.wait_tensor(functional.all_to_all_single(pair, None, None, world))
    functional.wait_tensor(functional.broadcast(mine, 1, world))
    for tensor in functional.all_reduce_coalesced([mine, mine], "sum", world):
        functional.wait_tensor(tensor)
    for tensor in functional.reduce_scatter_tensor_coalesced([mine, mine], "sum", [0, 0], world):
        functional.wait_tensor(tensor)
    world.allreduce(mine).wait()
    world.broadcast([mine]).wait()
    world.broadcast(mine, root=1).wait()
    world.allgather([rows], [mine]).wait()
    world.barrier().wait()
    torch.ops.c10d.barrier(torch.zeros(1), world.boxed(), [], True, -1)


def watched(rank, size):
    world, seen = dist.group.WORLD, []

    def before(args):
        shapes = [[list(one.shape) for one in some] for some in (args.input_tensors, args.output_tensors)]
        seen.append(("before", args.op_id, args.name.name, args.async_op, args.root, shapes))

    def after(args):
        seen.append(("after", args.op_id, args.name.name, args.async_op, args.work is not None))

    everything(rank, size)
    world.register_pre_hook(7, before)
    world.register_post_hook(8, after)
    everything(rank, size)
    found = list(seen)
    world.unregister_pre_hook(7)
    world.unregister_post_hook(8)
    everything(rank, size)
    assert seen == found
    first = found[0][1]  # torch's recorder, which it gives to ours, counts too
    return [(when, number - first, *rest) for when, number, *rest in found]


@needs_hooks
def test_hooks_see_each_operation_once_and_as_over_gloo():
    assert run_torch(watched, 2) == run_torch(watched, 2, backend="gloo")


def beyond_gloo(rank, size):
    world, seen = dist.group.WORLD, []
    world.register_pre_hook(1, lambda args: seen.append(args.name.name))
    tripled, whole, largest = torch.ones(3), torch.zeros(2 * size), torch.zeros(2)
    dist.all_reduce(tripled, op=dist._make_nccl_premul_sum(3.0))
    world.gather_single(whole, torch.full((2,), float(rank)), c10d.GatherOptions()).wait()
    # torch 2.14 has no way to name another reduction than the sum here, nor a name for the operation
    newer = hasattr(dist.ReduceOp, "boxed")
    options = c10d.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.MAX if newer else dist.ReduceOp.SUM
    world.reduce_scatter_single_coalesced([largest], [torch.full((4,), float(rank))], options).wait()
    assert seen == ["ALLREDUCE", "GATHER", "REDUCE_SCATTER_TENSOR_COALESCED" if newer else "REDUCE_SCATTER"]
    assert tripled.tolist() == [3.0 * size] * 3
    assert whole.tolist() == ([0, 0, 1, 1] if rank == 0 else [0] * 4)
    assert largest.tolist() == [size - 1] * 2

    def refuse(args):
        raise ArithmeticError("not this one")

    world.register_pre_hook(2, refuse)
    with pytest.raises(ArithmeticError, match="not this one"):
        dist.all_reduce(tripled)
    world.unregister_pre_hook(2)
    dist.all_reduce(tripled)
    assert tripled.tolist() == [3.0 * size * size] * 3


@needs_hooks
def test_hooks_see_what_gloo_lacks_and_may_refuse():
    run_torch(beyond_gloo, 2)


def completed(rank, size):
    world, seen, tensor = dist.group.WORLD, [], torch.ones(3)
    world._register_on_completion_hook(seen.append)
    with pytest.raises(RuntimeError, match="has a completion hook already"):
        world._register_on_completion_hook(print)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(2.0))
    dist.all_gather_into_tensor(torch.zeros(3 * size), tensor)
    world.allreduce(tensor).wait()
    torch.ops.c10d.barrier(torch.zeros(1), world.boxed(), [], True, -1)
    functional.wait_tensor(functional.all_reduce(tensor, "sum", world))
    world.allreduce(tensor, c10d.AllreduceOptions()).wait()  # not in a list, as torch wants it
    with pytest.raises(ValueError, match="root is 9"):
        world.broadcast(tensor, 9)
    (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
    world._wait_for_pending_works()
    kinds = ["ALLREDUCE"] * 3 + [
        "_ALLGATHER_BASE",
        "ALLREDUCE",
        "BARRIER",
        "ALLREDUCE",
        "ALLREDUCE",
        "RECV" if rank else "SEND",
    ]
    seen.sort(key=lambda one: one.seq)
    assert [one.op_type for one in seen] == [getattr(c10d.OpType, kind) for kind in kinds]
    assert all(one.active_duration == one.time_finished - one.time_started for one in seen)
    assert all(one.active_duration > timedelta(0) for one in seen)


@pytest.mark.parametrize("backend", [BACKEND, "collectives_gloo"])
def test_a_completion_hook_is_called_once_for_each_operation(backend):
    run_torch(completed, 2, backend=backend)


def broken(rank, size):
    told, tensor = [], torch.ones(3)

    def fail():
        told.append("raises")
        raise ArithmeticError("which is logged")

    def group(limit):
        made = dist.new_group(timeout=limit)
        made.register_abort_hook(1, fail)
        made.register_abort_hook(2, lambda: told.append("called"))
        made.register_abort_hook(3, lambda: told.append("removed"))
        made.unregister_abort_hook(3)
        return made

    assert dist.group.WORLD.supports_abort_hooks
    short = group(timedelta(milliseconds=200))
    dist.all_reduce(tensor, group=short)
    assert told == []
    if rank == 0:
        for error in (CollectiveTimeoutError, RuntimeError):
            with pytest.raises(error):
                dist.all_reduce(tensor, group=short, async_op=True).wait()
            assert told == ["raises", "called"]
        short.abort()
        assert told == ["raises", "called"]
    told.clear()
    dist.barrier()
    ended = group(timedelta(seconds=30))
    ended.abort()
    assert told == ["raises", "called"]
    with pytest.raises(GroupAbortedError):
        dist.all_reduce(tensor, group=ended)
    assert told == ["raises", "called"]
    dist.barrier()


@pytest.mark.parametrize("backend", [BACKEND, "collectives_gloo"])
def test_abort_hooks_are_called_once_where_a_group_breaks(backend):
    run_torch(broken, 2, backend=backend)


def recorded(rank, size):
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(torch.ones(3), group=group)
    functional.wait_tensor(functional.all_reduce(torch.ones(5), "sum", group))
    if rank == 1:
        dist.barrier()
        c10d._dump_fr_trace_file(rank, backend=BACKEND)  # as it has found nothing wrong
    else:
        with pytest.raises(CollectiveTimeoutError):
            dist.all_gather_into_tensor(torch.zeros(21), torch.ones(7), group=group)
        dist.barrier()
    # what torch does not ask a Backend of Python, nor therefore know
    assert not dist.ProcessGroup.supports_completion_hooks.fget(group)
    assert not dist.ProcessGroup.supports_abort_hooks.fget(group)
    entries = pickle.loads(c10d._dump_fr_trace(backend=BACKEND))["entries"]
    assert {entry["state"] for entry in entries} == {"scheduled"}
    return entries


@pytest.mark.full
@needs_recorder
@pytest.mark.parametrize("variable", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_torchs_analyzer_names_the_rank_that_skipped_a_call(tmp_path, variable):
    files = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace_", variable: "2000"}
    records = run_torch(recorded, 3, isolated=True, env=files)
    names = ("all_reduce", "all_reduce", "_all_gather_base", "barrier")
    entries = [(entry["profiling_name"], entry["input_sizes"], entry["retired"]) for entry in records[0]]
    assert entries == [
        (f"{BACKEND}:{name}", sizes, done)
        for name, sizes, done in zip(names, ([[3]], [[5]], [[7]], []), (True, True, False, True), strict=True)
    ]
    missing = [one for one in analyzed(tmp_path).collectives if one.missing_ranks]
    gather = [one for one in missing if one.collective_name == f"{BACKEND}:_all_gather_base"]
    assert [(one.collective_seq_id, one.missing_ranks) for one in gather] == [(3, {1})]


def unrecorded(rank, size):
    dist.all_reduce(torch.ones(3))
    return pickle.loads(c10d._dump_fr_trace(backend=BACKEND))["entries"]


@needs_recorder
def test_torchs_recorder_is_asked_for():
    assert run_torch(unrecorded, 2, isolated=True) == [[], []]


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_a_size_of_the_recorder_that_is_no_number_is_named(name):
    with pytest.raises(RankFailedError, match=f"{name} must be a number of entries, but is 'many'"):
        run_torch(completed, 2, env={name: "many"})
