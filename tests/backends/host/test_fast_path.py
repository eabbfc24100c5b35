"""The fast path into the core takes the usual calls, and leaves every other to the ordinary methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import run_ranks

import collectives
from collectives import ReduceOp
from collectives.core.operations import ALL_GATHER, ALL_REDUCE, Call
from collectives.core.process_group import ProcessGroup
from collectives.core.work import COMPLETED, Work
from collectives.store import HashStore

USUAL: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "all_reduce": lambda a, b: collectives.all_reduce(a, ReduceOp.AVG),
    "broadcast": lambda a, b: collectives.broadcast(a, 0),
    "reduce": lambda a, b: collectives.reduce(a, 0, ReduceOp.MAX),
    "all_gather": lambda a, b: collectives.all_gather([a], b),
    "all_gather_single": collectives.all_gather_single,
    "gather": lambda a, b: collectives.gather(b, [a], 0),
    "scatter": lambda a, b: collectives.scatter(a, [b], 0),
    "reduce_scatter": lambda a, b: collectives.reduce_scatter(a, [b]),
    "reduce_scatter_single": collectives.reduce_scatter_single,
    "all_to_all": lambda a, b: collectives.all_to_all([a], [b]),
    "all_to_all_single": collectives.all_to_all_single,
    "barrier": lambda a, b: collectives.barrier(),
}


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the operations that the ordinary methods carried out, in a world of one rank."""
    collectives.init_process_group("host", store=HashStore(), rank=0, world_size=1)
    group = collectives.group.WORLD
    assert group is not None
    seen: list[str] = []

    issue, send = group.issue, group._send

    def watch_issue(call: Call) -> Work:
        seen.append(call.operation.name)
        return issue(call)

    def watch_send(*arguments: Any) -> Work:
        seen.append("send")
        return send(*arguments)

    monkeypatch.setattr(group, "issue", watch_issue)
    monkeypatch.setattr(group, "_send", watch_send)
    yield seen
    collectives.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("name", USUAL)
def test_the_usual_call_is_plain(ordinary: list[str], name: str, dtype: torch.dtype) -> None:
    output, source = torch.full((6,), 3, dtype=dtype), torch.arange(6).to(dtype)
    USUAL[name](output, source)
    assert not ordinary
    unchanged = name in {"all_reduce", "broadcast", "reduce", "barrier"}
    assert torch.equal(output, torch.full((6,), 3, dtype=dtype) if unchanged else source)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4, 4).t(), torch.ones(3, dtype=torch.complex64), torch._neg_view(torch.ones(3))],
    ids=["strided", "complex", "negated"],
)
def test_other_tensors_take_the_ordinary_way(ordinary: list[str], tensor: torch.Tensor) -> None:
    before = tensor.clone()
    collectives.all_reduce(tensor)
    collectives.broadcast(tensor, 0)
    assert set(ordinary) == {"all_reduce", "broadcast"}
    assert torch.equal(tensor, before)


def test_an_asynchronous_call_is_plain_and_a_limit_of_its_own_is_not(ordinary: list[str]) -> None:
    work = collectives.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    work.wait()
    collectives.barrier(timeout=collectives.default_pg_timeout)
    assert ordinary == ["barrier"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: collectives.broadcast(x, True), TypeError),
        (lambda x: collectives.broadcast(x, 1), ValueError),
        (lambda x: collectives.all_gather(x, x), TypeError),
        (lambda x: collectives.all_gather_single([x], x), TypeError),
        (lambda x: collectives.all_gather([x, x], x), ValueError),
        (lambda x: collectives.all_gather([torch.ones(3)], x), ValueError),
        (lambda x: collectives.all_gather([x.double()], x), ValueError),
        (lambda x: collectives.gather(x, [torch.ones(3)], 0), ValueError),
        (lambda x: collectives.scatter(x, None, 0), ValueError),
        (lambda x: collectives.reduce_scatter_single(x, torch.ones(3)), ValueError),
        (lambda x: collectives.all_to_all_single(x, [x]), TypeError),
        (lambda x: collectives.all_to_all(x, x), TypeError),
        (lambda x: collectives.all_reduce(x, ReduceOp.BAND), NotImplementedError),
        (lambda x: collectives.all_reduce(None), TypeError),
    ],
)
def test_wrong_arguments_raise_as_in_the_ordinary_methods(
    ordinary: list[str], call: Callable[[torch.Tensor], object], error: type[Exception]
) -> None:
    x = torch.ones(2)
    with pytest.raises(error, match="rank 0"):
        call(x)
    assert not ordinary
    assert torch.equal(x, torch.ones(2))


def test_a_backend_need_not_have_a_fast_path(ordinary: list[str]) -> None:
    group = collectives.group.WORLD
    assert group is not None
    assert ProcessGroup.fast_collective(group, ALL_REDUCE.opcode, torch.ones(2)) is None
    assert ProcessGroup.fast_message(group, True, torch.ones(2), 0, 0) is None
    assert not ordinary


def test_a_declined_call_tries_the_fast_path_once(
    ordinary: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = collectives.group.WORLD
    tries: list[tuple[Any, ...]] = []
    for name in ("fast_collective", "fast_message"):
        monkeypatch.setattr(group, name, lambda *arguments, **_: tries.append(arguments))
    x = torch.ones(2)
    collectives.all_reduce(x)
    works = [collectives.isend(x, 0), collectives.irecv(x, 0), collectives.broadcast(x, 0, async_op=True)]
    for work in works:
        assert work is not None
        work.wait()
    assert len(tries) == 4
    assert ordinary == ["all_reduce", "send", "broadcast"]


@pytest.mark.parametrize("async_op", [False, True])
def test_what_the_fast_path_returns(ordinary: list[str], async_op: bool) -> None:
    group = collectives.group.WORLD
    assert group is not None
    x, y = torch.ones(2), torch.zeros(2)
    work = group.fast_collective(ALL_REDUCE.opcode, x, reduce_op=ReduceOp.SUM.code, async_op=async_op)
    sent = group.fast_message(True, x, 0, 1, True)
    received = group.fast_message(False, y, 0, 1, async_op)
    for one, outputs in ((work, [x]), (received, [y])):
        assert one is not None
        assert one.wait()
        assert one.is_completed()
        if async_op:
            assert [output.data_ptr() for output in one.result()] == [t.data_ptr() for t in outputs]
        else:
            assert one is COMPLETED
    assert sent is not None
    assert sent.wait()
    assert torch.equal(y, x)
    assert not ordinary


@pytest.mark.parametrize("name", [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)])
def test_narrow_integers_are_not_taken_for_wider_ones(ordinary: list[str], name: str) -> None:
    tensor = torch.ones(8, dtype=torch.uint8).view(getattr(torch, name))
    with pytest.raises(collectives.UnsupportedOperationError, match=f"{name} cannot be reduced"):
        collectives.all_reduce(tensor)
    collectives.broadcast(tensor, 0)
    assert ordinary == ["broadcast"]


def gathers_into_one_tensor(group: ProcessGroup) -> None:
    tensor, apart = torch.zeros(2), [torch.zeros(1), torch.zeros(1)]
    gather = functools.partial(group.fast_collective, ALL_GATHER.opcode, list_form=True)
    assert gather([tensor, tensor], torch.ones(2)) is None
    assert gather([tensor[:1], tensor[:1]], torch.ones(1)) is None
    assert gather([tensor[1:], tensor[:1]], torch.ones(1))
    assert gather(apart[::-1], torch.ones(1))


def test_outputs_that_share_memory_are_left_to_the_ordinary_methods() -> None:
    run_ranks(gathers_into_one_tensor, 2, backend="host")
