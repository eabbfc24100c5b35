"""What ranks run for a row, as programs of their own of which the end counts.

Each is an interpreter that runs one body, answers into a file, and exits as a user's program does. Of the
cases, streams ask whether the order of streams holds: late producers, memory that is given out again, no
waiting host. Failures ask what ranks see when one of them dies, stops, does not come or leaves, and what
remains afterwards; the last rank is the one that something happens to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch._C import _distributed_c10d as c10d

from collectives import ProcessGroup
from collectives.bench.acceptance.platform import Graph, Platform, load
from collectives.bench.acceptance.report import CheckFailedError
from collectives.bench.core.ranks import LOCALHOST, TIMEOUT, parent_store
from collectives.core.types import AllreduceOptions
from collectives.ddp import DistributedDataParallel
from collectives.errors import DistError
from collectives.store import TCPStore

_POLL_S = 0.02
_TAIL = 2000
"""Characters of the output that are kept."""


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        status: its exit status, negative for a signal; ``None`` where it did not end by itself.
        answer: its answer; ``None`` where it gave none.
        exit_seconds: from its answer to its end.
        output: the end of what it printed.
    """

    status: int | None
    answer: Mapping[str, Any] | None
    exit_seconds: float
    output: str


def write_answer(folder: str, rank: int, values: Mapping[str, Any]) -> None:
    """Leaves a rank's answer for the parent; the last one counts."""
    new = Path(folder, f"{rank}.new")
    new.write_text(json.dumps({"values": values, "at": time.monotonic()}), encoding="utf-8")
    new.replace(Path(folder, f"{rank}.json"))


def run_ranks(
    platform: str,
    body: str,
    size: int,
    limit_s: float,
    *,
    environment: Mapping[str, str],
    without: Collection[int] = (),
) -> list[RankEnd]:
    """Runs a body on every rank; blocks until they have ended, and leaves no process.

    Args:
        platform: name of the platform's module.
        body: name of one of the cases.
        size: number of ranks.
        limit_s: seconds after which those that still run are killed.
        environment: what to add to theirs.
        without: ranks that are not waited for.
    """
    store = parent_store()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="collectives-accept-"))
        command = [sys.executable, "-m", "collectives.bench.acceptance.cases", platform, body]
        processes, outputs = [], []
        for rank in range(size):
            outputs.append(stack.enter_context(Path(folder, f"{rank}.output").open("w+b")))
            process = subprocess.Popen(
                [*command, str(rank), str(size), str(store.port), folder],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=outputs[rank],
                stderr=subprocess.STDOUT,
            )
            stack.callback(_kill, process)
            processes.append(process)
        ended = _wait_for([one for rank, one in enumerate(processes) if rank not in without], limit_s)
        statuses = [process.poll() for process in processes]
        for process in processes:
            _kill(process)
        ends = []
        for rank, process in enumerate(processes):
            answer, seconds = None, 0.0
            with suppress(FileNotFoundError):
                told = json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8"))
                answer, seconds = told["values"], ended.get(process.pid, time.monotonic()) - told["at"]
            outputs[rank].seek(0)
            text = outputs[rank].read().decode(errors="replace")[-_TAIL:]
            ends.append(RankEnd(statuses[rank], answer, seconds, text))
        return ends


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _wait_for(processes: list[subprocess.Popen[bytes]], limit_s: float) -> dict[int, float]:
    """Waits for processes; returns when each ended, by its number."""
    deadline = time.monotonic() + limit_s
    ended: dict[int, float] = {}
    while len(ended) < len(processes) and time.monotonic() < deadline:
        for process in processes:
            if process.pid not in ended and process.poll() is not None:
                ended[process.pid] = time.monotonic()
        time.sleep(_POLL_S)
    return ended


