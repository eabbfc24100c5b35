"""Communication hooks: what they get, what they may return, and what happens when they fail."""

from __future__ import annotations

import functools
import os
import time

import pytest
import torch
from ddp_oracle import data, same_pass
from harness import current_store, run_ranks
from on_ranks import on_ranks
from torch import nn

from collectives import PeerLostError
from collectives.backends.host import ProcessGroupHost
from collectives.ddp import DistributedDataParallel, GradBucket, GradientSyncError
from collectives.ddp.hooks.ddp_zero_hook import hook_with_zero_step
from collectives.ddp.hooks.debugging_hooks import noop_hook
from collectives.ddp.hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from collectives.ddp.optim import ZeroRedundancyOptimizer


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def gradients(module):
    return [p.grad.clone() for p in module.parameters()]


def local_gradients(rank, seed=0):
    module = model()
    module(data(rank, seed)).sum().backward()
    return gradients(module)


def with_hook(group, hook, options):
    ours = DistributedDataParallel(model(), process_group=group, **options)
    ours.register_comm_hook(group, hook)
    found = []
    for step in range(2):
        ours.zero_grad()
        ours(data(group.rank(), step)).sum().backward()
        found.append(gradients(ours))
    return found


OPTIONS = [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("hooks", "dtype"),
    [
        ((fp16_compress_hook, fp16_compress_wrapper(allreduce_hook)), torch.float16),
        ((bf16_compress_hook, bf16_compress_wrapper(allreduce_hook)), torch.bfloat16),
    ],
    ids=["fp16", "bf16"],
)
def test_compression_is_one_rounding_before_and_one_after_the_mean(hooks, dtype, options) -> None:
    for number in range(2):
        ranks = run_ranks(with_numbered_hook, 3, dtype, number, options, backend="host")
        for found in ranks:
            for step, ours in enumerate(found):
                for index, gradient in enumerate(ours):
                    rounded = [local_gradients(r, step)[index].to(dtype).float() for r in range(3)]
                    mean = ((rounded[0] + rounded[1] + rounded[2]) / 3).to(dtype).float()
                    assert torch.equal(gradient, mean), hooks[number]


def with_numbered_hook(group, dtype, number, options):
    pairs = {
        torch.float16: (fp16_compress_hook, fp16_compress_wrapper(allreduce_hook)),
        torch.bfloat16: (bf16_compress_hook, bf16_compress_wrapper(allreduce_hook)),
    }
    return with_hook(group, pairs[dtype][number], options)


@on_ranks(2)
def test_noop_hook_leaves_local_gradients_and_does_not_communicate(group):
    """Leaves a layer out, which is found out without the other ranks as well."""
    module = nn.ModuleDict({"used": model(), "unused": nn.Linear(1, 1)})
    module.forward = module["used"].forward
    ours = DistributedDataParallel(module, process_group=group, find_unused_parameters=True)
    ours.register_comm_hook(None, noop_hook)
    calls = []
    plain = group.issue
    group.issue = lambda call: (calls.append(call.operation.name), plain(call))[1]
    found = []
    for step in range(2):
        ours.zero_grad()
        ours(data(group.rank(), step)).sum().backward()
        found.append(gradients(module["used"]))
    assert [p.grad for p in module["unused"].parameters()] == [None, None]
    rank = group.rank()
    assert calls == []
    for step, ours in enumerate(found):
        assert all(map(torch.equal, ours, local_gradients(rank, step)))


class Recorder:
    """A hook with state: counts, sums over the ranks, and looks at its buckets."""

    def __init__(self, group) -> None:
        self.group = group
        self.seen = []

    def __call__(self, state: dict, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state["calls"] = state.get("calls", 0) + 1
        self.seen.append((bucket.index(), bucket.is_last(), bucket.names()))
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
            assert gradient.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr()
        tripled = bucket.buffer() * 3
        return self.group.allreduce([tripled]).get_future().then(lambda done: done.value()[0] + 1)


@on_ranks(2)
def test_hooks_get_their_state_and_undivided_gradients_in_order(group):
    ours = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0)
    state = {}
    hook = Recorder(group)
    ours.register_comm_hook(state, hook)
    ours(data(group.rank())).sum().backward()
    seen, found = hook.seen, gradients(ours)
    assert state == {"calls": 4}
    names = ["2.bias", "2.weight", "0.bias", "0.weight"]
    assert seen == [(i, i == 3, [name]) for i, name in enumerate(names)]
    for ours, first, second in zip(found, local_gradients(0), local_gradients(1), strict=True):
        assert torch.equal(ours, 3 * first + 3 * second + 1)


