"""torch's operations on the double's streams return before they are carried out, as on a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from nccl_double.device import DoubleDevice, pool_stream, tensors_on_device
from nccl_double.groups import load, run_over_double

from collectives import ProcessGroup

CPU = torch.device("cpu")
SECONDS = 20.0
"""How long a stream is held at most."""


def device() -> DoubleDevice:
    shared = DoubleDevice.shared(CPU)
    assert isinstance(shared, DoubleDevice)
    return shared


@contextmanager
def on_a_held_stream() -> Iterator[Callable[[], bool]]:
    """Has a stream that carries nothing out until the end; yields what says whether it is held."""
    own, goes_on = pool_stream(), threading.Event()
    passed = threading.Event()

    def hold() -> None:
        goes_on.wait(SECONDS)
        passed.set()

    device().wait(own, device().record(device().current_stream()))
    with device().using(own):
        device().call(own, hold)
        try:
            yield lambda: not passed.is_set()
        finally:
            goes_on.set()
    device().synchronize(own)


def lists(values: object) -> object:
    if isinstance(values, torch.Tensor):
        return values.tolist()
    return [lists(value) for value in values]  # type: ignore[attr-defined]


def trained(x: torch.Tensor) -> list[torch.Tensor]:
    weight = torch.full((3, 3), 0.5).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        torch.tanh(x @ weight).square().mean().backward()
        optimizer.step()
    assert weight.grad is not None
    return [weight.detach(), weight.grad]


def into_another(x: torch.Tensor) -> torch.Tensor:
    output = torch.zeros(3, 3)
    torch.add(x, x, out=output)
    return output


def of_lists(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.clone()
    torch._foreach_add_([y, x[0]], 1.0)
    return [y, *torch._foreach_mul([x, y], 2.0)]


LATE: list[Callable[[torch.Tensor], object]] = [
    lambda x: x * 2 + 1,
    lambda x: [torch.ones(3), torch.arange(4), torch.zeros_like(x), torch.full((2,), 7)],
    lambda x: x.to(torch.float64).sum(dim=0),
    lambda x: torch.cat([x, x.T]).clone(),
    lambda x: x.clamp_(min=2.0).addmm_(x, x),
    lambda x: torch.softmax(x @ x, dim=1).max(dim=1).values,
    lambda x: torch.nn.functional.layer_norm(x, (3,)),
    into_another,
    of_lists,
    trained,
]


def given() -> torch.Tensor:
    return torch.arange(9.0).view(3, 3) / 4


def returns_early() -> None:
    expected = [lists(call(given())) for call in LATE]
    with device().activate():
        for call, values in zip(LATE, expected, strict=True):
            with tensors_on_device():
                x = given()
                with on_a_held_stream() as is_held:
                    results = call(x)
                    assert is_held(), f"operation {expected.index(values)} waited for its stream"
                assert lists(results) == values


def needs_values() -> None:
    """Shapes of results that depend on values, and random numbers, which are those of the order of calls."""
    with device().activate(), tensors_on_device():
        x = given()
        later = pool_stream()
        device().wait(later, device().record(device().current_stream()))
        with device().using(later):
            device().sleep(later, 0.1)
            x.add_(1)
            assert x[x > 2].shape == (4,)
            assert torch.nonzero(x > 2).shape == (4, 2)
            torch.manual_seed(3)
            drawn = [torch.randn(3), torch.zeros(3).uniform_(), torch.nn.functional.dropout(torch.ones(9))]
            torch.manual_seed(3)
            again = [torch.randn(3), torch.zeros(3).uniform_(), torch.nn.functional.dropout(torch.ones(9))]
            assert lists(drawn) == lists(again)


def read_in_a_hook() -> None:
    """What a hook of a backward pass reads on the host, the host waits for."""
    with device().activate(), tensors_on_device():
        weight, order = torch.ones(3).requires_grad_(), []

        def read(gradient: torch.Tensor) -> None:
            assert gradient.tolist() == [2.0] * 3
            order.append("host")

        weight.register_hook(read)
        own = device().current_stream()
        device().sleep(own, 0.1)
        device().call(own, lambda: order.append("stream"))
        (weight * 2).sum().backward()
        torch.autograd.grad((weight * 2).sum(), [weight])
        assert order == ["stream", "host", "host"]


def behind_a_place() -> None:
    """A stream waits for the place where an event was recorded, whatever the event is recorded for later."""
    first, second = pool_stream(), pool_stream()
    with device().activate(), tensors_on_device():
        x = torch.zeros(3)
        with on_a_held_stream() as is_held:
            x += 1
            device().order(first, device().current_stream())
            with device().using(first):
                x *= 2
            for event in [device().record(second) for _ in range(3)]:  # one is that which order() had
                event.synchronize()
            assert is_held()
            device().sleep(device().current_stream(), 0.1)
        device().synchronize(first)
        assert x.tolist() == [2.0] * 3


def refused_at_once() -> None:
    with device().activate(), tensors_on_device():
        for wrong in (
            lambda: torch.ones(2) + torch.ones(3),
            lambda: torch.ones(2).add_(torch.ones(3)),
            lambda: torch.ones(2, 3) @ torch.ones(2, 3),
        ):
            with pytest.raises(RuntimeError, match=r"size|shape"):
                wrong()


def fails_later() -> None:
    with (
        device().activate(),
        pytest.raises(
            AssertionError, match=r"aten\.gather\.default at .*: RuntimeError: index 5 is out of bounds"
        ),
        tensors_on_device(),
    ):
        torch.gather(torch.ones(3), 0, torch.full((1,), 5)).tolist()


def on_one_rank(rank: int, size: int, path: Path) -> None:
    load(path)
    for body in (
        returns_early,
        needs_values,
        read_in_a_hook,
        behind_a_place,
        refused_at_once,
        fails_later,
    ):
        body()


def test_operations_on_late_streams(nccl_library: Path) -> None:
    run_ranks(on_one_rank, 1, nccl_library, isolated=True)


def produced_late(group: ProcessGroup) -> None:
    """What is computed late is reduced when it is there, and what is computed of that comes behind."""
    me, size = group.rank(), group.size()
    group.allreduce(torch.ones(1)).wait()
    with on_a_held_stream() as is_held:
        x = torch.full((4,), 1.0 + me) * 2
        work = group.allreduce(x)
        strided = torch.stack([torch.full((4,), float(me))] * 2, dim=1)[:, 0]
        other = group.broadcast(strided, root=1)
        work.wait()
        y = x.sqrt().square() + 1
        other.wait()
        z = strided * 2
        assert is_held()
    total = float(sum(2 * rank for rank in range(1, size + 1)))
    torch.testing.assert_close(y, torch.full((4,), total + 1))
    assert x.tolist() == [total] * 4
    assert z.tolist() == [2.0] * 4


def test_operations_of_nccl_wait_for_late_ones(nccl_library: Path) -> None:
    run_over_double(produced_late, 2, nccl_library)


def returned_early(group: ProcessGroup) -> torch.Tensor:
    x = torch.ones(4)
    group.allreduce(x).wait()
    device().sleep(device().current_stream(), 0.3)
    return x + 1


def test_what_a_body_returns_is_there_when_it_leaves_the_rank(nccl_library: Path) -> None:
    assert [x.tolist() for x in run_over_double(returned_early, 2, nccl_library)] == [[3.0] * 4] * 2
