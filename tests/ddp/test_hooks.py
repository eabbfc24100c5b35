"""Communication hooks: what they get, what they may return, and what happens when they fail."""

from __future__ import annotations

import functools

import pytest
import torch
from ddp_oracle import naive_average
from harness import run_ranks, run_world
from torch import nn

from collectives.ddp import DistributedDataParallel, GradBucket
from collectives.ddp.hooks.debugging_hooks import noop_hook
from collectives.ddp.hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data(rank, seed=0):
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * seed + rank))


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


def without_communication(group):
    ours = DistributedDataParallel(model(), process_group=group, broadcast_buffers=False)
    ours.register_comm_hook(None, noop_hook)
    calls = []
    for name in ("_allreduce", "_allgather", "_allgather_single", "_broadcast"):
        plain = getattr(group, name)
        setattr(group, name, lambda *a, plain=plain, name=name: (calls.append(name), plain(*a))[1])
    found = []
    for step in range(2):
        ours.zero_grad()
        ours(data(group.rank(), step)).sum().backward()
        found.append(gradients(ours))
    return found, calls


def test_noop_hook_leaves_local_gradients_and_does_not_communicate() -> None:
    for rank, (found, calls) in enumerate(run_ranks(without_communication, 2, backend="host")):
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


def with_state(group):
    ours = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0)
    state = {}
    hook = Recorder(group)
    ours.register_comm_hook(state, hook)
    ours(data(group.rank())).sum().backward()
    return state, hook.seen, gradients(ours)


def test_hooks_get_their_state_and_undivided_gradients_in_order() -> None:
    for state, seen, found in run_ranks(with_state, 2, backend="host"):
        assert state == {"calls": 4}
        names = ["2.bias", "2.weight", "0.bias", "0.weight"]
        assert seen == [(i, i == 3, [name]) for i, name in enumerate(names)]
        for ours, first, second in zip(found, local_gradients(0), local_gradients(1), strict=True):
            assert torch.equal(ours, 3 * first + 3 * second + 1)


def default_group(rank, size):
    ours = DistributedDataParallel(model())
    ours.register_comm_hook(None, allreduce_hook)
    ours(data(rank)).sum().backward()
    naive = model()
    naive(data(rank)).sum().backward()
    naive_average(naive.parameters(), ours.process_group)
    return all(map(torch.equal, gradients(ours), gradients(naive)))


def test_the_default_group_stands_in_for_none() -> None:
    assert run_world(default_group, 2) == [True, True]


def done(value):
    future = torch.futures.Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def failing(group, what):
    """Returns the error of a hook that fails at first, and whether the next pass is good."""
    ours = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0)
    passes = []

    def hook(state, bucket):
        if len(passes) == 0 and bucket.index() == 1:
            if what == "raises":
                raise KeyError("in the hook")
            if what == "future fails":
                return done(OSError("in the future"))
            return {"no future": bucket.buffer(), "shape": done(torch.ones(7)), "two": done([1, 2])}[what]
        return allreduce_hook(group, bucket)

    ours.register_comm_hook(None, hook)
    try:
        ours(data(group.rank())).sum().backward()
    except Exception as error:  # noqa: BLE001
        seen = f"{type(error).__name__}: {error}"
    passes.append(1)
    ours.zero_grad()
    ours(data(group.rank())).sum().backward()
    naive = model()
    naive(data(group.rank())).sum().backward()
    naive_average(naive.parameters(), group)
    return seen, all(map(torch.equal, gradients(ours), gradients(naive)))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raises", "KeyError: 'in the hook'"),
        ("future fails", "OSError: in the future"),
        (
            "no future",
            "return a torch.futures.Future of a tensor, but returned a value of type Tensor for bucket 1",
        ),
        ("shape", "bucket 1 must hold a tensor of the bucket's shape [8], but its shape is [7]"),
        ("two", "bucket 1 must hold one tensor, but holds a value of type list"),
    ],
)
def test_a_failing_hook_gives_one_clear_error_and_training_goes_on(what, words) -> None:
    for seen, good in run_ranks(failing, 2, what, backend="host"):
        assert words in seen
        assert good


def wrong_registrations(group):
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
    return seen, len(late)


def test_registration_is_checked() -> None:
    for seen, late in run_ranks(wrong_registrations, 2, backend="host"):
        kinds = [kind for kind, _ in seen]
        assert kinds == ["TypeError", "TypeError", "ValueError", "ValueError"]
        assert "but is 5 of type int" in seen[0][1]
        assert "takes a state and a bucket" in seen[1][1]
        assert "argument bucket" in seen[2][1]
        assert "return value" in seen[3][1]
        assert late == 1


def complex_gradients(group, hook):
    torch.manual_seed(0)
    module = nn.Linear(3, 3, dtype=torch.complex64)
    ours = DistributedDataParallel(module, process_group=group)
    ours.register_comm_hook(
        group, {"fp16": fp16_compress_hook, "wrapped": fp16_compress_wrapper(allreduce_hook)}[hook]
    )
    try:
        ours(torch.full((1, 3), complex(group.rank() + 1, 1))).abs().sum().backward()
    except TypeError as error:
        return str(error)
    return [torch.view_as_real(g) for g in gradients(module)]


def test_complex_gradients_are_compressed_as_pairs_or_refused() -> None:
    first, second = run_ranks(complex_gradients, 2, "fp16", backend="host")
    assert all(map(torch.equal, first, second))
    assert all(torch.equal(g, g.half().float()) and g[..., 1].abs().sum() > 0 for g in first)
    for message in run_ranks(complex_gradients, 2, "wrapped", backend="host"):
        assert "torch.complex64 gradients (bias, weight) cannot be cast to torch.float16" in message