@dataclass(eq=False)
class Context:
    """A rank of a check.

    Attributes:
        platform: where the tensors are.
        rank: this rank.
        size: number of ranks.
        store: shared by the ranks.
        folder: where answers go.
        kept: what lives as long as the process.
    """

    platform: Platform
    rank: int
    size: int
    store: Any
    folder: str
    kept: list[object] = field(default_factory=list)

    @property
    def last(self) -> bool:
        """Whether this is the rank that something happens to."""
        return self.rank == self.size - 1

    def group(self, limit_s: float = 30.0, name: str = "accepted") -> ProcessGroup:
        """Returns a new group; called by all ranks, which give each of their groups another name."""
        store = c10d.PrefixStore(name, self.store)
        return self.platform.make_group(store, self.rank, self.size, timedelta(seconds=limit_s), name)

    def connected(self, limit_s: float = 30.0, name: str = "accepted") -> ProcessGroup:
        """Returns a new group whose ranks have reduced a tensor."""
        group = self.group(limit_s, name)
        group.allreduce(self.ones(1)).wait()
        group.barrier().wait()
        return group

    def ones(self, count: int) -> torch.Tensor:
        """Returns a tensor on the device."""
        return self.full(count, 1.0)

    def full(self, count: int, value: float) -> torch.Tensor:
        """Returns a tensor of equal values on the device."""
        return torch.full((count,), value, device=self.platform.kind)

    def strike(self, number: signal.Signals) -> None:
        """Sends the last rank a signal."""
        if self.last:
            os.kill(os.getpid(), number)

    def meet(self, name: str) -> None:
        """Waits for all ranks without communication; each name is used once."""
        self.store.set(f"{name}/{self.rank}", "here")
        self.store.wait([f"{name}/{rank}" for rank in range(self.size)])

    def tell(self, name: str) -> None:
        """Lets :meth:`hear` return on other ranks."""
        self.store.set(name, "told")

    def hear(self, name: str) -> None:
        """Waits until a rank has told."""
        self.store.wait([name])

    def answer(self, **values: Any) -> None:
        """Leaves plain values for the parent."""
        write_answer(self.folder, self.rank, values)

    def answer_error_of(self, call: Callable[[], object]) -> None:
        """Answers with the error that a call raises, and how long that took."""
        began = time.monotonic()
        try:
            call()
        except DistError as error:
            seconds = time.monotonic() - began
            self.answer(error=type(error).__name__, said=str(error), seconds=seconds)
        else:
            self.answer(error=None, said="", seconds=time.monotonic() - began)


_EXIT_WITHIN_S: Final = 30.0

