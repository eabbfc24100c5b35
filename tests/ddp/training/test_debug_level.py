"""Training at debug level DETAIL: groups that compare calls compare those of the wrapper, too."""

from __future__ import annotations

from datetime import timedelta

import pytest
from ddp_oracle import data, pair, same_pass
from harness import current_store
from on_ranks import on_ranks
from torch import nn

import collectives
from collectives import CollectiveMismatchError
from collectives.ddp import DistributedDataParallel

OPTIONS = [{}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}, {"static_graph": True}]


@on_ranks(2, None)
def test_what_the_wrapper_sends_is_compared(rank, size):
    """Features DB-12 and DB-13.

    Trains; then models that differ in a shape are told to all ranks.
    """
    collectives.set_debug_level(collectives.DebugLevel.DETAIL)
    try:
        collectives.init_process_group(
            "gloo", store=current_store(), rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
    finally:
        collectives.set_debug_level(collectives.DebugLevel.OFF)
    group = collectives.group.WORLD
    assert type(group).__name__ == "CheckedGroup"
    for options in OPTIONS:
        ours, naive = pair(group, bucket_cap_mb=0, **options)
        assert all(same_pass(ours, naive, data(rank, step)) for step in range(3))
    other = DistributedDataParallel(nn.Linear(3, 3 + rank), init_sync=False)
    with pytest.raises(CollectiveMismatchError) as caught:
        other(data(rank)).sum().backward()
    collectives.destroy_process_group()
    assert all(words in str(caught.value) for words in ("rank 0", "rank 1", "all_reduce"))
