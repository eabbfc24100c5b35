"""Backward passes through activation checkpoints, which run forwards again."""

from __future__ import annotations

import pytest
import torch
from ddp_oracle import data, pair, same_averages, same_pass
from on_ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from collectives.ddp import GradientSyncError


class Checkpointed(nn.Module):
    """Checkpointed layers, one of them run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last, self.spare = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, reentrant: bool, times: int, spare: bool = True) -> torch.Tensor:
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.shared, x, use_reentrant=reentrant)
        x = checkpoint(self.last, x, use_reentrant=reentrant)
        return self.spare(x) if spare else x


@pytest.mark.parametrize(
    ("reentrant", "times", "spare", "options"),
    [
        (False, 2, True, {}),
        (False, 2, False, {"find_unused_parameters": True}),
        (True, 1, True, {}),
        (True, 1, False, {"find_unused_parameters": True}),
        (True, 2, True, {"static_graph": True}),
        (True, 3, False, {"static_graph": True}),
        (True, 3, False, {"static_graph": True, "gradient_as_bucket_view": True, "batched_grad_copy": True}),
    ],
)
@on_ranks(2)
def test_activation_checkpointing(group, reentrant, times, spare, options):
    ours, naive = pair(group, Checkpointed, bucket_cap_mb=0, **options)
    for step in range(3):
        assert same_pass(ours, naive, data(group.rank(), step), reentrant, times, spare)


@pytest.mark.parametrize("static", [False, True])
@on_ranks(2)
def test_gradients_that_come_again_are_named(group, static):
    ours, _ = pair(group, Checkpointed, static_graph=static)
    times = 1 + (group.rank() == 1)
    if static:
        ours(data(group.rank()), True, 1).sum().backward()
    with pytest.raises(GradientSyncError) as caught:
        ours(data(group.rank()), True, times).sum().backward()
    message, reasons = str(caught.value), caught.value.reasons
    assert list(reasons) == [1]
    assert "2 of 8 parameters got" in reasons[1]
    assert "shared.weight" in reasons[1]
    assert ("leave it out" if static else "use_reentrant=False") in message


@on_ranks(2)
def test_static_graph_with_unused_parameters_and_no_sync(group):
    """Unused parameters and ``no_sync`` with a static graph: what torch refuses or gets wrong."""
    ours, naive = pair(group, Checkpointed, static_graph=True)
    for step in range(4):
        spare = group.rank() == 0
        for model in (ours, naive):
            if step % 2:
                model.zero_grad()
            elif model is ours:
                with ours.no_sync():
                    ours(data(group.rank(), 9 + step), False, 1, spare).sum().backward()
            else:
                naive(data(group.rank(), 9 + step), False, 1, spare).sum().backward()
            model(data(group.rank(), step), False, 1, spare).sum().backward()
        assert same_averages(ours, naive)
    assert ours._get_ddp_logging_data()["can_set_static_graph"]


class Deep(nn.Module):
    """A checkpoint within a checkpoint, deeper than the engine goes on one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(70))

    def forward(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        if first == len(self.layers):
            return x
        return checkpoint(lambda y: self(torch.tanh(self.layers[first](y)), first + 1), x, use_reentrant=True)


@pytest.mark.full
@pytest.mark.parametrize("static", [False, True])
@on_ranks(2)
def test_checkpoints_on_several_threads_of_the_engine(group, static):
    ours, naive = pair(group, Deep, static_graph=static, bucket_cap_mb=0.0005)
    assert all(same_pass(ours, naive, data(group.rank(), step).requires_grad_()) for step in range(2))