@on_ranks(2)
def test_callbacks_that_issue_collectives_keep_the_order_of_the_buckets(group):
    """A hook whose second callback issues a collective; rank 0 is slow in the pass, rank 1 in callbacks."""
    rank, size = group.rank(), group.size()

    def keep(done):
        return done.value()[0]

    def sum_again(kept):
        if rank == 1:
            time.sleep(0.03)
        return group.allreduce([kept.value() / size]).get_future().wait()[0] / size

    def hook(state, bucket):
        future = group.allreduce([bucket.buffer().clone()]).get_future().then(keep).then(sum_again)
        if rank == 0:
            time.sleep(0.03)
        return future

    ours = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0)
    ours.register_comm_hook(None, hook)
    found = []
    for step in range(3):
        ours.zero_grad()
        ours(data(rank, step)).sum().backward()
        found.append(gradients(ours))
    for step, ours in enumerate(found):
        for mean, first, second in zip(ours, local_gradients(0, step), local_gradients(1, step), strict=True):
            assert torch.equal(mean, (first + second) / 2)


def done(value):
    future = torch.futures.Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def bad_result(what, bucket):
    """Returns what a hook should not, or raises."""
    if what == "raises":
        raise KeyError("in the hook")
    if what == "no future":
        return bucket.buffer()
    value = {
        "future fails": OSError("in the future"),
        "shape": torch.ones(7),
        "two": [1, 2],
        "dtype": torch.ones(8, dtype=torch.float64),
        "device": torch.ones(8, device="meta"),
    }[what]
    return done(value)


def first_pass(group, act, raised=GradientSyncError):
    """Runs a pass of which the hook acts on bucket 1 before it averages, or returns something else instead.

    Returns the model and the error.
    """
    ours = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0)
    passes = []

    def hook(state, bucket):
        instead = act(bucket) if not passes and bucket.index() == 1 else None
        return allreduce_hook(group, bucket) if instead is None else instead

    ours.register_comm_hook(None, hook)
    with pytest.raises(raised) as caught:
        ours(data(group.rank())).sum().backward()
    passes.append(1)
    return ours, caught.value


def goes_on(ours, group):
    """Returns whether the next pass averages."""
    return same_pass(ours, model(), data(group.rank()))


def failing(group, what, at_fault):
    """Returns the error of a hook that fails at first, and whether the next pass is good.

    It averages in all cases, so that the ranks stay in step.
    """

    def fail(bucket):
        if group.rank() not in at_fault:
            return None
        if what != "raises":
            allreduce_hook(group, bucket).wait()
        return bad_result(what, bucket)

    ours, error = first_pass(group, fail)
    untouched = all(map(torch.equal, gradients(ours), local_gradients(group.rank())))
    return str(error), type(error.__cause__).__name__, untouched, goes_on(ours, group)


@pytest.mark.parametrize("at_fault", [(0, 1), (1,)], ids=["all", "one"])
@pytest.mark.parametrize(
    ("what", "words", "cause"),
    [
        ("raises", "KeyError: 'in the hook'", "KeyError"),
        ("future fails", "OSError: in the future", "OSError"),
        (
            "no future",
            "return a torch.futures.Future of a tensor, but returned a value of type Tensor for bucket 1",
            "TypeError",
        ),
        ("shape", "must hold a tensor of the bucket's shape [8], but its shape is [7]", "ValueError"),
        ("two", "bucket 1 must hold one tensor, but holds a value of type list", "TypeError"),
        ("dtype", "as the bucket's, but its tensor is of torch.float64 on cpu", "ValueError"),
        ("device", "its tensor is of torch.float32 on meta", "ValueError"),
    ],
)  # fmt: skip
def test_a_failing_hook_is_one_clear_error_on_all_ranks_and_training_goes_on(
    what, words, cause, at_fault
) -> None:
    for rank, (message, raised, untouched, good) in enumerate(
        run_ranks(failing, 2, what, at_fault, backend="host")
    ):
        assert words in message
        assert "communication hook hook failed on bucket 1 (2.weight)" in message
        assert f"because of rank{'s 0, 1' if len(at_fault) > 1 else ' 1'}:" in message
        assert raised == (cause if rank in at_fault else "NoneType")
        assert untouched
        assert good


@on_ranks(2)
def test_hooks_that_send_different_things_are_one_error_on_all_ranks(group):
    """Hooks that send different things; returns the error, and whether the next pass is good."""

    def send_more(bucket):
        if group.rank() == 1:
            group.allreduce([torch.ones(3)]).wait()

    ours, error = first_pass(group, send_more)
    message, good = str(error), goes_on(ours, group)
    assert "because of ranks 0, 1:" in message
    assert "CollectiveMismatchError" in message
    assert "all_reduce(SUM, float32, 3 elements)" in message
    assert good


def interrupted(group, ends):
    """A handler of a signal raises in the hook of a rank, which goes on, or ends."""

    def interrupt(bucket):
        if group.rank() == 1:
            raise KeyboardInterrupt

    kinds = {0: PeerLostError if ends else GradientSyncError, 1: KeyboardInterrupt}
    ours, error = first_pass(group, interrupt, kinds[group.rank()])
    if ends and group.rank() == 1:
        os._exit(1)
    return str(error), ends or goes_on(ours, group)


