"""A hook that fails on one rank: other groups that hooks use, and other models over the same group."""

from __future__ import annotations

import threading
from functools import partial
from itertools import product

import pytest
import torch
from failing_hooks import CULPRIT, Tower, done, plain, rows
from harness import run_world
from hook_zoo import power
from torch_world import run_torch

import collectives
from collectives.ddp import DistributedDataParallel, GradientSyncError
from collectives.ddp.default_group import resolve_group
from collectives.ddp.hooks.default_hooks import fp16_compress_hook, fp16_compress_wrapper
from collectives.ddp.hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from collectives.ddp.hooks.powerSGD_hook import powerSGD_hook
from collectives.ddp.hooks.quantization_hooks import quantization_pertensor_hook

BACKENDS = ["host", "gloo", "round_robin"]
STEPS = 6
BAD_STEPS = {0, 3, 4}


class Left(BaseException):
    """What no ``except Exception`` catches."""


class Trouble:
    """Raises at one place of a hook on one rank, in the passes and for the bucket that it is told."""

    def __init__(self, rank, where, kind):
        self.where = where if rank == CULPRIT else ""
        self.kind = kind
        self.on = False
        self.bucket = 1

    def at(self, where, bucket):
        if self.on and where == self.where and bucket.index() == self.bucket:
            raise self.kind("in the hook")


# ---- hooks that use another group, each found elsewhere ----------------------------------------------------

_other = None
"""The group of a hook that finds it in its globals."""


def over(other, trouble, bucket):
    """Reduces over another group, whose ranks are all, and waits there."""
    trouble.at("before", bucket)
    other.allreduce([bucket.buffer()]).wait()
    trouble.at("between", bucket)
    work = other.allreduce([bucket.buffer().div_(other.size())], collectives.ReduceOp.MAX)

    def last(reduced):
        trouble.at("callback", bucket)
        return reduced.value()[0]

    return work.get_future().then(last)


def in_closure(other, trouble):
    def hook(state, bucket):
        return over(other, trouble, bucket)

    return None, hook


def in_globals(other, trouble):
    global _other
    _other = other

    def hook(trouble, bucket):
        return over(_other, trouble, bucket)

    return trouble, hook


class Nested:
    """A state that keeps its group two attributes down, and is its own hook."""

    def __init__(self, other, trouble):
        self.inside = {"groups": [other]}
        self.trouble = trouble

    def __call__(self, state, bucket):
        return over(state.inside["groups"][0], self.trouble, bucket)


def in_state(other, trouble):
    nested = Nested(other, trouble)
    return nested, nested


def in_arguments(other, trouble):
    return trouble, partial(over, other)


FOUND = [in_closure, in_globals, in_state, in_arguments]


