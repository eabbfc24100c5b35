"""The sections of the report, each a function that yields its rows."""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Final
from xml.etree import ElementTree as ET

import torch

import collectives
import collectives._native as _native
from collectives.backends.nccl import ProcessGroupNCCL, providers
from collectives.backends.nccl.device import CudaDevice, Stream
from collectives.backends.nccl.libnccl import NcclLibrary
from collectives.backends.nccl.providers import loaded_files
from collectives.bench import ddp
from collectives.bench.acceptance import failures, streams
from collectives.bench.acceptance.platform import Platform
from collectives.bench.acceptance.ranks import Case, run_ranks
from collectives.bench.acceptance.report import CheckFailedError, CheckSkippedError, Found, Row, checked
from collectives.bench.comparison.goals import check as check_goal
from collectives.bench.comparison.goals import parse_goal
from collectives.bench.comparison.measurement import measure
from collectives.bench.comparison.operations import OPERATIONS
from collectives.bench.comparison.options import Options
from collectives.bench.comparison.records import Record
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.text import format_bytes, number_of_ranks, parse_sizes
from collectives.conformance.examination import Answer, Question, Status, examine, questions, unkept
from collectives.core.types import AllreduceOptions
from collectives.registry.backends import GroupOptions

_WARM_UP = 100
_COUNTED = 20


@dataclass(frozen=True)
class Cost:
    """What one call costs the host.

    Attributes:
        call: the call.
        frames: frames of Python.
        c_calls: calls of C functions by Python.
        microseconds: median time.
    """

    call: str
    frames: int
    c_calls: int
    microseconds: float


def measure_host_cost(calls: int) -> list[Cost]:
    """Returns the cost of the ways to call an all-reduce.

    Args:
        calls: how many of each are timed, 1 or more.
    """
    options = GroupOptions(collectives.HashStore(), 0, 1, group_name="stubbed")
    group = ProcessGroupNCCL(options, _Library("stub", ""), _Device)
    tensor, tensors = torch.ones(8), [torch.ones(8) for _ in range(10)]
    inline = AllreduceOptions(asyncOp=False)
    ways: dict[str, Callable[[], Any]] = {
        "all_reduce, asynchronous": lambda: group.allreduce(tensor).wait(),
        "all_reduce, synchronous": lambda: group.allreduce([tensor], inline).wait(),
        "all_reduce of 10, coalesced": lambda: group.allreduce_coalesced(tensors).wait(),
    }
    try:
        return [Cost(name, *_counted(call), _timed(call, calls)) for name, call in ways.items()]
    finally:
        group.abort()


def _counted(call: Callable[[], object]) -> tuple[int, int]:
    """Returns the frames and the calls of C functions of one call; the fewest of several.

    Some calls wake the watchdog, which sleeps while it has nothing to watch.
    """
    for _ in range(_WARM_UP):
        call()
    return min(_count(call) for _ in range(_COUNTED))


def _count(call: Callable[[], object]) -> tuple[int, int]:
    seen = {"call": -1, "c_call": -1}  # the lambda's frame, and the end of the counting

    def count(_: FrameType, event: str, __: object) -> None:
        if event in seen:
            seen[event] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen["call"], seen["c_call"]