def test_an_interrupted_hook_is_told_to_the_others_when_its_rank_goes_on() -> None:
    (message, good), (_, good_there) = run_ranks(interrupted, 2, False, backend="host")
    assert "rank 1: its communication hook hook failed on bucket 1 (2.weight): KeyboardInterrupt" in message
    assert good
    assert good_there


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["host", "gloo"])
def test_a_rank_that_ends_after_its_hook_failed_is_lost(backend) -> None:
    (message, _), _ = run_ranks(interrupted, 2, True, backend=backend, lost={1}, isolated=True)
    assert "rank 1 died" in message or "rank 1 is lost" in message


@on_ranks(2, None)
def test_a_group_that_cannot_be_connected_anew_is_one_error_on_all_ranks(rank, size):
    group = ProcessGroupHost(current_store(), rank, size)
    group._store = None  # as of a group that is made without one

    def fail(bucket):
        if rank == 1:
            raise KeyError("in the hook")

    message = str(first_pass(group, fail)[1])
    assert "hook failed on bucket 1 (" in message
    assert "KeyError: 'in the hook'" in message
    assert "cannot be connected anew: it has no store; make a new group" in message


@on_ranks(2)
def test_registration_is_checked(group):
    ours = DistributedDataParallel(model(), process_group=group)

    def bad_bucket(state, bucket: int) -> torch.futures.Future[torch.Tensor]: ...

    def bad_result(state, bucket: GradBucket) -> torch.Tensor: ...

    def torch_bucket(state, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]: ...

    seen = []
    for hook in (5, lambda bucket: None, bad_bucket, bad_result):
        with pytest.raises((TypeError, ValueError)) as caught:
            ours.register_comm_hook(None, hook)
        seen.append((type(caught.value).__name__, str(caught.value)))
    other = DistributedDataParallel(model(), process_group=group)
    other.register_comm_hook(None, torch_bucket)
    partial = DistributedDataParallel(model(), process_group=group)
    partial.register_comm_hook(None, functools.partial(allreduce_hook))

    late = []

    def register_late(grad):
        with pytest.raises(RuntimeError, match="within a backward pass") as caught:
            ours.register_comm_hook(group, allreduce_hook)
        late.append(str(caught.value))

    handle = ours.module[0].weight.register_hook(register_late)
    ours(data(group.rank())).sum().backward()
    handle.remove()
    ours.register_comm_hook(group, allreduce_hook)
    with pytest.raises(RuntimeError, match="called before, with <function allreduce_hook") as caught:
        ours.register_comm_hook(group, allreduce_hook)
    kinds = [kind for kind, _ in seen]
    assert kinds == ["TypeError", "TypeError", "ValueError", "ValueError"]
    assert "but is 5 of type int" in seen[0][1]
    assert "takes a state and a bucket" in seen[1][1]
    assert "argument bucket" in seen[2][1]
    assert "return value" in seen[3][1]
    assert len(late) == 1


def complex_gradients(group, hook):
    torch.manual_seed(0)
    module = nn.Linear(3, 3, dtype=torch.complex64)
    ours = DistributedDataParallel(module, process_group=group)
    ours.register_comm_hook(
        group, {"fp16": fp16_compress_hook, "wrapped": fp16_compress_wrapper(allreduce_hook)}[hook]
    )
    try:
        ours(torch.full((1, 3), complex(group.rank() + 1, 1))).abs().sum().backward()
    except GradientSyncError as error:
        return str(error)
    return [torch.view_as_real(g) for g in gradients(module)]


def test_complex_gradients_are_compressed_as_pairs_or_refused() -> None:
    first, second = run_ranks(complex_gradients, 2, "fp16", backend="host")
    assert all(map(torch.equal, first, second))
    assert all(torch.equal(g, g.half().float()) and g[..., 1].abs().sum() > 0 for g in first)
    for message in run_ranks(complex_gradients, 2, "wrapped", backend="host"):
        assert "torch.complex64 gradients (bias, weight) cannot be cast to torch.float16" in message


class Told:
    """A hook that is told of failed passes and of buckets laid out anew."""

    __name__ = "told"

    def __init__(self):
        self.told = []

    def __call__(self, state, bucket):
        raise AssertionError

    def pass_failed(self):
        self.told.append("failed")

    def buckets_rebuilt(self, before, after):
        self.told.append("rebuilt")


def test_wrappers_pass_on_what_hooks_are_told():
    hook = Told()
    wrapped = fp16_compress_wrapper(hook)
    wrapped.pass_failed()
    wrapped.buckets_rebuilt([], [])
    assert hook.told == ["failed", "rebuilt"]


@on_ranks(1)
def test_steps_in_hooks_pass_on_what_hooks_are_told(group):
    hook, model = Told(), DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, group, overlap_with_ddp=True, lr=0.1)
    wrapped = hook_with_zero_step(hook, model, zero)
    wrapped.pass_failed()
    wrapped.buckets_rebuilt([], [])
    assert hook.told == ["failed", "rebuilt"]
