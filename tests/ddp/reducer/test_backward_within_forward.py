"""Backward passes that a module runs within its forward."""

from __future__ import annotations

import pytest
import torch
from ddp_oracle import Chain, data, equal, grads, naive_average, pair
from on_ranks import on_ranks
from torch import nn

from collectives.ddp import DistributedDataParallel, GradientSyncError

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])


class Manual(nn.Module):
    """Runs backward passes of its own within forward, as manual optimization does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Chain(), Chain()

    def forward(self, x: torch.Tensor, losses: str) -> torch.Tensor:
        for name in losses:
            loss = (self.first if name == "1" else self.second)(x).sum()
            loss.backward()
        return loss.detach()


@VIEWS
@pytest.mark.parametrize("losses", ["1", "12"])
@on_ranks(2)
def test_a_backward_pass_within_forward_is_averaged(group, view, losses):
    options = {"gradient_as_bucket_view": view, "find_unused_parameters": True}
    ours, naive = pair(group, Manual, **options)
    for step in range(3):
        x = data(group.rank(), step)
        if step == 1:
            with ours.no_sync():
                ours(x, losses)
            naive(x, losses)
            continue
        ours(x, losses)
        for name in losses:
            naive(x, name)
            naive_average(naive.parameters(), group)
        assert equal(grads(ours.module), grads(naive))
        ours.zero_grad()
        naive.zero_grad()
    assert ours.reducer.passes == 2 * len(losses)


@on_ranks(2)
def test_ranks_that_have_joined_shadow_backward_passes_within_forward(group):
    ours = DistributedDataParallel(Manual(), process_group=group, find_unused_parameters=True)
    with ours.join():
        for step in range(2 + group.rank()):
            ours.zero_grad()
            ours(data(group.rank(), step), "12")
    assert ours.reducer.passes == 6


@on_ranks(2)
def test_a_backward_pass_within_forward_is_checked(group):
    ours = DistributedDataParallel(Manual(), process_group=group)
    with pytest.raises(GradientSyncError, match=r"got no gradient: second\."):
        ours(data(group.rank()), "1")


@on_ranks(2)
def test_a_forward_that_raised_has_no_later_pass(group):
    ours = DistributedDataParallel(Manual(), process_group=group, find_unused_parameters=True)
    ours.module.second.register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ours(data(group.rank()), "12")
    loss = ours.module.first(data(group.rank())).sum()
    loss.backward()  # of no forward: stays on this rank
    assert ours.reducer.passes == 1
