"""What ranks see when one of them dies, stops, does not come or leaves, and what remains afterwards.

The last rank is the one that something happens to.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch

from collectives.bench.acceptance.ranks import (
    Case,
    Context,
    Judge,
    RankEnd,
    answers_of,
    case,
    exits_in_time,
    right_values,
)
from collectives.bench.acceptance.report import CheckFailedError
from collectives.core.types import AllreduceOptions
from collectives.ddp import DistributedDataParallel

_BLOCKS: Final = timedelta(seconds=25)
"""Lets ``wait()`` block the host until the error is there."""
_SHORT_S: Final = 3.0
_TURNS: Final = 20
_PAUSE_S: Final = 0.05
_ERROR_WITHIN_S: Final = 20.0


CASES: Final[dict[str, Case]] = {}
"""The failures by the name of their body."""


# ---- judges --------------------------------------------------------------------------------------------


def _survivors(error: str, *, status: int | None, names: bool = True) -> Judge:
    """Returns a judge: all but the last rank got an error that names it, and that one ended with a status."""

    def judge(ends: Sequence[RankEnd]) -> Mapping[str, Any]:
        last = len(ends) - 1
        answers = answers_of(ends, range(last))
        for rank, answer in enumerate(answers):
            found = answer["error"]
            if found is None:
                raise CheckFailedError(f"rank {rank} got no error, as if nothing had happened")
            if error not in {found, ""} or (names and f"rank {last}" not in answer["said"]):
                raise CheckFailedError(f"rank {rank} got {found}: {answer['said']}")
            if answer["seconds"] > _ERROR_WITHIN_S:
                raise CheckFailedError(f"rank {rank} got its error after {answer['seconds']:.1f} s")
        if ends[last].status != status:
            raise CheckFailedError(f"rank {last} ended with {ends[last].status} instead of {status}")
        seconds = max(answer["seconds"] for answer in answers)
        errors = sorted({answer["error"] for answer in answers})
        how = "none, killed by the check" if status is None else status
        return {"error": ", ".join(errors), "seconds_to_error": seconds, "exit_status": how}

    return judge


_lost_judge = _survivors("PeerLostError", status=-signal.SIGKILL)


def _uncaught_judge(ends: Sequence[RankEnd]) -> Mapping[str, Any]:
    figures = _survivors("", status=1, names=False)(ends)
    if "ValueError: nobody catches this" not in ends[-1].output:
        raise CheckFailedError(f"the exception was not shown; the rank said: {ends[-1].output}")
    exits_in_time(len(ends) - 1, ends[-1])
    return {**figures, "seconds_to_exit": ends[-1].exit_seconds}


def _logged_judge(ends: Sequence[RankEnd]) -> Mapping[str, Any]:
    """Returns figures of ranks that got an error, and that logged the loss without being asked."""
    figures = _lost_judge(ends)
    for rank, end in enumerate(ends[:-1]):
        if "the group is broken" not in end.output:
            raise CheckFailedError(f"rank {rank} logged nothing of it; it said: {end.output}")
    return figures


def _exit_judge(ends: Sequence[RankEnd]) -> Mapping[str, Any]:
    answers_of(ends, range(len(ends)))
    return {"seconds_to_exit": max(end.exit_seconds for end in ends)}


def _graph_judge(ends: Sequence[RankEnd]) -> Mapping[str, Any]:
    right_values(ends)
    return _exit_judge(ends)


def _memory_judge(ends: Sequence[RankEnd]) -> Mapping[str, Any]:
    answers = answers_of(ends, range(len(ends)))
    for rank, answer in enumerate(answers):
        grown = answer["last"] - answer["first"]
        if grown > answer["spare"]:
            raise CheckFailedError(f"rank {rank} holds {grown} more after {_TURNS} groups than after one")
    grown = max(answer["last"] - answer["first"] for answer in answers)
    return {"held_more": grown, "seconds_to_abort": max(answer["seconds"] for answer in answers)}


# ---- bodies --------------------------------------------------------------------------------------------


def _reduce(context: Context, group: Any) -> None:
    context.answer_error_of(lambda: group.allreduce(context.ones(3)).wait(_BLOCKS))
    group.abort()


@case(CASES, "SIGKILL", _lost_judge)
def _killed(context: Context) -> None:
    group = context.connected()
    if context.last:
        os.kill(os.getpid(), signal.SIGKILL)
    _reduce(context, group)


@case(CASES, "SIGSTOP", _survivors("CollectiveTimeoutError", status=None), leaves=True)
def _stopped(context: Context) -> None:
    group = context.connected(_SHORT_S)
    if context.last:
        os.kill(os.getpid(), signal.SIGSTOP)
    _reduce(context, group)


@case(CASES, "a rank does not come", _survivors("CollectiveTimeoutError", status=0))
def _missing(context: Context) -> None:
    group = context.group(_SHORT_S)
    if not context.last:
        context.answer_error_of(lambda: group.allreduce(context.ones(3)).wait(_BLOCKS))
        context.tell(f"gave up {context.rank}")
    for rank in range(context.size - 1):  # an abort would be told to those whose limit has yet to pass
        context.hear(f"gave up {rank}")
    if context.last:
        context.answer()
    group.abort()


@case(CASES, "an uncaught exception with an open irecv", _uncaught_judge)
def _uncaught(context: Context) -> None:
    group = context.connected()
    if context.rank == 0:
        group.send(context.ones(1), context.size - 1).wait()
        context.tell("sent")
    elif context.last:
        group.recv(context.ones(1), 0).wait()
        context.kept.append(group.recv(context.ones(1), 0))
        context.hear("sent")  # rank 0 would fail where it sends, for which it has no answer
        context.answer()
        raise ValueError("nobody catches this")
    _reduce(context, group)


def _network(context: Context, group: Any) -> Any:
    torch.manual_seed(7)
    return DistributedDataParallel(torch.nn.Linear(4, 2).to(context.platform.kind), process_group=group)


@case(CASES, "exit with a live CUDA graph", _graph_judge)
def _live_graph(context: Context) -> None:
    group, tensor = context.connected(), context.ones(3)

    def collectives() -> None:
        group.allreduce([tensor], AllreduceOptions(asyncOp=False)).wait()
        group.allreduce(tensor).wait()

    collectives()
    group.barrier().wait()
    graph = context.platform.graph()
    with graph.capture():
        collectives()
    graph.replay()
    context.kept += [context, group, graph]
    context.answer(found=tensor.tolist(), wanted=[float(context.size**4)] * 3)


@case(CASES, "SIGKILL during the replay of a graph", _lost_judge)
def _loss_in_a_replay(context: Context) -> None:
    _replay_without_the_last(context, context.connected(), signal.SIGKILL)


@case(
    CASES, "SIGSTOP during the replay of a graph", _survivors("GroupAbortedError", status=None), leaves=True
)
def _stop_in_a_replay(context: Context) -> None:
    _replay_without_the_last(context, context.connected(_SHORT_S), signal.SIGSTOP)


def _replay_without_the_last(context: Context, group: Any, happens: signal.Signals) -> None:
    """Replays a graph with an operation that the last rank does not come to."""
    tensor = context.ones(3)
    group.allreduce(tensor).wait()
    group.barrier().wait()
    graph = context.platform.graph()
    with graph.capture():
        group.allreduce(tensor).wait()
    context.meet("captured")
    if context.last:
        os.kill(os.getpid(), happens)

    def goes_on() -> None:
        graph.replay()
        context.platform.finish()  # which the replay holds up until it is broken off
        group.allreduce(tensor)

    context.answer_error_of(goes_on)
    graph.reset()
    group.abort()


@case(CASES, "exit with a loss of which nobody calls backward()", _exit_judge)
def _live_loss(context: Context) -> None:
    module = _network(context, context.connected())
    inputs = torch.ones(3, 4).to(context.platform.kind)
    module(inputs).sum().backward()
    context.kept += [context, module, module(inputs).sum()]
    context.answer()


@case(CASES, "a forward that follows a loss in backward()", _lost_judge)
def _loss_in_training(context: Context) -> None:
    group = context.connected()
    module = _network(context, group)
    inputs = torch.ones(3, 4).to(context.platform.kind)
    module(inputs).sum().backward()
    loss = module(inputs).sum()
    if context.last:
        os.kill(os.getpid(), signal.SIGKILL)

    def goes_on() -> None:
        loss.backward()
        while group.is_stream_ordered(inputs.device):  # a forward does not wait for that pass
            module(inputs)
            time.sleep(_PAUSE_S)

    context.answer_error_of(goes_on)
    group.abort()


@case(CASES, "a loss in the last backward()", _logged_judge)
def _loss_in_the_last_pass(context: Context) -> None:
    group = context.connected()
    module = _network(context, group)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs = torch.ones(3, 4).to(context.platform.kind)
    module(inputs).sum().backward()
    loss = module(inputs).sum()
    if context.last:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    context.answer_error_of(group.shutdown)


@case(
    CASES,
    "no backward() that succeeds after a loss, where waits block",
    _lost_judge,
)
def _loss_under_blocking_waits(context: Context) -> None:
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    _loss_in_training(context)


@case(CASES, f"{_TURNS} times abort and make again", _memory_judge)
def _abort_and_make_again(context: Context) -> None:
    held, slowest = [], 0.0
    for turn in range(_TURNS):
        group = context.connected(name=f"group {turn}")
        work = group.allreduce(context.ones(1000)) if context.rank == 0 else None
        began = time.monotonic()
        group.abort()
        slowest = max(slowest, time.monotonic() - began)
        del group, work
        context.meet(f"aborted {turn}")
        held.append(context.platform.held())
        context.meet(f"looked {turn}")
    context.answer(first=held[0], last=held[-1], spare=context.platform.held_tolerance, seconds=slowest)