Judge = Callable[[Sequence[RankEnd]], Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """What is run for a row.

    Attributes:
        section: of the report.
        title: what happens, in words.
        body: what each rank runs.
        judge: returns figures of how the ranks ended, or raises ``CheckFailedError``.
        leaves: whether the last rank may never end by itself.
    """

    section: str
    title: str
    body: Callable[[Context], None]
    judge: Judge
    leaves: bool = False


CASES: Final[dict[str, Case]] = {}
"""The cases by the name of their body."""


def case(
    section: str, title: str, judge: Judge, *, leaves: bool = False
) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    """Returns a decorator that adds a body to the cases by its name; arguments as for :class:`Case`."""

    def add(body: Callable[[Context], None]) -> Callable[[Context], None]:
        CASES[body.__name__.removeprefix("_")] = Case(section, title, body, judge, leaves)
        return body

    return add


def answers_of(ends: Sequence[RankEnd], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the answers of ranks that must have answered and exited with status 0, in time.

    Args:
        ends: how all ranks ended.
        ranks: those that are meant.

    Raises:
        CheckFailedError: one has not.
    """
    answers = []
    for rank in ranks:
        end = ends[rank]
        if end.status != 0 or end.answer is None:
            how = "had to be killed" if end.status is None else f"ended with status {end.status}"
            raise CheckFailedError(f"rank {rank} {how}; it said: {end.output.strip() or 'nothing'}")
        exits_in_time(rank, end)
        answers.append(dict(end.answer))
    return answers


def right_values(ends: Sequence[RankEnd]) -> Mapping[str, Any]:
    """Returns the number of ranks, each of which must have answered with what was wanted.

    Raises:
        CheckFailedError: one has not.
    """
    for rank, answer in enumerate(answers_of(ends, range(len(ends)))):
        if answer["found"] != answer["wanted"]:
            raise CheckFailedError(f"rank {rank} has {answer['found']} instead of {answer['wanted']}")
    return {"ranks": len(ends)}


def exits_in_time(rank: int, end: RankEnd) -> None:
    """Checks how long a rank took to exit.

    Raises:
        CheckFailedError: too long.
    """
    if end.exit_seconds > _EXIT_WITHIN_S:
        raise CheckFailedError(f"rank {rank} took {end.exit_seconds:.1f} s to exit")


_COUNT: Final = 1 << 14
_LATE_S: Final = 1.0
_TURNS: Final = 10
_WATCHED_S: Final = 0.05
"""Of ten such times, threads that watch groups look at what is under way in some."""
_WARM_UP: Final = 11
"""Iterations before one is captured, as torch asks for."""
_CLOSE: Final = 1e-5


def _right_without_waiting(ends: Sequence[RankEnd]) -> Mapping[str, Any]:
    figures = right_values(ends)
    seconds = max(end.answer["seconds_of_the_host"] for end in ends if end.answer is not None)
    if seconds >= _LATE_S:
        raise CheckFailedError(f"the host waited: {seconds:.2f} s for a stream that is {_LATE_S} s late")
    return {**figures, "seconds_of_the_host": seconds}


def _values(tensor: torch.Tensor) -> list[float]:
    return sorted(set(tensor.tolist()))


@case("streams", "a producer that is late", _right_without_waiting)
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


@case("streams", "tensors that nobody keeps", right_values)
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


@case("streams", "no call waits for a stream", right_values)
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


@case("streams", "no step of training waits for a stream", right_values)
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


def _graph_of(context: Context, group: ProcessGroup, calls: Callable[[], object]) -> Graph:
    """Returns a graph of some calls, which were made once before."""
    calls()
    group.barrier().wait()
    graph = context.platform.graph()
    with graph.capture():
        calls()
    return graph


@case("streams", "collectives in a graph", right_values)
def _captured(context: Context) -> None:
    group, size = context.connected(), context.size
    tensor, whole = context.ones(_COUNT), context.full(size * _COUNT, 0.0)

    def collectives() -> None:
        group.allreduce([tensor], AllreduceOptions(asyncOp=False)).wait()
        work = group.all_gather_single(whole, tensor)
        group.allreduce(tensor).wait()
        work.wait()

    graph = _graph_of(context, group, collectives)
    found, wanted = [], []
    for turn in range(_TURNS):
        tensor.fill_(float(turn))
        graph.replay()
        found += [*_values(tensor), *_values(whole)]
        wanted += [float(turn * size * size), float(turn * size)]
    graph.reset()
    group.shutdown()
    context.answer(found=found, wanted=wanted)


@case("streams", "a capture that forbids unsafe calls to all threads", right_values)
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


@case("streams", "an iteration of training in a graph", right_values)
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


_BLOCKS: Final = timedelta(seconds=25)
"""Lets ``wait()`` block the host until the error is there."""
_SHORT_S: Final = 3.0
_GROUPS: Final = 20
_PAUSE_S: Final = 0.05
_ERROR_WITHIN_S: Final = 20.0


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
            raise CheckFailedError(f"rank {rank} holds {grown} more after {_GROUPS} groups than after one")
    grown = max(answer["last"] - answer["first"] for answer in answers)
    return {"held_more": grown, "seconds_to_abort": max(answer["seconds"] for answer in answers)}


# ---- bodies --------------------------------------------------------------------------------------------


def _reduce(context: Context, group: Any) -> None:
    context.answer_error_of(lambda: group.allreduce(context.ones(3)).wait(_BLOCKS))
    group.abort()


@case("failures", "SIGKILL", _lost_judge)
def _killed(context: Context) -> None:
    group = context.connected()
    context.strike(signal.SIGKILL)
    _reduce(context, group)


@case("failures", "SIGSTOP", _survivors("CollectiveTimeoutError", status=None), leaves=True)
def _stopped(context: Context) -> None:
    group = context.connected(_SHORT_S)
    context.strike(signal.SIGSTOP)
    _reduce(context, group)


@case("failures", "a rank does not come", _survivors("CollectiveTimeoutError", status=0))
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


@case("failures", "an uncaught exception with an open irecv", _uncaught_judge)
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


def _trained(context: Context, group: ProcessGroup) -> tuple[DistributedDataParallel, torch.Tensor]:
    """Returns a model after one pass, and the inputs."""
    torch.manual_seed(7)
    kind = context.platform.kind
    module = DistributedDataParallel(torch.nn.Linear(4, 2).to(kind), process_group=group)
    inputs = torch.ones(3, 4).to(kind)
    module(inputs).sum().backward()
    return module, inputs


@case("failures", "exit with a live CUDA graph", _graph_judge)
def _live_graph(context: Context) -> None:
    group, tensor = context.connected(), context.ones(3)

    def collectives() -> None:
        group.allreduce([tensor], AllreduceOptions(asyncOp=False)).wait()
        group.allreduce(tensor).wait()

    graph = _graph_of(context, group, collectives)
    graph.replay()
    context.kept += [context, group, graph]
    context.answer(found=tensor.tolist(), wanted=[float(context.size**4)] * 3)


@case("failures", "SIGKILL during the replay of a graph", _lost_judge)
def _loss_in_a_replay(context: Context) -> None:
    _replay_without_the_last(context, context.connected(), signal.SIGKILL)


@case(
    "failures",
    "SIGSTOP during the replay of a graph",
    _survivors("GroupAbortedError", status=None),
    leaves=True,
)
def _stop_in_a_replay(context: Context) -> None:
    _replay_without_the_last(context, context.connected(_SHORT_S), signal.SIGSTOP)


def _replay_without_the_last(context: Context, group: Any, happens: signal.Signals) -> None:
    """Replays a graph with an operation that the last rank does not come to."""
    tensor = context.ones(3)
    graph = _graph_of(context, group, lambda: group.allreduce(tensor).wait())
    context.meet("captured")
    context.strike(happens)

    def goes_on() -> None:
        graph.replay()
        context.platform.finish()  # which the replay holds up until it is broken off
        group.allreduce(tensor)

    context.answer_error_of(goes_on)
    graph.reset()
    group.abort()


@case("failures", "exit with a loss of which nobody calls backward()", _exit_judge)
def _live_loss(context: Context) -> None:
    module, inputs = _trained(context, context.connected())
    context.kept += [context, module, module(inputs).sum()]
    context.answer()


@case("failures", "a forward that follows a loss in backward()", _lost_judge)
def _loss_in_training(context: Context) -> None:
    group = context.connected()
    module, inputs = _trained(context, group)
    loss = module(inputs).sum()
    context.strike(signal.SIGKILL)

    def goes_on() -> None:
        loss.backward()
        while group.is_stream_ordered(inputs.device):  # a forward does not wait for that pass
            module(inputs)
            time.sleep(_PAUSE_S)

    context.answer_error_of(goes_on)
    group.abort()


@case("failures", "a loss in the last backward()", _logged_judge)
def _loss_in_the_last_pass(context: Context) -> None:
    group = context.connected()
    module, inputs = _trained(context, group)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss = module(inputs).sum()
    context.strike(signal.SIGKILL)
    loss.backward()
    optimizer.step()
    context.answer_error_of(group.shutdown)


@case("failures", "no backward() that succeeds after a loss, where waits block", _lost_judge)
def _loss_under_blocking_waits(context: Context) -> None:
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    _loss_in_training(context)


@case("failures", f"{_GROUPS} times abort and make again", _memory_judge)
def _abort_and_make_again(context: Context) -> None:
    held, slowest = [], 0.0
    for turn in range(_GROUPS):
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


def _main(words: list[str]) -> None:
    """Runs the body.

    Args:
        words: module of the platform, name of the body, rank, number of ranks, port of the parent's store,
            and folder for the answer.
    """
    module, body, rank, size, port, folder = words
    torch.set_num_threads(1)
    platform = load(module)
    platform.take(int(rank), int(size))
    store = TCPStore(LOCALHOST, int(port), is_master=False, timeout=TIMEOUT)
    context = Context(platform, int(rank), int(size), store, folder)
    CASES[body].body(context)
    if CASES[body].section == "streams":  # others leave operations behind that never end
        platform.finish()


if __name__ == "__main__":
    _main(sys.argv[1:])
