"""Training on uneven inputs: ranks that have none left go along with the others, and nothing hangs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from ddp_oracle import Zoo, differences, naive_average
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn
from uneven_inputs import SUM, Counter, batch, net

from collectives import BroadcastOptions
from collectives.ddp import DistributedDataParallel, Join, MixedPrecision
from collectives.ddp.hooks.default_hooks import allreduce_hook
from collectives.ddp.optim import ZeroRedundancyOptimizer

COUNTS = {"one early": [1, 4, 3], "none at all": [2, 0, 3], "last first": [3, 3, 1], "even": [2, 2, 2]}


def sgd(module):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


# ---- training equals the naive solution ----------------------------------------------------------------


def train(group, options, counts, micro, *, hook=False, skips=False, divide=True, epochs=1):
    torch.manual_seed(1)
    module = Zoo()
    ddp = DistributedDataParallel(module, process_group=group, **options)
    if hook:
        ddp.register_comm_hook(group, allreduce_hook)
    optimizer = sgd(module)
    for epoch in range(epochs):
        with ddp.join(divide_by_initial_world_size=divide):
            for step in range(counts[group.rank()]):
                last = step % micro == micro - 1
                skip = skips and (step + group.rank()) % 2 == 0
                x = Zoo.inputs(seed=100 * epoch + 10 * step + group.rank())
                with contextlib.nullcontext() if last else ddp.no_sync():
                    ddp(x, skip=skip)["out"].sum().backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
    return module.state_dict()


def train_naively(group, options, counts, micro, *, skips=False, divide=True, epochs=1):
    """The same loop on all ranks, in which those that have no inputs give gradients of zero."""
    rank = group.rank()
    torch.manual_seed(1)
    module = Zoo()
    optimizer = sgd(module)
    synced = True
    for epoch in range(epochs):
        for step in range(max(counts)):
            active = [r for r in range(group.size()) if step < counts[r]]
            last = step % micro == micro - 1
            if synced:
                broadcast(module.buffers(), active[0], group)
            synced = last
            if rank in active:
                skip = skips and (step + rank) % 2 == 0
                module(Zoo.inputs(seed=100 * epoch + 10 * step + rank), skip=skip)["out"].sum().backward()
            if last:
                average(module, group, None if divide else len(active))
                if rank in active:
                    optimizer.step()
                optimizer.zero_grad()
        broadcast([*module.parameters(), *module.buffers()], active[-1], group)
        synced = last
    return module.state_dict()


def average(module, group, divisor):
    if divisor is None or divisor == group.size():
        naive_average(module.parameters(), group)
        return
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                wire = torch.view_as_real(grad) if grad.is_complex() else grad
                group.allreduce([wire], SUM).wait()
                wire.div_(divisor)
                parameter.grad = grad


def broadcast(tensors, root, group):
    with torch.no_grad():
        for tensor in tensors:
            group.broadcast([tensor.data], BroadcastOptions(rootRank=root)).wait()


UNUSED = {"find_unused_parameters": True}
CASES = {
    "plain": ({}, 1, {}),
    "two epochs": ({}, 1, {"epochs": 2}),
    "views": ({"gradient_as_bucket_view": True}, 1, {}),
    "unused": (UNUSED, 1, {"skips": True}),
    "unused views": ({**UNUSED, "gradient_as_bucket_view": True}, 1, {"skips": True}),
    "unused and skipped": ({"skip_all_reduce_unused_params": True}, 1, {"skips": True}),
    "static": ({"static_graph": True}, 1, {"epochs": 2}),
    "hook": ({}, 1, {"hook": True}),
    "alone": ({"bucket_cap_mb": 0}, 1, {}),
    "micro": ({}, 2, {"epochs": 2}),
    "micro views": ({"gradient_as_bucket_view": True, **UNUSED}, 2, {"skips": True}),
    "divided by the active": ({}, 1, {"divide": False}),
    "no buffers": ({"forward_sync_buffers": False}, 1, {}),
}


@pytest.mark.full
@on_ranks(3)
def test_training_equals_the_naive_solution_bit_for_bit(group):
    found = {}
    for name, (options, micro, how) in CASES.items():
        for kind, counts in COUNTS.items():
            ours = train(group, options, counts, micro, **how)
            how_naively = {key: value for key, value in how.items() if key != "hook"}
            theirs = train_naively(group, options, counts, micro, **how_naively)
            ignored = {"norm.running_mean", "norm.running_var"} if name == "no buffers" else set()
            found[name, kind] = sorted(set(differences(ours, theirs)) - ignored)
    assert {case: names for case, names in found.items() if names} == {}


@pytest.mark.parametrize("backend", ["gloo", "round_robin"])
def test_ranks_are_equal_in_the_end_on_other_backends(backend) -> None:
    results = run_ranks(train, 3, {}, [1, 4, 3], 1, backend=backend)
    assert all(differences(result, results[0]) == [] for result in results)


def divided_with_a_hook(group):
    """Gradients of a hook are scaled to the mean over the ranks that have inputs."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    ddp.register_comm_hook(group, allreduce_hook)
    seen = []
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + group.rank()):
            ddp.zero_grad()
            ddp(torch.full((1, 1), float(group.rank() + 1))).sum().backward()
            seen.append(ddp.module.weight.grad.item())
    return seen


