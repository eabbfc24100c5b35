"""Whether the order of streams holds: late producers, memory that is given out again, no waiting host."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from collectives.bench.acceptance.ranks import Case, Context, RankEnd, case, right_values
from collectives.bench.acceptance.report import CheckFailedError
from collectives.core.types import AllreduceOptions
from collectives.ddp import DistributedDataParallel

_COUNT: Final = 1 << 14
_LATE_S: Final = 1.0
_TURNS: Final = 10
_WATCHED_S: Final = 0.05
"""Of ten such times, threads that watch groups look at what is under way in some."""
_WARM_UP: Final = 11
"""Iterations before one is captured, as torch asks for."""
_CLOSE: Final = 1e-5


CASES: Final[dict[str, Case]] = {}
"""The checks by the name of their body."""


def _right_without_waiting(ends: Sequence[RankEnd]) -> Mapping[str, Any]:
    figures = right_values(ends)
    seconds = max(end.answer["seconds_of_the_host"] for end in ends if end.answer is not None)
    if seconds >= _LATE_S:
        raise CheckFailedError(f"the host waited: {seconds:.2f} s for a stream that is {_LATE_S} s late")
    return {**figures, "seconds_of_the_host": seconds}


def _values(tensor: torch.Tensor) -> list[float]:
    return sorted(set(tensor.tolist()))


@case(CASES, "a producer that is late", _right_without_waiting)
def _late_producer(context: Context) -> None:
    group, size = context.connected(), context.size
    found, waited = [], 0.0
    # CUDA loads a kernel when it is first used, and may wait for the device then: not in turns that count.
    for late_s, asynchronous in ((0.0, True), (0.0, False), (_LATE_S, True), (_LATE_S, False)):
        tensor = context.full(_COUNT, 0.0)
        group.barrier().wait()
        began = time.monotonic()
        context.platform.delay(late_s)
        tensor.fill_(context.rank + 1.0)
        group.allreduce([tensor], AllreduceOptions(asyncOp=asynchronous)).wait()
        tensor.mul_(2.0)  # behind the operation, on the current stream
        if late_s:
            waited = max(waited, time.monotonic() - began)
        found += _values(tensor)
    group.shutdown()
    context.answer(found=found, wanted=[float(size * (size + 1))] * 4, seconds_of_the_host=waited)


@case(CASES, "tensors that nobody keeps", right_values)
def _memory(context: Context) -> None:
    group, size = context.connected(), context.size
    results = []
    for turn in range(_TURNS):
        context.platform.delay(_LATE_S / _TURNS)
        given = context.full(_COUNT, float(turn))
        results.append(context.full(size * _COUNT, -2.0))
        group.all_gather_single(results[-1], given)
        del given
        for _ in range(4):  # would take its memory
            context.full(_COUNT, -1.0)
    group.barrier().wait()
    found = [value for result in results for value in _values(result)]
    group.shutdown()
    context.answer(found=found, wanted=[float(turn) for turn in range(_TURNS)])


@case(CASES, "no call waits for a stream", right_values)
def _no_waiting(context: Context) -> None:
    group, size = context.connected(), context.size
    tensor, whole = context.ones(_COUNT), context.full(size * _COUNT, 0.0)

    def collectives() -> None:
        for asynchronous in (True, False):
            group.allreduce([tensor], AllreduceOptions(asyncOp=asynchronous)).wait()
            group.broadcast(tensor, root=0).wait()
            group.all_gather_single(whole, tensor).wait()
            group.reduce_scatter_single(tensor, whole).wait()
            tensor.div_(size)

    collectives()
    tensor.fill_(1.0)
    group.barrier().wait()
    with context.platform.refusing_to_wait():
        collectives()
    found = [*_values(tensor), *_values(whole)]
    group.shutdown()
    context.answer(found=found, wanted=[float(size * size)] * 2)


@case(CASES, "no step of training waits for a stream", right_values)
def _no_waiting_training(context: Context) -> None:
    """Trains beside a module that sees the inputs of all ranks, without our wrapper."""
    group, kind = context.connected(), context.platform.kind
    inputs = [torch.full((8, 16), 0.1 * (rank + 1)) for rank in range(context.size)]
    given, whole = inputs[context.rank].to(kind), torch.cat(inputs).to(kind)
    module = DistributedDataParallel(_network(kind), process_group=group, bucket_cap_mb=0.001)
    alone = _network(kind)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, alone)]

    def step() -> None:
        optimizers[0].zero_grad()
        module(given).square().mean().backward()
        optimizers[0].step()

    for _ in range(_WARM_UP):
        step()
    group.barrier().wait()
    with context.platform.refusing_to_wait():
        for _ in range(_TURNS):
            step()
    for _ in range(_WARM_UP + _TURNS):
        optimizers[1].zero_grad()
        alone(whole).square().mean().backward()
        optimizers[1].step()
    found = [_are_close(module, alone)]
    group.shutdown()
    context.answer(found=found, wanted=[1.0])


def _network(kind: str) -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)).to(kind)


def _are_close(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Returns 1 where the parameters are the same but for rounding, else 0."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return float(max((mine - theirs).abs().max().item() for mine, theirs in pairs) <= _CLOSE)


@case(CASES, "collectives in a graph", right_values)
def _captured(context: Context) -> None:
    group, size = context.connected(), context.size
    tensor, whole = context.ones(_COUNT), context.full(size * _COUNT, 0.0)

    def collectives() -> None:
        group.allreduce([tensor], AllreduceOptions(asyncOp=False)).wait()
        work = group.all_gather_single(whole, tensor)
        group.allreduce(tensor).wait()
        work.wait()

    collectives()
    group.barrier().wait()
    graph = context.platform.graph()
    with graph.capture():
        collectives()
    found, wanted = [], []
    for turn in range(_TURNS):
        tensor.fill_(float(turn))
        graph.replay()
        found += [*_values(tensor), *_values(whole)]
        wanted += [float(turn * size * size), float(turn * size)]
    graph.reset()
    group.shutdown()
    context.answer(found=found, wanted=wanted)


@case(CASES, "a capture that forbids unsafe calls to all threads", right_values)
def _captured_beside_others(context: Context) -> None:
    """Captures in the mode that forbids most, while another thread issues, and threads of ours watch that."""
    group, other = context.connected(), context.connected(name="beside")
    tensor, elsewhere = context.ones(_COUNT), context.full(_COUNT, 0.0)
    group.barrier().wait()

    def goes_on() -> None:
        for _ in range(_TURNS):
            other.allreduce(elsewhere).wait()
            time.sleep(_WATCHED_S)

    thread = threading.Thread(target=goes_on)
    graph = context.platform.graph("global")
    with graph.capture():
        group.allreduce([tensor], AllreduceOptions(asyncOp=False)).wait()
        thread.start()
        thread.join()
        group.allreduce(tensor).wait()
    found, wanted = [], []
    for turn in range(_TURNS):
        tensor.fill_(float(turn))
        graph.replay()
        found += _values(tensor)
        wanted.append(float(turn * context.size**2))
    graph.reset()
    other.shutdown()
    group.shutdown()
    context.answer(found=found, wanted=wanted)


@case(CASES, "an iteration of training in a graph", right_values)
def _captured_training(context: Context) -> None:
    group, kind = context.connected(), context.platform.kind
    given = torch.zeros(8, 16, device=kind)
    modules, optimizers = [], []
    for _ in range(2):
        inner = _network(kind)
        modules.append(DistributedDataParallel(inner, process_group=group, bucket_cap_mb=0.001))
        optimizers.append(torch.optim.SGD(inner.parameters(), lr=0.1))

    def iteration(which: int) -> None:
        modules[which](given).square().mean().backward()
        optimizers[which].step()

    def next_inputs(turn: int) -> None:
        given.fill_(0.1 * (turn + context.rank))
        for optimizer in optimizers:
            optimizer.zero_grad()

    for turn in range(_WARM_UP):
        next_inputs(turn)
        iteration(0)
        iteration(1)
    next_inputs(_WARM_UP)
    graph = context.platform.graph()
    with graph.capture():
        optimizers[1].zero_grad()
        iteration(1)
    found = []
    for turn in range(_TURNS):
        given.fill_(0.1 * (turn - context.rank))
        optimizers[0].zero_grad()
        iteration(0)
        graph.replay()
        found.append(_are_close(*modules))
    graph.reset()
    group.shutdown()
    context.answer(found=found, wanted=[1.0] * _TURNS)
