"""Every communication hook on one training loop: sparse gradients, uneven inputs, any group."""

from __future__ import annotations

import torch
from torch import nn

from collectives.ddp import DistributedDataParallel, Join
from collectives.ddp.hooks.compression import (
    AdaptiveState,
    OneBitState,
    QuantizedAllreduceState,
    TopKState,
    adaptive_hook,
    one_bit_hook,
    quantized_allreduce_hook,
    top_k_hook,
)
from collectives.ddp.hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from collectives.ddp.hooks.debugging_hooks import noop_hook
from collectives.ddp.hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from collectives.ddp.hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from collectives.ddp.hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from collectives.ddp.optim import ZeroRedundancyOptimizer


def power(group):
    return PowerSGDState(group, 2, start_powerSGD_iter=2, min_compression_rate=0.5)


EXACT, ROUNDED, COMPRESSED = (0.0, 0.0), (1e-6, 0.02), (1e-3, 0.7)
"""How far from plain training a hook ends, as a part of the way from the beginning: at least and at most."""

HOOKS = {
    "none": (None, None, EXACT),
    "allreduce": (lambda group: group, allreduce_hook, EXACT),
    "post local": (lambda group: PostLocalSGDState(group, group, 2), post_localSGD_hook, EXACT),
    "zero": (lambda group: group, hook_with_zero_step, EXACT),
    "zero interleaved": (lambda group: group, hook_with_zero_step_interleaved, EXACT),
    "fp16": (lambda group: group, fp16_compress_hook, ROUNDED),
    "bf16": (lambda group: group, bf16_compress_hook, ROUNDED),
    "wrapped": (lambda group: group, fp16_compress_wrapper(allreduce_hook), ROUNDED),
    "8 bits": (lambda group: group, quantization_pertensor_hook, ROUNDED),
    "8 bits by block": (lambda group: group, quantization_perchannel_hook, ROUNDED),
    "8 bits in parts": (lambda group: QuantizedAllreduceState(group, 1), quantized_allreduce_hook, ROUNDED),
    "low rank": (power, powerSGD_hook, COMPRESSED),
    "low rank, batched": (power, batched_powerSGD_hook, COMPRESSED),
    "low rank in 16 bits": (power, bf16_compress_wrapper(powerSGD_hook), COMPRESSED),
    "one bit": (lambda group: OneBitState(group, 1), one_bit_hook, COMPRESSED),
    "top k": (lambda group: TopKState(group, 0.1, 1), top_k_hook, COMPRESSED),
    "adaptive": (lambda group: AdaptiveState(group, start_iter=1, interval=2), adaptive_hook, COMPRESSED),
    "noop": (lambda _: None, noop_hook, (0.0, 9.0)),
}
"""Makes the state; the hook; and how far it goes from plain training."""


class Reader(nn.Module):
    """Words to numbers; the gradients of the words are sparse where they may be."""

    def __init__(self, *, sparse):
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(16, 12, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12), nn.Linear(12, 3))

    def forward(self, words):
        return self.layers(self.words(words).sum(1))


def flat(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()


def train(group, name, sparse=True, wrapper=DistributedDataParallel):
    """Trains on uneven inputs; returns the parameters at first, after each step and in the end, and calls."""
    make, hook, _ = HOOKS[name]
    sparse = sparse and not name.startswith("zero")
    module = Reader(sparse=sparse)
    ddp = wrapper(module, process_group=group, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    joinables = [ddp]
    if name.startswith("zero"):
        optimizer = ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.SGD, group, overlap_with_ddp=True, lr=0.05
        )
        hook = hook(allreduce_hook, ddp, optimizer)
        joinables.append(optimizer)
    calls = []
    if hook is not None:

        def counted(state, bucket):
            calls.append(bucket.index())
            return hook(state, bucket)

        counted.updates_parameters = getattr(hook, "updates_parameters", False)
        counted.averages_a_part = getattr(hook, "averages_a_part", False)
        ddp.register_comm_hook(make(group), counted)
    path = [flat(module)]
    with Join(joinables):
        for step in range(6 + 2 * group.rank()):
            generator = torch.Generator().manual_seed(100 * step + group.rank())
            words = torch.randint(16, (8, 4), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(words), words.sum(1) % 3).backward()
            assert module.words.weight.grad.is_sparse == sparse
            optimizer.step()
            path.append(flat(module))
    return path, flat(module), len(calls)


def train_with_every_hook(group, wrapper=DistributedDataParallel):
    """Returns what :func:`train` does, by name of the hook, and without one on dense gradients."""
    ours = wrapper is DistributedDataParallel  # others take no sparse gradients with a hook
    hooks = [name for name in HOOKS if ours or not name.startswith("zero")]
    return {
        "dense": train(group, "none", False, wrapper),
        **{name: train(group, name, ours, wrapper) for name in hooks},
    }


def check(ranks):
    """Checks that the ranks stay together with every hook, and how far it leads from plain training."""
    last = ranks[-1]
    for name, (_, hook, (least, most)) in HOOKS.items():
        if name not in last:
            continue
        path, final, calls = last[name]
        assert (calls > 0) == (hook is not None), name
        plain_path, plain, _ = last["dense" if name.startswith("zero") else "none"]
        for other, other_final, other_calls in (rank[name] for rank in ranks):
            assert other_calls == calls, name  # ranks without inputs run the hook as well
            assert torch.equal(other_final, path[-1]), name
            if name == "noop":
                continue
            assert all(map(torch.equal, other, path)), name
        assert torch.equal(path[0], plain_path[0])
        assert torch.isfinite(final).all(), name
        way = float((final - plain).norm() / (plain - path[0]).norm())
        assert least <= way <= most, (name, way)
    paths = [rank["noop"][0] for rank in ranks]
    assert not torch.equal(paths[0][1], paths[1][1])