def test_what_a_hook_returns_is_divided_by_the_ranks_that_have_inputs() -> None:
    assert run_ranks(divided_with_a_hook, 3, backend="host") == [[2.0], [2.0, 2.5], [2.0, 2.5, 3.0]]


def flat(*modules):
    """Returns a copy of all parameters."""
    return torch.cat([p.detach().reshape(-1) for module in modules for p in module.parameters()]).clone()


def check_paths(paths, finals):
    """Checks that active ranks have the same parameters after each step, and all the last ones in the end.

    Args:
        paths: by rank, the parameters after each step, before the context ends.
        finals: by rank, the parameters after it.
    """
    longest = max(paths, key=len)
    for path, final in zip(paths, finals, strict=True):
        assert all(map(torch.equal, path, longest))
        assert all(step.isfinite().all() for step in path)
        assert torch.equal(final, longest[-1])
    assert not any(map(torch.equal, longest[1:], longest))


# ---- other ways of training ----------------------------------------------------------------------------


def several_forwards(group):
    """Two forwards for each backward, one without gradients, a gradient penalty, a backward without DDP."""
    ddp = DistributedDataParallel(net(), process_group=group)
    grads = []
    with ddp.join():
        for step in range(1 + 2 * group.rank()):
            ddp.zero_grad()
            x = batch(group, step).requires_grad_()
            first, second = ddp(x), ddp(2 * x)
            with torch.no_grad():
                ddp(x)
            torch.autograd.grad(ddp(x).sum(), x)
            (first.sum() + second.sum()).backward()
            grads.append(ddp.module[0].bias.grad.clone())
    naive = net()
    expected = []
    for step in range(3 if group.size() == 2 else 5):
        naive.zero_grad()
        if step < 1 + 2 * group.rank():
            x = batch(group, step)
            (naive(x).sum() + naive(2 * x).sum()).backward()
        naive_average(naive.parameters(), group)
        if step < 1 + 2 * group.rank():
            expected.append(naive[0].bias.grad.clone())
    return all(map(torch.equal, grads, expected)) and len(grads) == len(expected)


def two_models(group):
    """An adversarial pair: two models in one context, called in turn and not equally often."""
    one = DistributedDataParallel(net(1), process_group=group)
    two = DistributedDataParallel(net(2), process_group=group)
    optimizers = [sgd(one), sgd(two)]
    path = []
    with Join([one, two]):
        for step in range(2 + group.rank()):
            for model, optimizer in zip([one, two], optimizers, strict=True):
                if model is two and step % 2:
                    continue
                optimizer.zero_grad()
                model(batch(group, step)).square().sum().backward()
                optimizer.step()
            path.append(flat(one, two))
    return path, flat(one, two)


