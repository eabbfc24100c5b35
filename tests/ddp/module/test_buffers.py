"""Values that are sent and change nothing are not seen by autograd: several forwards, one backward pass."""

from __future__ import annotations

import contextlib

import pytest
import torch
from ddp_oracle import torch_over_gloo
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn

from collectives.ddp import DistributedDataParallel, Join, MixedPrecision, convert_sync_batchnorm
from collectives.ddp.model_averaging import average_parameters


class OwnNorm(nn.Module):
    """Batch normalisation in a class of the user's, of which each rank has other statistics."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.variance, self.weight, None, training=True)


class Buffered(nn.Module):
    """Buffers of several kinds, all of which the graph saves."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.places = nn.Embedding(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.own = OwnNorm()
        self.head = nn.Linear(8, 4)
        self.register_buffer("position_ids", torch.arange(6).expand(1, -1).clone())
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("phase", torch.polar(torch.ones(8), torch.linspace(0, 1, 8)))
        self.register_buffer("causal", torch.ones(6, 6, dtype=torch.bool).tril())
        self.register_buffer("bias", torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf))
        self.register_buffer("table", torch.tensor([0.0, -0.0, torch.nan, 1.0]))
        self.register_buffer("few_bits", torch.ones(8, dtype=torch.bfloat16))

    def forward(self, ids):
        x = self.words(ids) + self.places(self.position_ids)
        x = x * self.scale * self.few_bits
        scores = (x @ x.mT + self.bias).masked_fill(~self.causal, -torch.inf)
        x = scores.softmax(-1) @ x + (x.to(torch.complex64) * self.phase).abs()
        x = self.own(self.norm(x.flatten(0, 1)))
        return self.head(x) * self.table.nan_to_num()


def batch(rank, number):
    return torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(100 * rank + number))


def two_forwards(wrap, rank, change=lambda module: module):
    """Trains by one backward pass over two forwards, as contrastive losses do; returns the final state."""
    torch.manual_seed(3 + rank)
    model = wrap(change(Buffered()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        first, second = (model(batch(rank, 2 * step + half)) for half in range(2))
        (first * second).sum().backward()
        optimizer.step()
    return model.module.state_dict()


@on_ranks(2)
def test_two_forwards_before_one_backward_pass_train_as_with_torch(group):
    with torch_over_gloo(group):
        theirs = two_forwards(nn.parallel.DistributedDataParallel, group.rank())
    ours = two_forwards(lambda module: DistributedDataParallel(module, process_group=group), group.rank())
    assert [
        name
        for name in theirs
        if not torch.equal(ours[name], theirs[name]) and name != "table"  # where NaN is
    ] == []


def every_way(group, way):
    options = {}
    change = nn.Identity()
    context = contextlib.nullcontext()
    if way == "mixed":
        options["mixed_precision"] = MixedPrecision(torch.float64, torch.float32, torch.float64)
    elif way == "static":
        options["static_graph"] = True
    elif way == "sync batch norm":

        def change(module):
            return convert_sync_batchnorm(module, group)

    model = None

    def wrap(module):
        nonlocal model
        model = DistributedDataParallel(module, process_group=group, **options)
        if way == "join":
            context.enter_context(Join([model]))
        return model

    if way == "join":
        context = contextlib.ExitStack()
    with context:
        state = two_forwards(wrap, group.rank(), change)
    return {name: value.nan_to_num() for name, value in state.items()}


@pytest.mark.parametrize("way", ["join", "mixed", "static", "sync batch norm"])
def test_two_forwards_train_in_every_way(way) -> None:
    first, second = run_ranks(every_way, 2, way, backend="host")
    for name in first:  # statistics are those of the own last batch
        assert "norm" in name or "own" in name or torch.equal(first[name], second[name]), name


def graph_of(module):
    """Returns a loss whose graph saves all parameters and buffers of a module with a few kinds of both."""
    large, small, phase = module.large, module.small, module.phase
    return (
        (large * module.places * small[:1]).sum()
        + (phase * phase).abs().sum()
        + (small * module.few_bits).sum()
    )


class Saved(nn.Module):
    def __init__(self):
        super().__init__()
        self.large = nn.Parameter(torch.linspace(-1, 1, 600 * 600).view(600, 600))  # a message of its own
        self.small = nn.Parameter(torch.ones(5))
        self.phase = nn.Parameter(torch.polar(torch.ones(3), torch.ones(3)))
        self.register_buffer("places", torch.arange(600))
        self.register_buffer("few_bits", torch.tensor([1.0, torch.nan, -0.0, 2.0, 3.0], dtype=torch.float16))

    def forward(self, x):
        return graph_of(self) * x


def writers(group, how):
    """Returns whether autograd takes a graph for good after other ranks' equal values came, then others."""
    found = []
    for differs in (False, True):
        module = Saved()
        loss = graph_of(module)
        if differs and group.rank() == 1:
            module.small.data.add_(1)
            module.places.data.add_(1)
        if how == "wrap":
            DistributedDataParallel(module, process_group=group)
        elif how == "average":
            average_parameters(module.parameters(), group)
        else:
            model = DistributedDataParallel(
                module, process_group=group, init_sync=False, broadcast_buffers=False
            )
            with model.join():
                pass
        try:
            loss.backward()
            found.append("fine")
        except RuntimeError as error:
            found.append("modified" if "modified by an inplace operation" in str(error) else str(error))
    return found


@pytest.mark.parametrize(
    ("how", "written"),
    [("wrap", {1}), ("average", {0, 1}), ("join", {0})],
)
def test_only_values_that_change_are_seen_by_autograd(how, written) -> None:
    for rank, found in enumerate(run_ranks(writers, 2, how, backend="host")):
        assert found == ["fine", "modified" if rank in written else "fine"]


@on_ranks(2)
def test_validation_in_inference_mode_before_training(group):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = DistributedDataParallel(module, process_group=group)
    x = torch.randn(4, 2)
    with torch.inference_mode():
        model(x)
    for _ in range(2):
        model(x).sum().backward()
