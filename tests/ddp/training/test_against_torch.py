"""Training equals that of torch's DistributedDataParallel over Gloo, to rounding, on models of real kinds."""

from __future__ import annotations

import contextlib

import pytest
import torch
from ddp_oracle import torch_over_gloo
from harness import run_ranks
from torch import nn

from collectives.ddp import DistributedDataParallel

OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 0.01},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
}


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(32, 50)
        self.spare = nn.Linear(32, 50)

    def forward(self, x, spare):
        x = self.blocks(self.words(x))
        return {"scores": self.spare(x) if spare else self.head(x)}

    @staticmethod
    def inputs(generator):
        return torch.randint(50, (2, 7), generator=generator)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(16, 10)
        self.spare = nn.Linear(16, 10)

    def forward(self, x, spare):
        x = self.body(x)
        return {"scores": self.spare(x) if spare else self.head(x)}

    @staticmethod
    def inputs(generator):
        return torch.randn(3, 3, 12, 12, generator=generator)


def train(wrap, kind, rank, unused, passes):
    """Returns the state after some steps of so many passes, of which the last one averages."""
    torch.manual_seed(7 + rank)
    module = kind()
    for parameter in () if unused else module.spare.parameters():
        parameter.requires_grad_(False)
    model = wrap(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for number in range(passes):
            generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
            with contextlib.nullcontext() if number == passes - 1 else model.no_sync():
                spare = unused and (step + rank) % 2 == 1
                model(kind.inputs(generator), spare)["scores"].square().mean().backward()
        optimizer.step()
    return module.state_dict()


def compare(group, kind, names):
    far = {}
    with torch_over_gloo(group):
        for name in names:
            options = OPTIONS[name]
            unused = "find_unused_parameters" in options
            passes = (
                1 if "static_graph" in options else 2
            )  # torch's fails where a static graph begins in no_sync
            ours = train(
                lambda module, o=options: DistributedDataParallel(module, process_group=group, **o),
                kind, group.rank(), unused, passes,
            )  # fmt: skip
            theirs = train(
                lambda module, o=options: nn.parallel.DistributedDataParallel(module, **o),
                kind, group.rank(), unused, passes,
            )  # fmt: skip
            assert ours.keys() == theirs.keys()
            far[name] = [
                key for key in ours if not torch.allclose(ours[key], theirs[key], rtol=2e-4, atol=2e-6)
            ]
    return far


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Transformer, Convolutions])
def test_equals_torch_over_gloo(kind):
    names = list(OPTIONS)
    for far in run_ranks(compare, 2, kind, names, backend="host"):
        assert far == {name: [] for name in names}