def train(group, make, where, kind=KeyError, exact=True, bucket=1, bad_steps=BAD_STEPS):
    """Trains with a hook that fails in some passes, the first one among them."""
    rank = group.rank()
    module = Tower()
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    trouble = Trouble(rank, where, kind)
    trouble.bucket = bucket
    model.register_comm_hook(*make(trouble))
    for step in range(STEPS):
        trouble.on = step in bad_steps
        optimizer.zero_grad()
        loss = model(rows(rank, step)).square().sum()
        if trouble.on:
            expect_failure(loss.backward, rank, kind, where, bucket)
            continue
        loss.backward()
        if exact:
            same_as_alone(module, group.size(), step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


def expect_failure(backward, rank, kind, where, bucket=1):
    # Futures make every error of a callback their own.
    own = rank == CULPRIT and not issubclass(kind, Exception) and where != "callback"
    with pytest.raises(kind if own else GradientSyncError) as caught:
        backward()
    if not own:
        assert set(caught.value.reasons) == {CULPRIT}
        (reason,) = caught.value.reasons.values()
        assert f"failed on bucket {bucket}" in reason, reason
        assert "in the hook" in reason, reason
        assert kind.__name__ in reason, reason


def same_as_alone(module, size, step):
    """Compares gradients with those of one process that has the inputs of all ranks."""
    twin = Tower()
    twin.load_state_dict(module.state_dict())
    for one in range(size):
        (twin(rows(one, step)).square().sum() / size).backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def usable(groups):
    for group in groups:
        if isinstance(group, collectives.ProcessGroup):
            total = torch.ones(1)
            group.allreduce([total]).wait()
            assert total.item() == group.size()


def over_another_group(rank, size, find, where, kind):
    other = collectives.new_group(list(range(size)))
    trained = train(collectives.group.WORLD, partial(find, other), where, kind)
    usable([other, collectives.group.WORLD])
    return trained


WHERE = ["before", "between", "callback"]
CASES = [
    (find, where, size, kind, backend)
    for number, (find, where) in enumerate(product(FOUND, WHERE))
    for backend in BACKENDS
    for size, kind in [[(2, KeyError), (3, KeyError), (3, Left)][number % 3]]
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("find", "where", "size", "kind", "backend"), CASES)
def test_ranks_that_wait_in_another_group_of_the_hook_are_freed(find, where, size, kind, backend) -> None:
    ranks = run_world(over_another_group, size, find, where, kind, backend=backend)
    for parameters in ranks[1:]:
        assert all(map(torch.equal, parameters, ranks[0]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_is_freed_that_waits_in_a_group_which_the_failed_one_never_used(backend) -> None:
    run_world(over_another_group, 2, in_globals, "before", KeyError, backend=backend)


def over_parts(rank, size, where):
    """Hierarchical: within a machine, then between the first ranks of machines, then within one again."""
    node = collectives.new_group([0, 1])
    leaders = collectives.new_group([0, 2])

    def make(trouble):
        def hook(state, bucket):
            buffer = bucket.buffer().div_(size)
            trouble.at("before", bucket)
            if rank < 2:
                node.allreduce([buffer]).wait()
                trouble.at("between", bucket)
            if rank != 1:
                leaders.allreduce([buffer]).wait()
            if rank < 2:
                node.broadcast([buffer], 0).wait()
                trouble.at("after", bucket)
            return done(buffer)

        return None, hook

    trained = train(collectives.group.WORLD, make, where)
    usable([node, leaders, collectives.group.WORLD])
    return trained


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("backend", ["host", "gloo"])
def test_groups_of_some_of_the_ranks_are_renewed_as_well(where, backend) -> None:
    ranks = run_world(over_parts, 3, where, backend=backend)
    for parameters in ranks[1:]:
        assert all(map(torch.equal, parameters, ranks[0]))


def raising(hook, trouble):
    def around(state, bucket):
        trouble.at("before", bucket)
        future = hook(state, bucket)
        trouble.at("between", bucket)

        def last(reduced):
            reduced.value()
            trouble.at("callback", bucket)
            return reduced.value()[0] if isinstance(reduced.value(), list) else reduced.value()

        return future.then(last)

    return around


OURS = {
    "fp16": (lambda other: other, fp16_compress_hook),
    "PowerSGD": (power, powerSGD_hook),
    "wrapped PowerSGD": (power, fp16_compress_wrapper(powerSGD_hook)),
    "quantization": (lambda other: other, quantization_pertensor_hook),
    "post local": (lambda other: PostLocalSGDState(other, other, 2), post_localSGD_hook),
}


def with_our_hooks(rank, size, name, where):
    other = collectives.new_group(list(range(size)))
    make, hook = OURS[name]
    group = collectives.group.WORLD
    found = train(group, lambda trouble: (make(other), raising(hook, trouble)), where, exact=False)
    usable([other, group])
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(OURS))
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("backend", ["host", "gloo"])
def test_our_hooks_over_another_group(name, where, backend) -> None:
    ranks = run_world(with_our_hooks, 2, name, where, backend=backend)
    assert all(map(torch.equal, *ranks))


def in_torchs_world(rank, size, where):
    other = torch.distributed.new_group(list(range(size)))

    def make(trouble):
        def hook(state, bucket):
            trouble.at("before", bucket)
            torch.distributed.all_reduce(bucket.buffer().div_(size), group=other)
            trouble.at("between", bucket)
            return done(bucket.buffer())

        return None, hook

    return train(resolve_group(torch.distributed.group.WORLD), make, where)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["before", "between"])
@pytest.mark.parametrize("backend", ["collectives", "collectives_gloo"])
def test_groups_of_torchs_layer(where, backend) -> None:
    assert all(map(torch.equal, *run_torch(in_torchs_world, 2, where, backend=backend)))


# ---- several models ----------------------------------------------------------------------------------------


class Pair:
    """Two models over one group, of which the hook of the first one fails."""

    def __init__(self, group, second_has_hook, where, kind=KeyError):
        self.group = group
        self.rank = group.rank()
        self.modules = [Tower(), Tower()]
        self.models = [
            DistributedDataParallel(module, process_group=group, bucket_cap_mb=0) for module in self.modules
        ]
        self.trouble = Trouble(self.rank, where, kind)
        self.models[0].register_comm_hook(group, raising(plain, self.trouble))
        if second_has_hook:
            self.models[1].register_comm_hook(group, plain)

    def losses(self, step):
        return [model(rows(self.rank, step)).square().sum() for model in self.models]

    def zero(self):
        for model in self.models:
            model.zero_grad()

    def check(self, step):
        for module in self.modules:
            same_as_alone(module, self.group.size(), step)


def in_turns(group, second_has_hook, where, kind):
    """A GAN: a pass of one model, then of the other one, whose forward may have run before."""
    pair = Pair(group, second_has_hook, where, kind)
    for step in range(4):
        pair.zero()
        pair.trouble.on = step in {0, 2}
        first, second = pair.losses(step)
        if pair.trouble.on:
            expect_failure(first.backward, pair.rank, kind, where)
            second.backward()
            same_as_alone(pair.modules[1], group.size(), step)
            continue
        first.backward()
        second.backward()
        pair.check(step)
    return pair.models[1].reducer.passes, pair.models[0].reducer.passes


def at_once(group, second_has_hook, where, kind):
    """One backward pass goes through both models."""
    pair = Pair(group, second_has_hook, where, kind)
    for step in range(5):
        pair.zero()
        pair.trouble.on = step in {0, 2, 3}
        first, second = pair.losses(step)
        loss = first + second if step % 2 else second + first
        if pair.trouble.on:
            expect_failure(loss.backward, pair.rank, kind, where)
            continue
        loss.backward()
        pair.check(step)
    usable([group])
    return pair.models[1].reducer.passes, pair.models[0].reducer.passes


def over_world(rank, size, body, *args):
    return body(collectives.group.WORLD, *args)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("body", [in_turns, at_once])
@pytest.mark.parametrize("second_has_hook", [False, True])
@pytest.mark.parametrize(
    ("where", "kind"), [("before", KeyError), ("between", KeyError), ("callback", KeyError), ("before", Left)]
)
@pytest.mark.parametrize(("backend", "size"), [("host", 3), ("gloo", 2), ("round_robin", 2)])
def test_models_that_share_a_group_stay_in_step(body, second_has_hook, where, kind, backend, size) -> None:
    counts = run_world(over_world, size, body, second_has_hook, where, kind, backend=backend)
    ((second, first),) = set(counts)
    assert first == 2
    assert second == 4 or body is at_once


def beside_another_thread(rank, size):
    """A second thread trains over a group of its own, while hooks of the first thread fail."""
    own = collectives.new_group(list(range(size)))
    module = Tower()
    model = DistributedDataParallel(module, process_group=own, bucket_cap_mb=0)
    failures, ends = [], threading.Event()

    def go_on():
        step = 0
        try:
            while True:
                last = torch.tensor([float(ends.is_set())])
                own.allreduce([last]).wait()
                if last.item():
                    return
                model.zero_grad()
                model(rows(rank, step)).square().sum().backward()
                same_as_alone(module, size, step)
                step += 1
        except Exception as error:  # noqa: BLE001 - returned
            failures.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        over_another_group(rank, size, in_globals, "between", KeyError)
    finally:
        ends.set()
        thread.join()
    return failures


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["host", "gloo"])
def test_a_group_over_which_another_thread_trains_is_left_alone(backend) -> None:
    assert run_world(beside_another_thread, 2, backend=backend) == [[], []]
