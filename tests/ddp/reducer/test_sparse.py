"""Sparse gradients: averaged as they are, whatever rows the ranks have, and named where they cannot be."""

from __future__ import annotations

import pytest
import torch
from ddp_oracle import naive_average
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn

from collectives.ddp import DistributedDataParallel, GradientSyncError
from collectives.ddp.hooks.debugging_hooks import noop_hook
from collectives.ddp.hooks.default_hooks import allreduce_hook


class Lookup(nn.Module):
    """Two tables, one of bags, and a layer; the last table may be left out."""

    def __init__(self, sparse: bool, dense_layer: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 3, sparse=sparse, dtype=dtype)
        self.bags = nn.EmbeddingBag(5, 3, sparse=sparse, mode="sum", dtype=dtype)
        if dense_layer:
            self.layer = nn.Linear(3, 3, dtype=dtype)

    def forward(self, words: torch.Tensor, bags: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(words)
        if bags is not None:
            x = x + self.bags(bags)
        return self.layer(x) if hasattr(self, "layer") else x.tanh()


WORDS = [[[1, 1, 4], [2, 6, 1]], [[3, 1, 3], [1, 1, 1]], [[0, 5, 6], [6, 6, 2]]]
"""By rank, for two micro-batches."""


def weighted(out, rank):
    return (out * torch.linspace(0.3, 1.7 + rank, out.numel(), dtype=out.dtype).view_as(out)).sum()


def compare(group, options, plan, make):
    """Returns, for each pass, the names of gradients that are wrong or have changed their layout."""
    ours = DistributedDataParallel(Lookup(True, **make), process_group=group, **options)
    naive = Lookup(False, **make)
    rank = group.rank()
    wrong = []
    for zero, passes in plan:
        if zero:
            ours.zero_grad()
            naive.zero_grad()
        for number, with_bags in enumerate(passes):
            words = torch.tensor(WORDS[rank][number])
            bags = words.view(3, 1) % 5 if with_bags[rank] == "b" else None
            last = number == len(passes) - 1
            if last:
                weighted(ours(words, bags), rank).backward()
            else:
                with ours.no_sync():
                    weighted(ours(words, bags), rank).backward()
            weighted(naive(words, bags), rank).backward()
        naive_average(naive.parameters(), group)
        for (name, p), q in zip(ours.module.named_parameters(), naive.parameters(), strict=True):
            if p.grad is None or q.grad is None:
                same = p.grad is q.grad
            else:
                sparse = p.grad.layout is torch.sparse_coo
                close = torch.allclose(p.grad.to_dense(), q.grad, 8 * torch.finfo(q.dtype).eps, 1e-7)
                same = sparse == (not name.startswith("layer")) and close
            if not same:
                wrong.append((name, p.grad, q.grad))
    bits = [None if p.grad is None else p.grad.to_dense().tolist() for p in ours.parameters()]
    return wrong, bits


def check(results):
    """Nothing is wrong, and all ranks have the same bits.

    Sums of one rank differ in their order from those of dense gradients, so that those are only close.
    """
    assert [wrong for wrong, _ in results] == [[]] * len(results)
    assert all(bits == results[0][1] for _, bits in results)


PLAN = [(True, ["bbb"]), (True, ["bbb", "bbb"]), (False, ["bbb"]), (True, ["bbb"])]


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({}, {}),
        ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0}, {}),
        ({"static_graph": True, "batched_grad_copy": True}, {}),
        ({"find_unused_parameters": True}, {"dense_layer": False}),
        ({}, {"dense_layer": False, "dtype": torch.float64}),
    ],
    ids=str,
)
def test_equals_averaging_dense_gradients_and_stays_sparse(options, make) -> None:
    check(run_ranks(compare, 3, options, PLAN, make, backend="host"))


def test_on_another_backend() -> None:
    check(run_ranks(compare, 2, {}, PLAN, {}, backend="gloo"))


def test_tables_that_ranks_leave_out() -> None:
    plan = [(True, ["b-b"]), (True, ["---"]), (True, ["-b-"]), (False, ["---"]), (True, ["b--", "---"])]
    for options in ({"find_unused_parameters": True}, {"find_unused_parameters": True, "bucket_cap_mb": 0}):
        check(run_ranks(compare, 3, options, plan, {}, backend="host"))