def walk(group, ddp, steps, after=lambda: None):
    """Trains; returns the parameters after each step."""
    optimizer = sgd(ddp)
    path = []
    for step in range(steps):
        optimizer.zero_grad()
        ddp(batch(group, step)).float().square().sum().backward()
        optimizer.step()
        after()
        path.append(flat(ddp))
    return path


def precise(group):
    ddp = DistributedDataParallel(
        net(), process_group=group, mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16)
    )
    with ddp.join():
        path = walk(group, ddp, 1 + group.rank())
    return (path, flat(ddp)), {p.dtype for p in ddp.parameters()} == {torch.float32}


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.words(x))


def sparse(group):
    torch.manual_seed(2)
    ddp = DistributedDataParallel(Words(), process_group=group)
    naive = Words()
    naive.load_state_dict(ddp.module.state_dict())
    same = []
    with ddp.join():
        for step in range(3 - group.rank()):
            ddp.zero_grad()
            ddp(torch.tensor([group.rank(), step + 4])).sum().backward()
            grad = ddp.module.words.weight.grad
            same.append((grad.is_sparse, grad.to_dense()))
    expected = []
    for step in range(3):
        naive.zero_grad()
        if step < 3 - group.rank():
            naive(torch.tensor([group.rank(), step + 4])).sum().backward()
        weight = naive.words.weight
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.to_dense()
        naive_average(naive.parameters(), group)
        expected.append(weight.grad.clone())
    return all(s and torch.allclose(a, b) for (s, a), b in zip(same, expected[: len(same)], strict=True))


def others(group):
    model, kept = precise(group)
    return several_forwards(group), two_models(group), model, kept, sparse(group)


@pytest.mark.parametrize("world_size", [2, 3])
def test_forwards_models_and_gradients_of_every_kind(world_size) -> None:
    results = run_ranks(others, world_size, backend="host")
    for forwards, _, _, kept, sparse_grads in results:
        assert forwards
        assert kept
        assert sparse_grads
    check_paths(*zip(*(models for _, models, *_ in results), strict=True))
    check_paths(*zip(*(model for _, _, model, *_ in results), strict=True))


# ---- joinables of the user -----------------------------------------------------------------------------


def counting(group):
    counter, second = Counter(group), Counter(group)
    with Join([counter, second], limit=1):
        for _ in range(5 * (group.rank() + 1)):
            counter()
            second()
    works = [w is not None and w.wait() for w in counter.works], [w is None for w in second.works]
    with Join([counter], enable=False):
        assert Join.notify_join_context(counter) is None
    return counter.total.item(), second.total.item(), counter.shadowed, counter.last, all(map(all, works))


def test_joinables_of_the_user_run_whole_iterations_in_order() -> None:
    results = run_ranks(counting, 3, backend="host")
    assert [(total, second) for total, second, *_ in results] == [(30.0, 30.0)] * 3
    assert [shadowed for _, _, shadowed, _, _ in results] == [["main"], ["main"], []]
    assert [last for *_, last, _ in results] == [False, False, True]
    assert all(works for *_, works in results)


def with_a_counter(group):
    """A joinable of the user beside a model: the first one announces whole iterations."""
    counter = Counter(group)
    ddp = DistributedDataParallel(net(), process_group=group)
    with Join([ddp, counter]):
        path = walk(group, ddp, 2 + group.rank(), counter)
    return counter.total.item(), (path, flat(ddp))


def test_a_joinable_of_the_user_beside_a_model() -> None:
    results = run_ranks(with_a_counter, 3, backend="host")
    assert [total for total, _ in results] == [9.0] * 3
    check_paths(*zip(*(model for _, model in results), strict=True))


@on_ranks(2)
def test_even_training_after_uneven_micro_batches(group):
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    with model.join():
        for step in range(1 + group.rank()):
            with model.no_sync() if step else contextlib.nullcontext():
                model(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()


@on_ranks(2)
def test_step_hooks_of_an_optimizer_run_on_ranks_that_have_joined(group):
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, group, lr=0.1)
    calls = []
    zero.register_step_pre_hook(lambda *_: calls.append(1))
    with Join([model, zero]):
        for _ in range(1 + group.rank()):
            zero.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            zero.step()
    assert len(calls) == 2
