"""Several collectives issued as one, and the names kept for old programs."""

from __future__ import annotations

import threading

import pytest
import torch
from harness import run_world

import collectives as dist


def fails_half_way(tensor: torch.Tensor) -> None:
    with dist._coalescing_manager():
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 5)


def coalesces(rank: int, size: int) -> None:
    small, large = torch.full((2,), float(rank)), torch.full((1000,), 1.0)
    with dist._coalescing_manager() as manager:
        assert dist.all_reduce(small) is None
        assert dist.all_reduce(large) is None
        assert small.tolist() == [rank] * 2  # not yet
    assert small.tolist() == [3] * 2
    assert large[0] == size
    assert manager.works[0].is_completed()

    # Kinds and reductions may change; the order is kept.
    gathered, part, top = torch.empty(2 * size), torch.empty(2), torch.full((1,), float(rank))
    with dist._coalescing_manager(async_ops=True) as manager:
        work = dist.all_gather_single(gathered, torch.full((2,), float(rank)), async_op=True)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        dist.reduce_scatter_tensor(part, torch.ones(2 * size))
        with pytest.raises(RuntimeError, match="wait on the manager, after its end"):
            work.wait()
    assert len(manager.works) == 3
    manager.wait()
    assert gathered.view(size, 2)[:, 0].tolist() == list(range(size))
    assert (top.item(), part.tolist()) == (size - 1, [size] * 2)

    # What raises in the body ends it without a call.
    untouched = torch.full((1,), float(rank))
    with pytest.raises(ValueError, match="root is 5"):
        fails_half_way(untouched)
    assert untouched.item() == rank
    with dist._coalescing_manager(), pytest.raises(ValueError, match="is open in this thread already"):
        dist._coalescing_manager().__enter__()
    with pytest.raises(ValueError, match="does not take tensors on meta, only on cpu"):
        dist._coalescing_manager(device=torch.device("meta")).__enter__()
    with dist._coalescing_manager(device=torch.device("cpu")):
        pass  # nothing to issue

    # Other groups, functions and threads run at once.
    other, group = torch.ones(1), dist.new_group()
    with dist._coalescing_manager(group):
        dist.all_reduce(other)
        assert other.item() == size
        thread = threading.Thread(target=dist.all_reduce, args=(other,), kwargs={"group": group})
        thread.start()
        thread.join()
        assert other.item() == size * size
        dist.barrier(group)


def coalesces_outside(rank: int, size: int) -> None:
    group = dist.new_group([1])
    tensor = torch.ones(1)
    if rank == 0:
        with pytest.warns(UserWarning, match="does nothing"), dist._coalescing_manager(group):
            dist.all_reduce(tensor, group=group)
    assert tensor.item() == 1


def end_inside(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    with dist._coalescing_manager(group):
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)


def ends_inside(rank: int, size: int) -> None:
    tensor = torch.ones(1)
    with pytest.raises(dist.GroupAbortedError, match="shut down"):
        end_inside(tensor, dist.new_group())
    assert tensor.item() == 1
    dist.barrier()


def test_a_group_that_ends_inside() -> None:
    run_world(ends_inside, 2)


def test_coalescing_on_a_rank_outside() -> None:
    run_world(coalesces_outside, 2)


def test_coalescing_manager() -> None:
    run_world(coalesces, 3)


def old_names(rank: int, size: int) -> None:
    tensors = [torch.full((2,), float(rank)), torch.full((3,), 1.0)]
    with pytest.warns(FutureWarning, match="all_reduce_coalesced is deprecated; use all_reduce"):
        assert dist.all_reduce_coalesced(tensors) is None
    assert [t[0].item() for t in tensors] == [1, 2]
    with pytest.warns(FutureWarning, match="all_reduce_coalesced") as warned:
        future = dist.all_reduce_coalesced(tensors[0], async_op=True)
    assert warned[0].filename == __file__
    future.wait()
    assert tensors[0][0].item() == 2

    outputs = [[torch.empty(2), torch.empty(1)] for _ in range(size)]
    with pytest.warns(FutureWarning, match="all_gather_coalesced is deprecated"):
        dist.all_gather_coalesced(outputs, [torch.full((2,), float(rank)), torch.full((1,), 10.0 + rank)])
    assert [[t.tolist() for t in row] for row in outputs] == [[[r, r], [10 + r]] for r in range(size)]
    with (
        pytest.warns(FutureWarning),
        pytest.raises(ValueError, match="a list for each of 2 ranks"),
    ):
        dist.all_gather_coalesced(outputs[:1], [torch.ones(1)])
    with (
        pytest.warns(FutureWarning),
        pytest.raises(ValueError, match=r"lists\[0\] has 2 tensors"),
    ):
        dist.all_gather_coalesced(outputs, [torch.ones(1)])

    flat, part = torch.empty(2), torch.empty(1)
    with pytest.warns(FutureWarning, match="use all_gather_single"):
        dist._all_gather_base(flat, torch.full((1,), float(rank)))
    with pytest.warns(FutureWarning, match="use reduce_scatter_single"):
        dist._reduce_scatter_base(part, flat)
    assert (flat.tolist(), part.item()) == ([0, 1], 2 * rank)


def test_old_names() -> None:
    run_world(old_names, 2)


def test_old_reductions() -> None:
    with pytest.warns(FutureWarning, match="use ReduceOp.SUM"):
        assert dist.reduce_op.SUM == dist.ReduceOp.SUM
    with pytest.raises(AttributeError, match="reduce_op has SUM, PRODUCT, MIN, MAX, but not 'AVG'"):
        _ = dist.reduce_op.AVG


def reduce_and_gather(tensor: torch.Tensor) -> None:
    with dist._coalescing_manager():
        dist.all_reduce(tensor)
        dist.all_gather_single(torch.empty(3), torch.ones(1))


def wrong_inside(rank: int, size: int) -> None:
    tensor = torch.ones(2)
    with pytest.raises(ValueError, match="output has 3 elements"):
        reduce_and_gather(tensor)
    dist.barrier()
    assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize("backend", ["host", "gloo"])
def test_nothing_is_sent_where_arguments_are_wrong(backend: str) -> None:
    run_world(wrong_inside, 2, backend=backend)
