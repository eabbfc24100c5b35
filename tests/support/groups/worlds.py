"""What tests of worlds that change share: sums over a group, places to meet, the handles of processes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
from rank_server import current_store

import collectives as dist

LONG = timedelta(seconds=60)


def total(group: dist.ProcessGroup | None = None, count: int = 3) -> int:
    """Returns how many ranks take part in an all-reduce."""
    tensor = torch.ones(count)
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(tensor[0]).all()
    return int(tensor[0])


def sum_of_ranks(group: dist.ProcessGroup | None = None) -> float:
    """Returns the all-reduced sum of global ranks, so that it depends on who takes part."""
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def meet(name: str, rank: int, ranks: Iterable[int]) -> None:
    """Waits for processes of the test, whatever groups they are in; called by these."""
    store = current_store()
    store.set(f"{name} {rank}", "")
    store.wait([f"{name} {other}" for other in ranks], LONG)


def handles_of(name: str, rank: int, ranks: Iterable[int]) -> list[str]:
    """Returns the handles of processes by their numbers; called by these."""
    store = current_store()
    store.set(f"{name}/{rank}", dist.get_reconfigure_handle())
    return [store.get(f"{name}/{other}").decode() for other in ranks]
