"""Training takes no more memory than with torch's wrapper and the same arguments, as the allocator counts."""

from __future__ import annotations

import contextlib
import gc
import itertools
from unittest import mock

import pytest
import torch
from ddp_oracle import torch_over_gloo
from harness import run_ranks
from torch import nn

from collectives.core import profiling
from collectives.ddp import DistributedDataParallel

OPTIONS = {
    "none": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "views, unused": {
        "gradient_as_bucket_view": True,
        "find_unused_parameters": True,
        "bucket_cap_mb": 1,
    },
    "static": {"static_graph": True},
    "views, static": {"gradient_as_bucket_view": True, "static_graph": True},
    "each alone": {"bucket_cap_mb": 0.001},
    "views, small buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
}

SLACK = 64 * 1024
"""Bytes for tails, metadata and the like: less than a hundredth of the gradients."""


class Layers(nn.Module):
    """Small, middling and large parameters, 7 MB in all, registered in another order than used."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 64, 128, 512, 512, 512, 1024, 64]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.first = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.first, *self.layers):
            x = torch.tanh(layer(x))
        return x


@contextlib.contextmanager
def memory_only():
    """Has a profiler record allocations and no operations.

    Gloo completes a future before it records the end of the operation, on a thread of its own. A profiler
    that stops between the two has its memory written to after it was freed, and the process may crash. Events
    of ours hold the tensors of an operation until a thread ends them.
    """
    torch._C._autograd._enable_record_function(False)
    try:
        with mock.patch.object(profiling, "enabled", return_value=False):
            yield
    finally:
        torch._C._autograd._enable_record_function(True)


def peak_bytes(wrap, set_to_none):
    """Returns the most that was allocated at a time while a module was wrapped and trained, beyond it."""
    module = Layers()
    gc.collect()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile, memory_only():
        model = wrap(module)
        for _ in range(4):
            model.zero_grad(set_to_none=set_to_none)
            model(torch.ones(2, 64)).square().sum().backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def compare(group, set_to_none):
    found = {}
    with torch_over_gloo(group):
        for name, options in OPTIONS.items():
            found[name] = (
                peak_bytes(
                    lambda m, o=options: DistributedDataParallel(m, process_group=group, **o), set_to_none
                ),
                peak_bytes(lambda m, o=options: nn.parallel.DistributedDataParallel(m, **o), set_to_none),
            )
    return found


BUCKET = 3 * 1024 * 1024
"""Largest bucket at a cap of 1 MiB: just below the cap before its last gradient, of 2 MiB, came."""


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.full
def test_needs_no_more_than_torch(set_to_none):
    gradients = sum(4 * p.numel() for p in Layers().parameters())
    for found in run_ranks(compare, 2, set_to_none, backend="host"):
        assert all(theirs > gradients for _, theirs in found.values())  # the count sees gradients
        allowed = dict.fromkeys(OPTIONS, SLACK)
        if not set_to_none:  # torch's does not lay out its buckets again here; ours moves them one by one
            allowed["views, unused"] += BUCKET
        assert {name: (o, t) for name, (o, t) in found.items() if o > t + allowed[name]} == {}