def left_out_by_mistake(group):
    ours = DistributedDataParallel(Lookup(True), process_group=group)
    words = torch.tensor(WORDS[group.rank()][0])
    with pytest.raises(GradientSyncError) as caught:
        ours(words, None if group.rank() else words.view(3, 1) % 5).sum().backward()
    ours.zero_grad()
    ours(words, words.view(3, 1) % 5).sum().backward()
    return caught.value.reasons, ours.module.bags.weight.grad.to_dense().sum().item()


def test_a_missing_sparse_gradient_is_named_on_all_ranks() -> None:
    results = run_ranks(left_out_by_mistake, 2, backend="host")
    for reasons, _ in results:
        assert reasons == {1: "1 of 4 parameters got no gradient: bags.weight"}
    assert results[0][1] == results[1][1] != 0


class Tied(nn.Module):
    """The table is the output layer, too, so that its gradient is dense after all."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4, 3, sparse=sparse)

    def forward(self, words: torch.Tensor, tied: bool) -> torch.Tensor:
        x = self.table(words)
        return x @ self.table.weight.t() if tied else x


@on_ranks(2)
def test_a_gradient_that_is_dense_on_some_ranks(group):
    ours, naive = DistributedDataParallel(Tied(True), process_group=group), Tied(False)
    words = torch.tensor([group.rank(), 1])
    for model in (ours, naive):
        weighted(model(words, group.rank() == 0), group.rank()).backward()
    naive_average(naive.parameters(), group)
    assert torch.equal(ours.module.table.weight.grad.to_dense(), naive.table.weight.grad)


@pytest.mark.parametrize("hook", [allreduce_hook, noop_hook])
@on_ranks(2)
def test_hooks_leave_sparse_gradients_to_the_group_or_to_the_rank(group, hook):
    ours, naive = DistributedDataParallel(Lookup(True), process_group=group), Lookup(False)
    ours.register_comm_hook(group, hook)
    words = torch.tensor(WORDS[group.rank()][0])
    for model in (ours, naive):
        weighted(model(words, words.view(3, 1) % 5), group.rank()).backward()
    if hook is allreduce_hook:
        naive_average(naive.parameters(), group)
    pairs = zip(ours.parameters(), naive.parameters(), strict=True)
    assert all(torch.equal(p.grad.to_dense(), q.grad) for p, q in pairs)


class Breaking(torch.autograd.Function):
    """Breaks its backward pass off, if told to."""

    @staticmethod
    def forward(ctx, x, breaks):
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.breaks:
            raise ZeroDivisionError
        return grad, None


class Fragile(Lookup):
    def forward(self, words: torch.Tensor, bags: torch.Tensor, breaks: bool = False) -> torch.Tensor:
        return self.layer(Breaking.apply(self.table(words) + self.bags(bags), breaks))


def broken_off(group):
    ours = DistributedDataParallel(Fragile(True), process_group=group)
    words = torch.tensor(WORDS[group.rank()][0])
    bags = words.view(3, 1) % 5
    with pytest.raises((ZeroDivisionError, GradientSyncError)) as caught:
        ours(words, bags, group.rank() == 1).sum().backward()
    ours.zero_grad()
    ours(words, bags).sum().backward()
    return type(caught.value).__name__, [p.grad.to_dense().sum().item() for p in ours.parameters()]


def test_a_pass_that_breaks_off_reaches_the_peers() -> None:
    (first, after), (second, same) = run_ranks(broken_off, 2, backend="host")
    assert (first, second) == ("GradientSyncError", "ZeroDivisionError")
    assert after == same


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.layer = nn.Linear(3, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.embedding(words, self.weight, sparse=True))


@on_ranks(2)
def test_sparse_gradients_of_other_layers_are_refused_by_name(group):
    ours = DistributedDataParallel(Custom(), process_group=group)
    with pytest.raises(GradientSyncError) as caught:
        ours(torch.tensor([group.rank()])).sum().backward()
    assert list(caught.value.reasons) == [0, 1]
    assert "the gradient of weight has layout torch.sparse_coo" in caught.value.reasons[0]
    assert "sparse=True when they were wrapped" in caught.value.reasons[0]
