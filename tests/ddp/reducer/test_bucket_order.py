"""The order of the gradients: traced, agreed by all ranks, and agreed again where it changes for good."""

from __future__ import annotations

import torch
from ddp_oracle import naive_average
from harness import run_ranks
from torch import nn

from collectives.ddp import DistributedDataParallel
from collectives.ddp.reducer.buckets import OrderTrace, agree_on_order, complete_trace


def test_a_trace_keeps_the_last_time_and_puts_absent_ones_last() -> None:
    assert complete_trace([2, 0, 2, 1], [0, 1, 2]) == [0, 2, 1]
    assert complete_trace([3, 1], [0, 4, 1, 3, 2]) == [3, 1, 0, 4, 2]
    assert complete_trace([], [2, 1, 0]) == [2, 1, 0]


def test_a_rank_requests_another_order_when_it_has_held_and_ever_less_readily() -> None:
    trace = OrderTrace([2, 1, 0])

    def passes_until_request(*orders):
        for number in range(1, 50):
            trace.note(orders[number % len(orders)])
            if trace.requests_relayout:
                return number
        return None

    trace.note([2, 1, 0])
    assert not trace.requests_relayout
    trace.agree(None, torch.device("cpu"))
    assert passes_until_request([2, 1, 0]) is None
    assert passes_until_request([0, 1, 2], [1, 0, 2]) is None
    assert passes_until_request([0, 1, 2]) == 3
    assert trace.latest == [0, 1, 2]
    trace.agree(None, torch.device("cpu"))
    assert not trace.requests_relayout
    assert passes_until_request([2, 1, 0]) == 6


def test_one_pass_as_agreed_takes_a_request_back() -> None:
    agreed, other = [2, 1, 0], [0, 1, 2]
    trace = OrderTrace(agreed)
    trace.note(agreed)
    assert trace.agree(None, torch.device("cpu")) == agreed
    for order in (other, other, other):
        trace.note(order)
    assert trace.requests_relayout
    trace.note(agreed)
    assert not trace.requests_relayout
    # agreed upon again, it is what later passes are compared with
    assert trace.agree(None, torch.device("cpu")) == agreed
    for _ in range(6):
        assert not trace.requests_relayout
        trace.note(other)
    assert trace.requests_relayout


def agreed(group, traces):
    return agree_on_order(group, traces[group.rank()], torch.device("cpu"))


def test_agreement_is_bordas_count() -> None:
    assert run_ranks(agreed, 3, [[3, 2, 1, 0]] * 3, backend="host") == [[3, 2, 1, 0]] * 3
    traces = [[0, 1, 2, 3], [1, 0, 2, 3], [1, 2, 3, 0]]
    assert run_ranks(agreed, 3, traces, backend="host") == [[1, 0, 2, 3]] * 3


class Turning(nn.Module):
    """Four weights whose gradients come in an order that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((3,), float(i + 1))) for i in range(4))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(x * self.weights[index])
        return x


class Hook:
    """Averages, and notes the buckets that it sees and how they change."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.changes: list[tuple[list[list[str]], list[list[str]]]] = []

    def __call__(self, group, bucket):
        self.seen.append(bucket.names())
        return group.allreduce([bucket.buffer().div_(group.size())]).get_future().then(lambda f: f.value()[0])

    def buckets_rebuilt(self, before, after) -> None:
        self.changes.append(([list(b.names) for b in before], [list(b.names) for b in after]))


def turning(group, turns, options):
    hook = Hook()
    ours, naive = (
        DistributedDataParallel(Turning(), process_group=group, bucket_cap_mb=0, **options),
        Turning(),
    )
    ours.register_comm_hook(group, hook)
    found, same = [], []
    for order, passes in turns:
        for step in range(passes):
            hook.seen.clear()
            for model in (ours, naive):
                model.zero_grad()
                x = torch.randn(3, generator=torch.Generator().manual_seed(10 * step + group.rank()))
                model(x, order).sum().backward()
            naive_average(naive.parameters(), group)
            pairs = zip(ours.parameters(), naive.parameters(), strict=True)
            same.append(all(torch.allclose(p.grad, q.grad) for p, q in pairs))
            found.append("".join(name[-1] for names in hook.seen for name in names))
    return found, all(same), hook.changes


def test_buckets_follow_an_order_that_changes_for_good_and_hooks_are_told() -> None:
    turns = [([0, 1, 2, 3], 2), ([2, 3, 0, 1], 1), ([0, 1, 2, 3], 2), ([2, 3, 0, 1], 6)]
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        for found, same, changes in run_ranks(turning, 2, turns, options, backend="host"):
            assert same
            assert found == ["3210"] * 9 + ["1032"] * 2
            names = [[f"weights.{i}"] for i in (3, 2, 1, 0)]
            assert changes == [(names, [names[i] for i in (2, 3, 0, 1)])]
