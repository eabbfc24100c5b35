"""A rank that dies or stops in the middle of a backward pass: every other one gets an error in that pass."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_world import run_torch

from collectives.errors import DistBackendError, GroupAbortedError, PeerLostError

LOST = 1
LAYERS = 6
PATIENCE_S = 30.0
"""Far beyond any of the errors here, and far below the time limit of the tests."""


def layers():
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(LAYERS)))


def small_buckets(**options):
    """One bucket for each layer: the gradients of the last layers are on their way when the rank is lost."""
    return DistributedDataParallel(layers(), bucket_cap_mb=0.001, **options)


def plain():
    return small_buckets()


def static():
    return small_buckets(static_graph=True)


def finding_unused():
    return small_buckets(find_unused_parameters=True)


def hooked():
    def hook(_, bucket):
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    model = small_buckets()
    model.register_comm_hook(None, hook)
    return model


def sharded():
    from torch.distributed.fsdp import fully_shard  # ranks have it; those who only collect tests need not

    model = layers()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def in_words(error):
    """Returns class and text; behind a callback, a RuntimeError of torch's whose text names both."""
    return f"{type(error).__name__}: {error}"


def step(model, in_backward=None):
    """Runs forward and backward; ``in_backward`` is called when half of the layers have their gradients."""
    middle = {}
    half = next(module for module in model.modules() if isinstance(module, torch.nn.Sequential))[LAYERS // 2]
    handle = half.register_forward_hook(lambda _, __, output: middle.update(output=output))
    loss = model(torch.ones(2, 16)).sum()
    handle.remove()
    if in_backward is not None:
        middle["output"].register_hook(lambda _: in_backward())
    loss.backward()


def killed(rank, size, build):
    model = build()
    for _ in range(2):
        step(model)
    started = time.monotonic()
    if rank == LOST:
        step(model, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError) as raised:
        step(model)
    assert time.monotonic() - started < PATIENCE_S
    # whatever is called afterwards fails at once, with an error of its own class
    late = dist.all_reduce(torch.ones(2), async_op=True)
    with pytest.raises(DistBackendError):
        late.wait()
    with pytest.raises((PeerLostError, GroupAbortedError)):
        late.get_future().wait()
    with pytest.raises(RuntimeError):
        step(model)
    dist.group.WORLD.abort()
    return in_words(raised.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [plain, static, finding_unused, hooked, sharded])
def test_killed(build):
    answers = run_torch(killed, 3, build, isolated=True, lost=[LOST])
    assert answers[LOST].exitcode == -signal.SIGKILL
    for rank in {0, 1, 2} - {LOST}:
        assert "PeerLostError" in answers[rank] or "GroupAbortedError" in answers[rank]
        assert f"rank {LOST}" in answers[rank]


def stopped(rank, size, build):
    """One rank stops until the others have timed out; then its own backward fails, too."""
    model = build()
    store = dist.group.WORLD.get_group_store()
    for _ in range(2):
        step(model)
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    dist.group.WORLD.barrier(timeout=timedelta(seconds=30)).wait()
    waiting = timedelta(seconds=PATIENCE_S)
    others = [str(r) for r in range(size) if r != LOST]
    started = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        step(model, (lambda: store.wait(others, waiting)) if rank == LOST else None)
    assert time.monotonic() - started < PATIENCE_S
    store.set(str(rank), "raised")
    with pytest.raises(DistBackendError):
        dist.all_reduce(torch.ones(2))
    store.wait([str(r) for r in range(size)], waiting)
    dist.group.WORLD.abort()
    return in_words(raised.value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("build", [plain, hooked, sharded])
def test_stopped(build):
    answers = run_torch(stopped, 3, build, isolated=True)
    for answer in answers:
        assert any(
            kind in answer for kind in ("CollectiveTimeoutError", "PeerLostError", "GroupAbortedError")
        )
    assert any("CollectiveTimeoutError" in answers[rank] for rank in (0, 2)), answers
