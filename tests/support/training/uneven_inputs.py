"""What tests of training on uneven inputs share: data, a small model, a joinable of the user's own."""

from __future__ import annotations

import torch
from torch import nn

from collectives import AllreduceOptions, BroadcastOptions, ReduceOp
from collectives.ddp import Join, Joinable, JoinHook

SUM = AllreduceOptions(reduceOp=ReduceOp.SUM)


def batch(group, step, rows=2):
    generator = torch.Generator().manual_seed(1000 * group.rank() + step)
    return torch.randn(rows, 3, generator=generator)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class CounterHook(JoinHook):
    def __init__(self, counter, limit):
        self.counter, self.limit = counter, limit

    def main_hook(self):
        if len(self.counter.shadowed) < self.limit:
            self.counter.shadowed.append("main")
        self.counter.add(0)

    def post_hook(self, is_last_joiner):
        root = torch.tensor([self.counter.group.rank() if is_last_joiner else -1])
        self.counter.group.allreduce([root], AllreduceOptions(reduceOp=ReduceOp.MAX)).wait()
        self.counter.group.broadcast([self.counter.total], BroadcastOptions(rootRank=int(root))).wait()
        self.counter.last = is_last_joiner


class Counter(Joinable):
    """Counts the inputs of all ranks, as in the tutorial of torch's Join."""

    def __init__(self, group):
        super().__init__()
        self.group, self.total = group, torch.zeros(1)
        self.shadowed, self.last, self.works = [], None, []

    def __call__(self):
        self.works.append(Join.notify_join_context(self))
        self.add(1)

    def add(self, value):
        one = torch.tensor([float(value)])
        self.group.allreduce([one], SUM).wait()
        self.total += one

    def join_hook(self, **kwargs):
        return CounterHook(self, kwargs.get("limit", 99))

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return self.group