def _timed(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


_NOTHING: Final = ctypes.cast(ctypes.CDLL(None).pthread_mutexattr_destroy, ctypes.c_void_p).value or 0
"""The address of a function of the C library that does nothing and returns 0."""


class _Library(NcclLibrary):
    """NCCL, whose functions do nothing."""

    def _address(self, name: str) -> int:  # noqa: ARG002
        return _NOTHING

    def call(self, name: str, *arguments: Any) -> None:
        pass

    def integer(self, name: str, *arguments: int) -> int:  # noqa: ARG002
        return 23007  # of the version, which alone is asked for


class _Device(CudaDevice):
    """The device of a user's groups; what it asks of torch and CUDA is stubbed."""

    kind: ClassVar[str] = "cpu"

    _raw_stream = {0: 64}.__getitem__

    def _open(self) -> int:
        return 0

    @staticmethod
    def _functions() -> Sequence[int]:
        return [_NOTHING] * len(_native.CudaStreams.functions())

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    @staticmethod
    def reduces_float8() -> bool:
        return True

    def _make_stream(self, high_priority: bool) -> Stream:  # noqa: ARG002
        return 65


GOAL: Final = "{ours} <= {theirs} * 1.1 + 10 us"
"""Python's share of a call, and a tenth, which runs of NCCL with itself differ by."""
LIMITS: Final[Mapping[str, tuple[int, float]]] = {
    "all_reduce, asynchronous": (40, 15.0),
    "all_reduce, synchronous": (41, 15.0),
    "all_reduce of 10, coalesced": (55, 30.0),
}
"""Most frames of Python and microseconds of a call, by the names of :func:`measure_host_cost`."""

SLOWER: Final = 1.05
"""What an iteration of training may take, of that of torch's wrapper."""

_MODELS: Final = ("resnet50", "bert-base", "gpt2")
_SIZES: Final = "8:4G:8"
_SHORT_SIZES: Final = "8:4K:512"
_SIZES_OF_OTHERS: Final = "64K:64M:32"
_SHORT_SIZES_OF_OTHERS: Final = "4K"
_BUFFERS: Final = 6
"""At most so many tensors of a size are in memory while it is measured."""
_SHORT_BUDGET_S: Final = 0.5
_CALLS: Final = 5000
_SHORT_CALLS: Final = 200


def bandwidth_rows(
    platform: Platform,
    ranks: int,
    provider: str,
    short: bool,
    budget_s: float = 60.0,
    *,
    others: bool = False,
) -> Iterator[Row]:
    """Yields a row for all sizes of an all-reduce of float32, and one for each as far as there is memory.

    Results must be right. Times are judged by :data:`GOAL` where each rank has a device of its own; what the
    host takes to issue a call stands beside them.

    Args:
        platform: where.
        ranks: how many.
        provider: package by which ours calls NCCL.
        short: few sizes, a moment each.
        budget_s: seconds that all sizes may take together.
        others: whether to measure all other operations instead, with a row for each.
    """
    operations = tuple(name for name in OPERATIONS if (name != "all_reduce") == others)
    full, few = (_SIZES_OF_OTHERS, _SHORT_SIZES_OF_OTHERS) if others else (_SIZES, _SHORT_SIZES)
    sizes = parse_sizes(few if short else full)
    where = f"{provider}, {ranks} ranks"
    records: list[Record] = []

    def run() -> Found:
        room = DEVICES[platform.kind].memory_per_rank_bytes(ranks) // _BUFFERS
        options = Options(
            backends=platform.compared,
            ranks=(ranks,),
            sizes=tuple(size for size in sizes if size <= room),
            operations=operations,
            budget_s=_SHORT_BUDGET_S if short else budget_s,
            device=platform.kind,
            provider=provider if platform.kind == "cuda" else None,
        )
        report = measure(options)
        if report.skipped:
            raise CheckFailedError("; ".join(f"{one.peer}: {one.reason}" for one in report.skipped))
        records.extend(report.records)
        largest = format_bytes(max(options.sizes))
        smallest = format_bytes(min(options.sizes))
        return f"{smallest} to {largest}", {"records": [record.as_json() for record in records]}

    what = "other operations" if others else "all_reduce"
    yield checked("bandwidth", f"{what}, {where}", run)
    judged = platform.times_tell and ranks <= len(platform.gpus())
    points: dict[str, list[Record]] = {}
    for record in records:
        point = record.operation
        if not others:
            point += f" of {format_bytes(record.size_bytes)}"
        points.setdefault(point, []).append(record)
    for point, some in points.items():
        yield checked(
            "bandwidth", f"{point}, {where}", partial(_compared_times, some, platform.compared, judged)
        )


def _compared_times(records: Sequence[Record], compared: tuple[str, str], times_tell: bool) -> Found:
    sizes = dict.fromkeys(record.size_bytes for record in records)
    said = []
    for record in records:
        rate = record.busbw_gb_per_s(record.cold)
        host = record.host or record.hot  # of a device that is done when the call returns
        size = f" at {format_bytes(record.size_bytes)}" if len(sizes) > 1 else ""
        said.append(
            f"{record.peer}{size} {record.cold.median_us:.1f} us, {rate or 0:.3g} GB/s, "
            f"host {host.median_us:.1f} us"
        )
    found = "; ".join(said)
    wrong = [
        f"{record.peer}: {record.wrong_elements} wrong elements"
        for record in records
        if record.wrong_elements
    ]
    if wrong:
        raise CheckFailedError("; ".join(wrong))
    if not times_tell:
        return f"{found}; no verdict on times here", {}
    goals = check_goal(parse_goal(GOAL.format(ours=compared[0], theirs=compared[1])), records)
    missed = [f"{goal.allowed_us:.1f} us are allowed" for goal in goals if not goal.is_met]
    if missed:
        raise CheckFailedError(f"{found}; {'; '.join(missed)}")
    return found, {"allowed_us": [goal.allowed_us for goal in goals]}


def models_of(platform: Platform, ranks: int, short: bool) -> tuple[str, ...]:
    """Returns the models to train: one where ranks share devices, whose times tell nothing.

    Args:
        platform: where.
        ranks: how many.
        short: a small one stands for all.
    """
    if short:
        return ("small",)
    return _MODELS if ranks <= len(platform.gpus()) else _MODELS[1:2]


def training_rows(
    platform: Platform, ranks: int, provider: str, short: bool, budget_s: float = 60.0
) -> Iterator[Row]:
    """Yields a row for each model that is trained with our wrapper and with torch's.

    Gradients must agree and ranks end with the same parameters. Times are judged by :data:`SLOWER` where each
    rank has a device of its own.

    Args:
        platform: where.
        ranks: how many.
        provider: package by which ours calls NCCL.
        short: a small model, few iterations.
        budget_s: seconds that the iterations of a model may take.
    """
    judged = platform.times_tell and ranks <= len(platform.gpus())
    for model in models_of(platform, ranks, short):
        asked = {
            "models": (model,),
            "peers": platform.trained,
            "ranks": ranks,
            "iterations": 4 if short else None,
            "budget_s": budget_s,
            "device": platform.kind,
        }
        name = f"{model}, {provider}, {number_of_ranks(ranks)}"
        yield checked("training", name, partial(_trained, asked, judged))


def _trained(asked: Mapping[str, Any], times_tell: bool) -> Found:
    report = ddp.measure(ddp.Options(**asked))
    if report.skipped:
        raise CheckFailedError("; ".join(f"{one.peer}: {one.reason}" for one in report.skipped))
    ours, theirs = report.records
    times = [record.iteration.median_us / 1e3 for record in (ours, theirs)]
    found = f"{ours.peer} {times[0]:.1f} ms, {theirs.peer} {times[1]:.1f} ms"
    figures = {"records": [report.record_as_json(record) for record in report.records]}
    if wrong := [record.peer for record in report.records if not record.agrees]:
        raise CheckFailedError(f"{found}; ranks or gradients differ: {', '.join(wrong)}")
    if not times_tell:
        return f"{found}; no verdict on times here", figures
    if times[0] > SLOWER * times[1]:
        raise CheckFailedError(f"{found}; {SLOWER} times torch's are allowed")
    return found, figures


def host_cost_rows(platform: Platform, short: bool) -> Iterator[Row]:
    """Yields a row for each way to call an all-reduce, with CUDA and NCCL stubbed.

    Args:
        platform: says whether times tell.
        short: a few calls.
    """
    costs: dict[str, Cost] = {}

    def run() -> Found:
        costs.update((cost.call, cost) for cost in measure_host_cost(_SHORT_CALLS if short else _CALLS))
        return f"{len(costs)} ways to call", {}

    yield checked("host-cost", "all", run)
    for name, cost in costs.items():
        yield checked("host-cost", name, partial(_cost, cost, *LIMITS[name], platform.times_tell))


def _cost(cost: Cost, frames: int, limit_us: float, times_tell: bool) -> Found:
    found = f"{cost.microseconds:.1f} us, {cost.frames} frames of Python, {cost.c_calls} calls of C"
    if cost.frames > frames:
        raise CheckFailedError(f"{found}; {frames} frames are allowed")
    if not times_tell:
        return f"{found}; no verdict on times here", asdict(cost)
    if cost.microseconds > limit_us:
        raise CheckFailedError(f"{found}; {limit_us} us are allowed")
    return found, asdict(cost)


_ONE_GPU_S: Final = 600.0
_EIGHT_GPUS_S: Final = 3600.0
"""What a run should take; in proportion between one GPU and eight."""
_MEASUREMENT_S: Final = 5.0, 60.0
"""What a measurement gets at least and at most, for all its peers together."""


@dataclass(frozen=True)
class Work:
    """What a section does.

    Attributes:
        seconds: what it takes, without what measurements may get.
        measurements: the number of rows that measure for as long as they are told to.
    """

    seconds: float = 0.0
    measurements: int = 0


@dataclass(frozen=True)
class Budget:
    """The time of a run.

    Attributes:
        measurements: their number.
        measurement_s: what each of them gets.
        total_s: what all takes.
    """

    measurements: int
    measurement_s: float
    total_s: float

    def __str__(self) -> str:
        said = f"about {max(1, round(self.total_s / 60))} min, longer where rows fail"
        if self.measurements:
            said += f"; {self.measurement_s:.0f} s for each of {self.measurements} measurements"
        return said


def budget_of(gpus: int, works: Iterable[Work]) -> Budget:
    """Returns the time of a run: measurements share what other rows leave, within limits.

    Args:
        gpus: number of devices.
        works: of the sections.
    """
    listed = [*works]
    fixed = sum(work.seconds for work in listed)
    number = sum(work.measurements for work in listed)
    share = min(1.0, (gpus - 1) / 7)
    left = _ONE_GPU_S + share * (_EIGHT_GPUS_S - _ONE_GPU_S) - fixed
    least, most = _MEASUREMENT_S
    each = min(most, max(least, left / max(number, 1)))
    return Budget(number, each, fixed + number * each)


_SHORT_TYPES: Final = (torch.float32,)
_START_S: Final = 15.0
_QUESTION_S: Final = 0.1
_CASE_S: Final = 8.0
_FAILURE_S: Final = 12.0
_TESTS_S: Final = 150.0
"""Guesses of what ranks take to start, and of a question, a case, or the tests on a number of ranks."""
_REFUSED_BY: Final = ("UnsupportedOperationError:", "NotImplementedError:", "TypeError:", "ValueError:")
"""Errors by which we, or the functions of torch above us, say that something is not offered."""
_EXAMINATION_S: Final = 600.0
"""After which ranks are asked no more questions."""
_LIMIT_S: Final = 120.0
"""After which the ranks of a failure are killed."""


@dataclass(frozen=True)
class Plan:
    """What is checked.

    Attributes:
        module: of the platform.
        platform: where.
        ranks: numbers of ranks; 1 is for training alone.
        short: whether one data type and one provider stand for all.
        measurement_s: seconds of each measurement of speed.
    """

    module: str
    platform: Platform
    ranks: Sequence[int]
    short: bool
    measurement_s: float = 60.0

    @property
    def several(self) -> Sequence[int]:
        """The numbers of ranks that have somebody to talk to."""
        return [ranks for ranks in self.ranks if ranks > 1]

    @property
    def providers(self) -> Sequence[str]:
        """The providers that are asked for values; elsewhere the first one stands for all.

        They differ in how they load NCCL, which is called in the same way after that.
        """
        return providers.PROVIDERS[:1] if self.short else providers.PROVIDERS


# ---- preflight -----------------------------------------------------------------------------------------


def _preflight(plan: Plan) -> Iterator[Row]:
    platform = plan.platform
    checks: dict[str, Callable[[], Found]] = {
        "devices": lambda: (", ".join(platform.gpus()), {"gpus": [*platform.gpus()]}),
        "driver and CUDA": lambda: (platform.versions(), {}),
        **{f"provider {name}": partial(_provider, name) for name in providers.PROVIDERS},
        "one libnccl": _one_file,
        "topology": lambda: (platform.topology(), {}),
        "peer access": partial(_peer_access, platform),
        "ranks and devices": partial(_sharing, plan),
    }
    for name, check in checks.items():
        yield checked("preflight", name, check)


def _provider(name: str) -> Found:
    reason = providers.unavailable(name)
    if reason is not None:
        raise CheckFailedError(reason)
    return providers.describe(name), {}


def _one_file() -> Found:
    files = loaded_files()
    if len(files) != 1:
        raise CheckFailedError(f"{len(files)} copies are loaded: {', '.join(files) or 'none'}")
    return files[0], {}


def _peer_access(platform: Platform) -> Found:
    pairs = [*permutations(range(len(platform.gpus())), 2)]
    without = [pair for pair in pairs if not platform.reaches(*pair)]
    said = f"{len(pairs) - len(without)} of {len(pairs)} pairs of devices"
    return said, {"pairs": len(pairs), "without": without}


def _sharing(plan: Plan) -> Found:
    number = len(plan.platform.gpus())
    shared = [ranks for ranks in plan.ranks if ranks > number]
    said = f"runs of {', '.join(map(str, plan.ranks))} ranks on {number} devices"
    if shared:
        said += f"; those of {', '.join(map(str, shared))} share devices, which tells nothing of speed"
    return said, {"ranks": [*plan.ranks], "shared": shared}


# ---- conformance ---------------------------------------------------------------------------------------


def _conformance(plan: Plan) -> Iterator[Row]:
    platform = plan.platform
    for ranks in plan.several:
        peers: dict[Question, Answer] = {}
        ask = partial(_ask, plan, ranks)
        check = partial(ask, plan.providers[0], platform.peer, platform.take_for_peer, None, peers)
        yield checked("conformance", f"torch:{platform.peer}, {ranks} ranks", partial(_as_far, check))
        for provider in plan.providers:
            answers: dict[Question, Answer] = {}
            where = f"{provider}, {ranks} ranks"
            with _provider_chosen(provider):
                check = partial(ask, provider, platform.backend, platform.take, platform.finish, answers)
                yield checked("conformance", f"all, {where}", check)
            for title in dict.fromkeys(question.title for question in answers):
                some = {question: a for question, a in answers.items() if question.title == title}
                yield checked("conformance", f"{title}, {where}", partial(_judged, platform, some, peers))


def _ask(
    plan: Plan,
    ranks: int,
    provider: str,
    backend: str,
    take: Callable[[int, int], object],
    verify: Callable[[], object] | None,
    answers: dict[Question, Answer],
) -> Found:
    """Asks ranks of a backend all questions of a provider, and notes the answers.

    Raises:
        CheckFailedError: it took too long, as where many ranks hang or die.
    """
    asked, end = _asked(plan, provider), time.monotonic() + _EXAMINATION_S

    def note(question: Question, answer: Answer) -> None:
        answers[question] = answer
        if len(answers) < len(asked) and time.monotonic() > end:
            raise CheckFailedError(
                f"only {len(answers)} of {len(asked)} questions were asked in {_EXAMINATION_S:.0f} s"
            )

    device = plan.platform.kind
    examine(
        backend,
        ranks,
        asked,
        imports=["collectives"],
        progress=note,
        device=device,
        prepare=take,
        verify=verify,
    )
    return f"{len(answers)} questions were answered", {}


def _as_far(ask: Callable[[], Found]) -> Found:
    """Asks the peer, whose ranks may hang: that is no failure of ours."""
    try:
        return ask()
    except CheckFailedError as error:
        return f"{error}; the others are not known", {}


def _asked(plan: Plan, provider: str) -> Sequence[Question]:
    """Returns what ranks are asked; all data types with the first provider alone."""
    return questions(_SHORT_TYPES if plan.short or provider != plan.providers[0] else None)


@contextmanager
def _provider_chosen(provider: str) -> Iterator[None]:
    before = os.environ.get(providers.PROVIDER_VARIABLE)
    os.environ[providers.PROVIDER_VARIABLE] = provider
    try:
        yield
    finally:
        if before is None:
            del os.environ[providers.PROVIDER_VARIABLE]
        else:
            os.environ[providers.PROVIDER_VARIABLE] = before


def _judged(
    platform: Platform, answers: Mapping[Question, Answer], peers: Mapping[Question, Answer]
) -> Found:
    """Returns how many data types of a function are right, and which the peer has beside them.

    Raises:
        CheckFailedError: values are wrong, ranks hang, what is stated was refused, or something was refused
            in another way than by an error that says so.
    """
    wrong, stated = [], platform.stated
    for question, answer in answers.items():
        refused = unkept(question, answer, stated, platform.kind)
        for what, why in answer.details.items():
            if answer.status in {Status.WRONG, Status.HANG}:
                wrong.append(f"{_data_type(question)} {answer.status.value}: {what}: {why}")
            elif what in refused:
                wrong.append(f"{_data_type(question)} is stated, but refused: {what}: {why}")
            elif not why.startswith(_REFUSED_BY):
                wrong.append(f"{_data_type(question)} is refused by an unexpected error: {what}: {why}")
    if wrong:
        raise CheckFailedError("\n".join(wrong))
    by_status = {
        status.value: [_data_type(question) for question, one in answers.items() if one.status is status]
        for status in (Status.OK, Status.UNSUPPORTED)
    }
    peer = {status.value: sum(peers[q].status is status for q in answers if q in peers) for status in Status}
    said = ", ".join(f"{len(names)} {status}" for status, names in by_status.items() if names)
    beside = ", ".join(f"{number} {status}" for status, number in peer.items() if number)
    return f"{said}; torch's {beside or 'not known'}", {**by_status, "peer": peer}


def _data_type(question: Question) -> str:
    return "-" if question.dtype is None else str(question.dtype).removeprefix("torch.")


# ---- what ranks run, and the repository's tests --------------------------------------------------


def _cases(section: str, cases: Mapping[str, Case], plan: Plan) -> Iterator[Row]:
    for ranks, provider, name in _runs(cases, plan):
        title = f"{cases[name].title}, {provider}, {ranks} ranks"
        yield checked(section, title, partial(_case, plan, name, cases[name], provider, ranks))


def _runs(cases: Mapping[str, Case], plan: Plan) -> list[tuple[int, str, str]]:
    """Returns number of ranks, provider and name of each case that is run."""
    return [(ranks, plan.providers[0], name) for ranks in plan.several for name in cases]


def _case(plan: Plan, name: str, case: Case, provider: str, ranks: int) -> Found:
    ends = run_ranks(
        plan.module,
        name,
        ranks,
        _LIMIT_S,
        environment={providers.PROVIDER_VARIABLE: provider},
        without=[ranks - 1] if case.leaves else [],
    )
    figures = case.judge(ends)
    words = (f"{value:.1f}" if isinstance(value, float) else str(value) for value in figures.values())
    said = (f"{key.replace('_', ' ')} {word}" for key, word in zip(figures, words, strict=True))
    return ", ".join(said), figures


def _bandwidth(plan: Plan) -> Iterator[Row]:
    for ranks in plan.several:
        for others in (False, True):
            asked = plan.platform, ranks, plan.providers[0], plan.short, plan.measurement_s
            yield from bandwidth_rows(*asked, others=others)


def _training(plan: Plan) -> Iterator[Row]:
    provider = plan.providers[0]
    for ranks in plan.ranks:
        with _provider_chosen(provider):
            yield from training_rows(plan.platform, ranks, provider, plan.short, plan.measurement_s)


def _host_cost(plan: Plan) -> Iterator[Row]:
    yield from host_cost_rows(plan.platform, plan.short)


def _tests(plan: Plan) -> Iterator[Row]:
    words, left_out = plan.platform.tests, plan.platform.tests_left_out
    yield checked("tests", f"pytest {' '.join(words)}", partial(run_tests, words, left_out))


SECTIONS: Final[Mapping[str, Callable[[Plan], Iterator[Row]]]] = {
    "preflight": _preflight,
    "conformance": _conformance,
    "streams": partial(_cases, "streams", streams.CASES),
    "failures": partial(_cases, "failures", failures.CASES),
    "bandwidth": _bandwidth,
    "training": _training,
    "host-cost": _host_cost,
    "tests": _tests,
}
"""The sections by name, in order."""


def budget_for(plan: Plan, sections: Sequence[str]) -> Budget:
    """Returns the time of some sections."""
    teams, models = len(plan.several), [models_of(plan.platform, n, plan.short) for n in plan.ranks]
    examined = [len(_asked(plan, provider)) for provider in plan.providers]
    trained, measured = sum(map(len, models)), not plan.short  # a short measurement takes a moment
    works = {
        "preflight": Work(5.0),
        "conformance": Work(teams * sum(_START_S + _QUESTION_S * n for n in (examined[0], *examined))),
        "streams": Work(_CASE_S * len(_runs(streams.CASES, plan))),
        "failures": Work(_FAILURE_S * len(_runs(failures.CASES, plan))),
        "bandwidth": Work(2 * teams * _START_S, 2 * teams * measured),
        "training": Work(trained * _START_S, trained * measured),
        "host-cost": Work(10.0),
        "tests": Work(_TESTS_S * teams),
    }
    return budget_of(len(plan.platform.gpus()), [work for name, work in works.items() if name in sections])


OF_SEVERAL_RANKS: Final = frozenset({"conformance", "streams", "failures", "bandwidth"})
"""Those that one rank alone says nothing of."""


_TESTS_LIMIT_S: Final = 1800.0
_TAIL: Final = 3000


def root() -> Path:
    """Returns the folder that the package lies in: of a checkout, its root."""
    return Path(collectives.__file__).resolve().parents[1]


def run_tests(words: Sequence[str], left_out: str = "") -> Found:
    """Runs tests of the repository; returns their numbers in words and as figures.

    Args:
        words: arguments of pytest.
        left_out: what those leave out, in words.

    Raises:
        CheckSkippedError: there is no repository, or no test failed, but some were skipped.
        CheckFailedError: tests failed, or none was run.
    """
    folder = root()
    if not (folder / "tests" / "gpu").is_dir():
        raise CheckSkippedError(
            "the tests are part of the repository and not of the installed package; run the command from a "
            "checkout that was installed with pip install -e '.[dev]'"
        )
    with tempfile.TemporaryDirectory(prefix="collectives-accept-") as written:
        report = Path(written, "tests.xml")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TESTS_LIMIT_S,
            check=False,
        )
        if not report.exists():
            raise CheckFailedError(f"pytest ended with status {done.returncode}: {done.stdout[-_TAIL:]}")
        suites = list(ET.parse(report).iter("testsuite"))  # noqa: S314 - pytest has just written it
    kinds = ("tests", "failures", "errors", "skipped")
    counts = {kind: sum(int(suite.get(kind, 0)) for suite in suites) for kind in kinds}
    if done.returncode:
        raise CheckFailedError(f"pytest ended with status {done.returncode}: {done.stdout[-_TAIL:]}")
    if counts["skipped"]:
        raise CheckSkippedError(f"{counts['skipped']} of {counts['tests']} tests: {done.stdout[-_TAIL:]}")
    said = f"{counts['tests']} tests passed"
    return f"{said}; left out: {left_out}" if left_out else said, counts
