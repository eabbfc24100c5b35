"""``torch.compile`` of functions that communicate: equal to the same code run as it is."""

from __future__ import annotations

import pytest
import torch
from compiled_programs import compare_compiled
from harness import run_world
from torch import nn

import collectives as dist

pytestmark = pytest.mark.usefixtures("preloaded_python")


def world():
    return dist.GroupMember.WORLD


def reductions(x):
    y, z = x * 2, x * 3
    dist.all_reduce(y)
    dist.reduce(z, 0, op=dist.ReduceOp.MAX)
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, y + z)
    return torch.cat([y, z * (dist.get_rank() == 0), part]) + 1


def asynchronous(x):
    y, z = x * 2, x * 3
    works = [dist.all_reduce(y, async_op=True), dist.broadcast(z, 1, async_op=True)]
    before = x.sin()
    for work in works:
        work.wait()
    return y + z + before + works[0].is_completed()


def movement(x):
    size = dist.get_world_size()
    rows = [torch.empty(4) for _ in range(size)]
    dist.all_gather(rows, x * 2)
    whole, turned = torch.empty(4 * size), torch.empty(4)
    dist.all_gather_into_tensor(whole, x)
    dist.all_to_all_single(turned, x.exp())
    into = torch.empty(4)
    dist.scatter(into, [x, x + 1] if dist.get_rank() == 0 else None)
    return torch.cat([*rows, whole, turned, into])


def blocking_messages(x):
    y = x * 2
    if dist.get_rank() == 0:
        dist.send(y, 1)
    else:
        dist.recv(y, 0)
    return y + 1


def messages(x):
    other, y, z = 1 - dist.get_rank(), x * 2, torch.empty(4)
    for work in [dist.isend(y, other), dist.irecv(z, other)]:
        work.wait()
    w = torch.empty(4)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, z, other), dist.P2POp(dist.irecv, w, other)]):
        work.wait()
    return z + w


def objects(x):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, dist.get_rank() + 1)
    return x * sum(values)


def coalesced(x):
    y, z = x * 2, x * 3
    with dist._coalescing_manager():
        dist.all_reduce(y)
        dist.all_reduce(z)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(y)
        dist.all_reduce(z)
    manager.wait()
    return y + z


def facts(x):
    group = world()
    ranks = dist.get_process_group_ranks(group)
    return (
        x * dist.get_rank()
        + dist.get_world_size()
        + group.rank()
        + group.size()
        + len(ranks)
        + len(group.name())
    )


def barriers(x):
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier()
    return x + 1


def of_groups(x):
    """Methods of a group, and of what they return."""
    group, y = world(), x * 2
    group.allreduce([y]).wait()
    rows = torch.empty(4 * group.size())
    work = group.all_gather_single(rows, y)
    work.wait()
    group.broadcast([rows], dist.BroadcastOptions(rootRank=1)).wait()
    group.barrier().wait()
    assert work.is_success()
    assert work.exception() is None
    return work.result()[0] + rows


def futures(x):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    return doubled.wait() + work.get_future_result().wait()


def stores(x):
    store = world().get_group_store()
    key = f"rank {dist.get_rank()}"
    store.set(key, "3")
    store.wait([key])
    return x * int(store.get(key)) + store.check(["nothing"])


def groups_made_within(x):
    group = dist.new_group([0, 1])
    y = x * 2
    dist.all_reduce(y, group=group)
    dist.destroy_process_group(group)
    return y


def errors(x):
    y = x * 2
    try:
        dist.broadcast(y, 17)
    except ValueError:
        y = y + 1
    dist.all_reduce(y)
    return y


def under_events(x):
    y = x * 2
    with dist.record_comm("mine"):
        dist.all_reduce(y)
    return y


class Summed(torch.autograd.Function):
    """A sum over the ranks, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, async_op=True).wait()
        return total


def differentiated(x):
    x = x.detach().requires_grad_()
    Summed.apply(x * 2).square().sum().backward()
    return x.grad


class Layer(nn.Module):
    """A layer that sums over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        with torch.no_grad():
            total = y.detach().clone()
            dist.all_reduce(total)
        return y + total


def compiled_layers():
    layer = Layer()

    def step(x):
        layer.zero_grad()
        layer(x).square().sum().backward()
        return layer.inner.weight.grad

    return step


FUNCTIONS = [
    reductions, asynchronous, movement, blocking_messages, messages, objects, coalesced, facts, barriers,
    of_groups, futures, stores, groups_made_within, errors, under_events, differentiated,
]  # fmt: skip


def run(rank, size, names, backend):
    programs = {function.__name__: lambda function=function: function for function in FUNCTIONS}
    programs["compiled_layers"] = compiled_layers
    return compare_compiled({name: programs[name] for name in names or programs}, backend)


def test_a_function_that_communicates() -> None:
    assert run_world(run, 2, ["asynchronous", "of_groups"], "eager") == [{}] * 2


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "compiler"), [("host", "aot_eager"), ("gloo", "eager"), ("round_robin", "eager")]
)
def test_all_functions_groups_and_works(backend, compiler) -> None:
    assert run_world(run, 2, None, compiler, backend=backend, timeout=240) == [{}] * 2
