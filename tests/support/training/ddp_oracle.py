"""Data parallel training done naively: what DistributedDataParallel must equal, and models to try it on.

The naive solution (PyTorch Distributed, VLDB 2020, section 3.2.1): after the backward pass, average the
gradients one by one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from harness import current_store
from torch import nn

from collectives import AllreduceOptions, BroadcastOptions, ProcessGroup, ReduceOp
from collectives.core.operations import ALL_REDUCE
from collectives.ddp import DistributedDataParallel, GradientSyncError
from collectives.ddp.reducer import buckets

AVERAGE = AllreduceOptions(reduceOp=ReduceOp.AVG)


def naive_broadcast(tensors: Iterable[torch.Tensor], group: ProcessGroup) -> None:
    """Gives all ranks rank 0's values."""
    with torch.no_grad():
        for tensor in tensors:
            group.broadcast([tensor.data], BroadcastOptions(rootRank=0)).wait()


def naive_average(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Averages ``.grad`` one by one; one that a rank lacks counts as zeros, one that all lack stays away."""
    with torch.no_grad():
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            holders = torch.tensor([int(parameter.grad is not None)])
            group.allreduce([holders]).wait()
            if not int(holders):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            wire = torch.view_as_real(parameter.grad) if parameter.is_complex() else parameter.grad
            group.allreduce([wire], AVERAGE).wait()


class Layers(nn.Module):
    """Four layers, of which a call runs those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, run: str = "0123") -> torch.Tensor:
        for index in run:
            x = torch.tanh(self.layers[int(index)](x))
        return x

    @staticmethod
    def inputs(rank: int, step: int = 0) -> torch.Tensor:
        return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))


class Zoo(nn.Module):
    """A little of everything: buffers of two data types, channels_last, tied, frozen, double and complex
    parameters, a scalar, a layer used twice, and a branch to leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.inner = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.inner.weight
        self.wide = nn.Linear(16, 3).double()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.phase = nn.Parameter(torch.complex(torch.ones(3), torch.full((3,), 0.25)))
        self.branch = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, skip: bool = False) -> dict[str, torch.Tensor]:
        x = self.norm(self.conv(x)).flatten(1)
        x = self.frozen(x) + self.inner(torch.tanh(self.inner(x))) + self.tied(x)
        x = self.wide((x * self.scale).double())
        x = (x.to(torch.complex64) * self.phase).abs()
        return {"hidden": x, "out": x if skip else self.branch(x)}

    @staticmethod
    def inputs(seed: int) -> torch.Tensor:
        return torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(seed))


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns copies of parameters, buffers and gradients by name."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            state[f"{name}.grad"] = parameter.grad.detach().clone()
    return state


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Returns the names that are not bitwise equal in both."""
    return [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
    ]


# ---- small models beside their naive twins ----------------------------------------------------------------


def data(rank, seed=0, rows=2):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(10 * seed + rank))


def grads(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def same_averages(ours, naive):
    """Averages the gradients of a twin naively; returns whether those of ours are the same."""
    naive_average(naive.parameters(), ours.process_group)
    return equal(grads(ours.module), grads(naive))


def same_pass(ours, naive, *inputs):
    """Trains ours and its twin in one pass; returns whether both have the same averages."""
    for model in (ours, naive):
        model.zero_grad()
        model(*inputs).square().sum().backward()
    return same_averages(ours, naive)


def told(loss):
    """Runs a backward pass; returns what all ranks are told of it, nothing where it went well."""
    try:
        loss.backward()
    except GradientSyncError as error:
        return str(error)
    return ""


def pair(group, make=None, **options):
    """Returns a module to train with ours and an equal one to train naively."""
    torch.manual_seed(5)
    module = make() if make else nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    torch.manual_seed(5)
    naive = make() if make else nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    return DistributedDataParallel(module, process_group=group, **options), naive


class Marked(torch.autograd.Function):
    """Notes when its backward runs, or breaks off there."""

    log: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx, x, word):
        ctx.word = word
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Marked.log.append(ctx.word)
        if ctx.word == "boom":
            raise ValueError("in the user's own backward")
        return grad, None


class Chain(nn.Module):
    """Three layers with marks between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

    def forward(
        self, x: torch.Tensor, words: tuple[str, str, str] = ("after a", "after b", "after c")
    ) -> torch.Tensor:
        for layer, word in zip((self.a, self.b, self.c), words, strict=True):
            x = Marked.apply(layer(x), word)
        return x


def averages(model, group):
    """Returns whether a pass leaves the averages in ``.grad``."""
    x = torch.randn(2, 2, generator=torch.Generator().manual_seed(group.rank()))
    return same_pass(model, copy.deepcopy(model.module), x)


@contextlib.contextmanager
def torch_over_gloo(group):
    """Context in which torch's default group has the ranks of a group, over Gloo."""
    store = dist.PrefixStore("torch", current_store())
    dist.init_process_group(
        "gloo", store=store, rank=group.rank(), world_size=group.size(), timeout=timedelta(seconds=30)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def same_gradients(ours, theirs, equal=torch.equal):
    """Returns the names of the gradients that differ."""
    return [
        name
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True)
        if (p.grad is None) != (q.grad is None) or (p.grad is not None and not equal(p.grad, q.grad))
    ]


class Launches:
    """Notes what a group all-reduces."""

    def __init__(self, group) -> None:
        self.sizes: list[int] = []
        checked, fast = group.allreduce, group.fast_collective

        def noted(tensors, *args, **kwargs):
            self.sizes.append(tensors[0].numel())
            return checked(tensors, *args, **kwargs)

        def noted_fast(opcode, output, *args, **kwargs):
            work = fast(opcode, output, *args, **kwargs)
            if work is not None and opcode == ALL_REDUCE.opcode:
                self.sizes.append(output.numel())
            return work

        group.allreduce, group.fast_collective = noted, noted_fast


@contextlib.contextmanager
def in_place_from(nbytes: int) -> Iterator[None]:
    """Context, or decorator, in which gradients of so many bytes or more are reduced in place."""
    before, buckets.IN_PLACE_BYTES = buckets.IN_PLACE_BYTES, nbytes
    try:
        yield
    finally:
        buckets.IN_PLACE_BYTES = before


def follow(ours, naive, plan, sent=None):
    """Follows a plan of passes of :class:`Layers`, against the naive solution.

    Args:
        ours: the wrapped layers.
        naive: their twin.
        plan: for each pass the layers to run, by rank; after a "-" under ``no_sync``.
        sent: notes what ours all-reduces.

    Returns:
        For each synchronised pass the gradients that differ, and the sizes that were all-reduced in it.
    """
    group = ours.process_group
    wrong, sizes = [], []
    for step, layers in enumerate(plan):
        run = layers[group.rank()]
        x = Layers.inputs(group.rank(), step)
        if sent is not None:
            sent.sizes.clear()
        with ours.no_sync() if run.startswith("-") else contextlib.nullcontext():
            ours(x, run.strip("-")).sum().backward()
        naive(x, run.strip("-")).sum().backward()
        if not run.startswith("-"):
            sizes.append([] if sent is None else list(sent.sizes))
            naive_average(naive.parameters(), group)
            wrong.append(same_gradients(ours.module, naive))
    return wrong, sizes
