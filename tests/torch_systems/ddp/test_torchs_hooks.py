"""torch's communication hooks on torch's DistributedDataParallel: over our groups as over Gloo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    _orthogonalize,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch_world import BACKEND, run_torch

STEPS = 8


def power(rank: int = 1, **options: Any) -> PowerSGDState:
    return PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=0.5, **options)


class Descent:
    """An optimizer in the form that torch's hooks take."""

    def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        parameter.detach().add_(gradient, alpha=-0.05)


def overlapped(hook: Callable[..., Any]) -> Callable[..., Any]:
    state = optimizer_overlap_hooks._OptimizerHookState(Descent())
    return optimizer_overlap_hooks._hook_then_optimizer(hook, state)


def local_then_global() -> PostLocalSGDState:
    return PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=4)


def unnamed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Hides the name of a hook: torch lets those called bf16 register for CUDA only."""

    def call(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with its classes
        return hook(state, bucket)

    return call


REGISTER = {
    "allreduce": lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16": lambda ddp: ddp.register_comm_hook(None, unnamed(default_hooks.bf16_compress_hook)),
    "wrapped": lambda ddp: ddp.register_comm_hook(
        None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "noop": lambda ddp: ddp.register_comm_hook(None, debugging_hooks.noop_hook),
    "post local": lambda ddp: ddp.register_comm_hook(local_then_global(), post_localSGD_hook),
    "then optimizer": lambda ddp: ddp.register_comm_hook(None, overlapped(default_hooks.allreduce_hook)),
    "by name": lambda ddp: register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, ddp),
    "built in": lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
}
"""Hooks that issue their collectives before they return."""

REGISTER_WAITING = {
    "powerSGD": lambda ddp: ddp.register_comm_hook(power(), powerSGD_hook),
    "powerSGD of rank 2": lambda ddp: ddp.register_comm_hook(power(2, warm_start=False), powerSGD_hook),
    "batched powerSGD": lambda ddp: ddp.register_comm_hook(power(), batched_powerSGD_hook),
    "wrapped powerSGD": lambda ddp: ddp.register_comm_hook(
        power(), unnamed(default_hooks.bf16_compress_wrapper(powerSGD_hook))
    ),
    "powerSGD, then optimizer": lambda ddp: ddp.register_comm_hook(power(), overlapped(powerSGD_hook)),
}
"""Hooks whose callbacks issue collectives and wait for them; over Gloo, those of several buckets mix."""


def orthogonalizes_matrices() -> bool:
    """Returns whether torch's helper takes what torch's ``batched_powerSGD_hook`` hands it."""
    try:
        _orthogonalize(torch.eye(2))
    except AssertionError:
        return False
    return True


BROKEN = set() if orthogonalizes_matrices() else {"batched powerSGD"}


def hook_in_order(ddp: DistributedDataParallel) -> None:
    """Has each bucket's hook waited for before the next one's begins."""
    register = ddp.register_comm_hook

    def waiting(state: Any, hook: Callable[..., Any]) -> None:
        def call(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with its classes
            future = hook(state, bucket)
            future.wait()
            return future

        register(state, call)

    ddp.register_comm_hook = waiting  # type: ignore[method-assign]


def train(
    rank: int,
    size: int,
    register: Callable[[DistributedDataParallel], Any],
    bucket_cap_mb: float,
    in_order: bool = False,
) -> Any:
    torch.manual_seed(4)
    module = torch.nn.Sequential(
        torch.nn.Linear(12, 40),
        torch.nn.Tanh(),
        torch.nn.Linear(40, 30),
        torch.nn.Tanh(),
        torch.nn.Linear(30, 3),
    )
    ddp = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb)
    if in_order:
        hook_in_order(ddp)
    register(ddp)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(STEPS):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def train_with_all(rank: int, size: int, turns: int) -> dict[str, torch.Tensor]:
    found = {}
    for turn in range(turns):
        for name, register in REGISTER.items():
            found[f"{name} {turn}"] = train(rank, size, register, bucket_cap_mb=0.002)
        for name, register in REGISTER_WAITING.items():
            if name not in BROKEN:
                found[f"{name} {turn}"] = train(rank, size, register, bucket_cap_mb=25)
                continue
            with pytest.raises(AssertionError):
                train(rank, size, register, bucket_cap_mb=25)
    return found


@pytest.fixture
def load() -> Iterator[None]:
    """Keeps every core busy with something else."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    yield
    for process in busy:
        process.kill()
        process.wait()


def check(turns: int, backend: str = BACKEND) -> None:
    over_gloo = run_torch(train_with_all, 2, 1, backend="gloo", timeout=300)
    ours = run_torch(train_with_all, 2, turns, backend=backend, timeout=300)
    for name in (REGISTER | REGISTER_WAITING).keys() - BROKEN:
        for turn in range(turns):
            first, second = (of_rank[f"{name} {turn}"] for of_rank in ours)
            assert torch.equal(first, over_gloo[0][f"{name} 0"]), name
            assert torch.equal(second, over_gloo[1][f"{name} 0"]), name
            assert torch.equal(first, second) == (name != "noop"), name


def test_every_hook() -> None:
    check(1)


def train_by_buckets(rank: int, size: int, turns: int, in_order: bool) -> dict[str, list[torch.Tensor]]:
    """Trains with several buckets; cores that are busy at different times change the order of threads."""
    return {
        name: [train(rank, size, register, 0.002, in_order) for _ in range(turns)]
        for name, register in REGISTER_WAITING.items()
        if name not in BROKEN
    }


def check_buckets(turns: int) -> None:
    in_order, _ = run_torch(train_by_buckets, 2, 1, True, backend="gloo", timeout=300)
    for of_rank in run_torch(train_by_buckets, 2, turns, False, timeout=300):
        for name, found in of_rank.items():
            assert all(torch.equal(one, in_order[name][0]) for one in found), name


def test_callbacks_of_several_buckets_issue_collectives_in_one_order() -> None:
    check_buckets(4)


@pytest.mark.full
def test_callbacks_of_several_buckets_under_load(load: None) -> None:
    check_buckets(4)


@pytest.mark.full
def test_every_hook_on_other_groups() -> None:
    check(1, "collectives_gloo")
    check(1, "collectives_round_robin")
