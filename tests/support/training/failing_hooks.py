"""Hooks that fail on one rank, wherever they may, and what becomes of the pass and of the next one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as torch_powersgd
from conformance.test_works import eventually
from ddp_oracle import naive_average
from hook_zoo import HOOKS, power
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

from collectives.ddp import DistributedDataParallel, GradientSyncError
from collectives.ddp.optim import ZeroRedundancyOptimizer

CULPRIT = 1
WHERE = ["before", "after", "within"]


def plain(group, bucket):
    """In the style of torch's documentation."""
    work = group.allreduce([bucket.buffer().div_(group.size())])
    return work.get_future().then(lambda done: done.value()[0])


def blocking(group, bucket):
    """One that waits for its own collectives."""
    group.allreduce([bucket.buffer().div_(group.size())]).wait()
    gathered = torch.empty(group.size() * bucket.buffer().numel())
    group.all_gather_single(gathered, bucket.buffer()).wait()
    return done(bucket.buffer())


def in_steps(group, bucket):
    """One that issues its second collective when the first is done; one at a time, so that ranks agree."""

    def again(summed):
        return group.allreduce([summed.value()[0].div_(group.size())]).get_future().wait()[0] / group.size()

    future = group.allreduce([bucket.buffer()]).get_future().then(again)
    future.wait()
    return future


def by_messages(group, bucket):
    """GossipGrad: no collective at all."""
    rank, size = group.rank(), group.size()
    theirs = torch.empty_like(bucket.buffer())
    works = [group.send([bucket.buffer()], (rank + 1) % size), group.recv([theirs], (rank - 1) % size)]
    for work in works:
        work.wait()
    return done((bucket.buffer() + theirs) / 2)


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


OWN = {"plain": plain, "blocking": blocking, "in steps": in_steps, "by messages": by_messages}
"""Hooks of users; their state is the group."""

TORCHS = {
    "torch's allreduce": (lambda group: group, torch_hooks.allreduce_hook),
    "torch's fp16": (lambda group: group, torch_hooks.fp16_compress_hook),
    "torch's bf16": (lambda group: group, torch_hooks.bf16_compress_hook),
    "torch's PowerSGD": (
        lambda group: torch_powersgd.PowerSGDState(
            group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
        ),
        torch_powersgd.powerSGD_hook,
    ),
}
"""Hooks of torch, for a default group of torch's."""

EXACT = {"plain", "blocking", "in steps", "allreduce", "post local", "torch's allreduce"}


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, rows):
        return self.layers(rows)


class Failing:
    """A hook around another one that raises where and when it is told."""

    def __init__(self, hook, where, when):
        self._hook = hook
        self._where = where
        self._when = when
        self.__name__ = "failing"
        for name in ("pass_failed", "process_group"):
            if hasattr(hook, name):
                setattr(self, name, getattr(hook, name))

    def __call__(self, state, bucket):
        if not self._when(bucket):
            return self._hook(state, bucket)
        if self._where == "before":
            raise KeyError("in the hook")
        future = self._hook(state, bucket)
        if self._where == "after":
            raise KeyError("in the hook")

        def fails(done):
            done.value()
            raise KeyError("in the hook")

        return future.then(fails)


def rows(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def failing(group, name, where, place, always, make_state=None, hook=None, steps=6):
    """Trains with a hook that fails on one rank in some passes; returns what all must have in common.

    Those are the fourth pass, or the first, third, fourth and fifth.
    """
    rank = group.rank()
    module = Tower()
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0, broadcast_buffers=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    if hook is None:
        make_state, hook = (lambda group: group, OWN[name]) if name in OWN else HOOKS[name][:2]
    if name.startswith("zero"):
        optimizer = ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.SGD, group, overlap_with_ddp=True, lr=0.05
        )
        hook = hook(HOOKS["allreduce"][1], model, optimizer)
    fails_now = False
    wanted = {"first": 0, "middle": 2}[place]
    failing_hook = Failing(
        hook, where, lambda bucket: fails_now and bucket.index() == wanted and rank == CULPRIT
    )
    model.register_comm_hook(make_state(group), failing_hook)
    for step in range(steps):
        fails_now = step in ({0, 2, 3, 4} if always else {3})
        optimizer.zero_grad()
        loss = model(rows(rank, step)).square().sum()
        if fails_now:
            with pytest.raises(GradientSyncError, match="because of rank 1:") as caught:
                loss.backward()
            assert "checkpoint" not in str(caught.value)
            (reason,) = caught.value.reasons.values()
            assert set(caught.value.reasons) == {CULPRIT}
            assert f"hook failing failed on bucket {wanted}" in reason, reason
            assert "KeyError: 'in the hook'" in reason or rank != CULPRIT, reason
            assert rank != CULPRIT or "in the hook" in str(caught.value.__cause__)
            continue
        loss.backward()
        if name in EXACT:
            twin = Tower()
            twin.load_state_dict(module.state_dict())
            twin(rows(rank, step)).square().sum().backward()
            naive_average(twin.parameters(), group)
            for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
                assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
        optimizer.step()
    buckets = len(model.reducer.gradients.layouts())
    assert buckets > wanted + 1
    return [p.detach().clone() for p in module.parameters()]


def failing_later(group, name, where, place, steps=12):
    """Trains over a group that does not wait for its device, with a hook that fails on one rank in a pass.

    The others go on, rank 0 farther than rank 2, until they hear of it. All leave out the same passes.
    """
    rank = group.rank()
    module = Tower()
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0, broadcast_buffers=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    make_state, hook = (lambda group: group, OWN[name]) if name in OWN else HOOKS[name][:2]
    wanted = {"first": 0, "middle": 2}[place]
    step, told = 0, []
    failing_hook = Failing(
        hook, where, lambda bucket: step == 3 and bucket.index() == wanted and rank == CULPRIT
    )
    model.register_comm_hook(make_state(group), failing_hook)
    saved = copy.deepcopy([module.state_dict(), optimizer.state_dict()])
    for step in range(steps):
        if step == {0: 6, 1: 99, 2: 4}[rank] and not told:
            assert eventually(lambda: group._first_cause() is not None)
        try:
            optimizer.zero_grad()
            model(rows(rank, step)).square().sum().backward()
            optimizer.step()
        except GradientSyncError as error:
            told.append((step, str(error)))
            reasons = error.reasons
    assert told, "nobody told this rank"
    assert set(reasons) == {CULPRIT}
    for _, text in told:
        assert f"hook failing failed on bucket {wanted}" in text
        assert "KeyError: 'in the hook'" in text
    passes = [step for step, _ in told]
    assert passes == list(range(passes[0], passes[-1] + 1))
    assert passes[0] == 3 or rank != CULPRIT
    assert "load a checkpoint" in told[-1][1] or passes == [3]
    last = torch.tensor([float(passes[-1])])
    lasts = [torch.zeros(1) for _ in range(group.size())]
    group.allgather([lasts], [last]).wait()
    assert [group.to_host(one).item() for one in lasts] == [passes[-1]] * group.size()
    module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for step in range(steps, steps + 3):
        optimizer.zero_grad()
        model(rows(rank, step)).square().sum().backward()
        optimizer.step()
    return [group.to_host(p.detach()).clone() for p in module.parameters()]


def check(ranks, name):
    """Checks that the ranks ended with the same model, where the hook promises that."""
    if name in {"by messages", "noop"}:
        return
    for rank, parameters in enumerate(ranks):
        for place, (own, first) in enumerate(zip(parameters, ranks[0], strict=True)):
            assert torch.equal(own, first), f"{name}: parameter {place} of rank {rank} is {own}, not {first}"


__all__ = ["HOOKS", "OWN", "TORCHS", "WHERE", "check", "failing", "power"]
