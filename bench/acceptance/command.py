"""Checks the nccl backend on the GPUs of this machine, and reports row by row what holds.

Sections: preflight (driver, CUDA, one libnccl, both providers, topology), conformance (every function and
data type beside torch's own NCCL), streams (late producers, memory that is given out again, no waiting on the
host), failures (ranks that die, stop, do not come or leave), bandwidth (all-reduces beside torch's own NCCL),
training (beside torch's DistributedDataParallel), host-cost (of a call, with CUDA and NCCL stubbed) and tests
(those of the repository). Ends with status 1 where a row failed or was skipped. The files of --json and
--html are the report to send.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Final
from unittest import mock
from xml.etree import ElementTree as ET

import torch

import collectives
import collectives._native as _native
from collectives.backends.nccl import ProcessGroupNCCL, providers
from collectives.backends.nccl.device import CudaDevice, Stream
from collectives.backends.nccl.libnccl import NcclLibrary
from collectives.backends.nccl.providers import loaded_files
from collectives.bench import ddp
from collectives.bench.acceptance.cases import CASES, Case, run_ranks
from collectives.bench.acceptance.platform import Platform, load
from collectives.bench.acceptance.report import (
    CheckFailedError,
    CheckSkippedError,
    Found,
    Report,
    Row,
    Verdict,
    checked,
)
from collectives.bench.allreduce import Options, Record, measure
from collectives.bench.core.arguments import add_files, parse_counts, parse_names, write_files
from collectives.bench.core.devices import DEVICES, describe_machine, numbers_of_ranks
from collectives.bench.core.records import Skipped, format_bytes, grouped, number_of_ranks, parse_sizes
from collectives.bench.operations import OPERATIONS
from collectives.cli import CommandError
from collectives.conformance.examination import Answer, Question, Status, examine, questions, unkept
from collectives.core.types import AllreduceOptions
from collectives.registry.backends import GroupOptions

_WARM_UP = 100
_COUNTED = 20


@dataclass(frozen=True)
class Plan:
    """What is checked.

    Attributes:
        module: of the platform.
        platform: where.
        ranks: numbers of ranks; 1 is for training alone.
        short: whether one data type and one provider stand for all, and measurements take a moment.
    """

    module: str
    platform: Platform
    ranks: Sequence[int]
    short: bool

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

    def judges_times(self, ranks: int) -> bool:
        """Returns whether times tell something: where each rank has a device of its own."""
        return self.platform.times_tell and ranks <= len(self.platform.gpus())


# ---- host-cost -----------------------------------------------------------------------------------------


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
    costs = []
    try:
        for name, call in ways.items():
            for _ in range(_WARM_UP):
                call()
            # The fewest of several: some calls wake the watchdog, which sleeps while it has nothing to watch.
            frames, c_calls = min(_count(call) for _ in range(_COUNTED))
            times = timeit.repeat(call, number=1, repeat=calls)
            costs.append(Cost(name, frames, c_calls, statistics.median(times) * 1e6))
    finally:
        group.abort()
    return costs


def _count(call: Callable[[], object]) -> tuple[int, int]:
    """Returns the frames and the calls of C functions of one call."""
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


LIMITS: Final[Mapping[str, tuple[int, float]]] = {
    "all_reduce, asynchronous": (40, 15.0),
    "all_reduce, synchronous": (41, 15.0),
    "all_reduce of 10, coalesced": (55, 30.0),
}
"""Most frames of Python and microseconds of a call, by the names of :func:`measure_host_cost`."""

_CALLS: Final = 5000
_SHORT_CALLS: Final = 200


def _host_cost(plan: Plan) -> Iterator[Row]:
    """Yields a row for each way to call an all-reduce, with CUDA and NCCL stubbed."""
    costs: dict[str, Cost] = {}

    def run() -> Found:
        costs.update((cost.call, cost) for cost in measure_host_cost(_SHORT_CALLS if plan.short else _CALLS))
        return f"{len(costs)} ways to call", {}

    yield checked("host-cost", "all", run)
    for name, cost in costs.items():
        yield checked("host-cost", name, partial(_cost, cost, *LIMITS[name], plan.platform.times_tell))


def _cost(cost: Cost, frames: int, limit_us: float, times_tell: bool) -> Found:
    found = f"{cost.microseconds:.1f} us, {cost.frames} frames of Python, {cost.c_calls} calls of C"
    if cost.frames > frames:
        raise CheckFailedError(f"{found}; {frames} frames are allowed")
    return _judged_time(found, asdict(cost), cost.microseconds, limit_us, times_tell)


def _judged_time(found: str, figures: Mapping[str, Any], us: float, limit_us: float, tells: bool) -> Found:
    if not tells:
        return f"{found}; no verdict on times here", figures
    if us > limit_us:
        raise CheckFailedError(f"{found}; {limit_us:.1f} us are allowed")
    return found, figures


# ---- bandwidth and training ----------------------------------------------------------------------------

SLOWER: Final = 1.1
MORE_US: Final = 10.0
"""What a call may take beyond torch's: a tenth, by which runs of NCCL differ, and Python's share."""

TRAINING_SLOWER: Final = 1.05
"""What an iteration of training may take, of that of torch's wrapper."""

_MODELS: Final = ("resnet50", "bert-base", "gpt2")
_SIZES: Final = "8:4G:8"
_SHORT_SIZES: Final = "8:4K:512"
_SIZES_OF_OTHERS: Final = "64K:64M:32"
_SHORT_SIZES_OF_OTHERS: Final = "4K"
_BUFFERS: Final = 6
"""At most so many tensors of a size are in memory while it is measured."""
_BUDGET_S: Final = 25.0
_SHORT_BUDGET_S: Final = 0.5


def _bandwidth(plan: Plan) -> Iterator[Row]:
    """Yields rows for all sizes of an all-reduce of float32, as far as there is memory, and for others.

    Results must be right; what the host takes to issue a call stands beside the times.
    """
    for ranks in plan.several:
        sizes = _SHORT_SIZES if plan.short else _SIZES
        yield from _measured(plan, ranks, "all_reduce", sizes, ["all_reduce"])
        sizes = _SHORT_SIZES_OF_OTHERS if plan.short else _SIZES_OF_OTHERS
        others = [name for name in OPERATIONS if name != "all_reduce"]
        yield from _measured(plan, ranks, "other operations", sizes, others)


def _measured(plan: Plan, ranks: int, what: str, sizes: str, operations: Sequence[str]) -> Iterator[Row]:
    platform, provider = plan.platform, plan.providers[0]
    records: list[Record] = []

    def run() -> Found:
        room = DEVICES[platform.kind].memory_per_rank_bytes(ranks) // _BUFFERS
        options = Options(
            backends=platform.compared,
            ranks=(ranks,),
            sizes=tuple(size for size in parse_sizes(sizes) if size <= room),
            operations=tuple(operations),
            budget_s=_SHORT_BUDGET_S if plan.short else _BUDGET_S,
            device=platform.kind,
        )
        with _provider_chosen(provider):
            report = measure(options)
        _refuse_skipped(report.skipped)
        records.extend(report.records)
        found = f"{format_bytes(min(options.sizes))} to {format_bytes(max(options.sizes))}"
        return found, {"records": [record.as_json() for record in records]}

    yield checked("bandwidth", f"{what}, {provider}, {ranks} ranks", run)
    for (operation, size), some in grouped(records, lambda one: (one.operation, one.size_bytes)).items():
        point = f"{operation} of {format_bytes(size)}" if size else operation
        check = partial(_compared_times, some, plan.judges_times(ranks))
        yield checked("bandwidth", f"{point}, {provider}, {ranks} ranks", check)


def _refuse_skipped(skipped: Sequence[Skipped]) -> None:
    if skipped:
        raise CheckFailedError("; ".join(f"{one.peer}: {one.reason}" for one in skipped))


def _compared_times(records: Sequence[Record], times_tell: bool) -> Found:
    """Returns the times of ours and then of torch's at one point."""
    said = []
    for record in records:
        rate = record.busbw_gb_per_s(record.cold)
        host = record.host or record.hot  # of a device that is done when the call returns
        said.append(
            f"{record.peer} {record.cold.median_us:.1f} us, {rate or 0:.3g} GB/s, "
            f"host {host.median_us:.1f} us"
        )
    wrong = [f"{one.peer}: {one.wrong_elements} wrong elements" for one in records if one.wrong_elements]
    if wrong:
        raise CheckFailedError("; ".join(wrong))
    ours, theirs = records
    allowed_us = theirs.cold.median_us * SLOWER + MORE_US
    return _judged_time("; ".join(said), {}, ours.cold.median_us, allowed_us, times_tell)


def _training(plan: Plan) -> Iterator[Row]:
    """Yields a row for each model that is trained with our wrapper and with torch's."""
    provider = plan.providers[0]
    for ranks in plan.ranks:
        # Where ranks share devices, times tell nothing, and one model is enough.
        models = _MODELS if ranks <= len(plan.platform.gpus()) else _MODELS[1:2]
        for model in ("small",) if plan.short else models:
            with _provider_chosen(provider):
                check = partial(_trained, plan, model, ranks)
                yield checked("training", f"{model}, {provider}, {number_of_ranks(ranks)}", check)


def _trained(plan: Plan, model: str, ranks: int) -> Found:
    """Returns the times of both wrappers; gradients must agree and ranks end with the same parameters."""
    options = ddp.Options(
        models=(model,),
        peers=plan.platform.trained,
        ranks=ranks,
        iterations=4 if plan.short else None,
        budget_s=_BUDGET_S,
        device=plan.platform.kind,
    )
    report = ddp.measure(options)
    _refuse_skipped(report.skipped)
    ours, theirs = report.records
    times = [record.iteration.median_us / 1e3 for record in (ours, theirs)]
    found = f"{ours.peer} {times[0]:.1f} ms, {theirs.peer} {times[1]:.1f} ms"
    figures = {"records": [report.record_as_json(record) for record in report.records]}
    if wrong := [record.peer for record in report.records if not record.agrees]:
        raise CheckFailedError(f"{found}; ranks or gradients differ: {', '.join(wrong)}")
    if not plan.judges_times(ranks):
        return f"{found}; no verdict on times here", figures
    if times[0] > TRAINING_SLOWER * times[1]:
        raise CheckFailedError(f"{found}; {TRAINING_SLOWER} times torch's are allowed")
    return found, figures


_SHORT_TYPES: Final = (torch.float32,)
_REFUSED_BY: Final = ("UnsupportedOperationError:", "NotImplementedError:", "TypeError:", "ValueError:")
"""Errors by which we, or the functions of torch above us, say that something is not offered."""
_EXAMINATION_S: Final = 600.0
"""After which ranks are asked no more questions."""
_LIMIT_S: Final = 120.0
"""After which the ranks of a failure are killed."""


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


def _provider_chosen(provider: str) -> AbstractContextManager[object]:
    return mock.patch.dict(os.environ, {providers.PROVIDER_VARIABLE: provider})


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


# ---- what ranks run, and the repository's tests -----------------------------------------------------------


def _cases(section: str, plan: Plan) -> Iterator[Row]:
    provider = plan.providers[0]
    for ranks in plan.several:
        for name, case in CASES.items():
            if case.section == section:
                check = partial(_case, plan, name, case, provider, ranks)
                yield checked(section, f"{case.title}, {provider}, {ranks} ranks", check)


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


def _tests(plan: Plan) -> Iterator[Row]:
    words, left_out = plan.platform.tests, plan.platform.tests_left_out
    yield checked("tests", f"pytest {' '.join(words)}", partial(run_tests, words, left_out))


SECTIONS: Final[Mapping[str, Callable[[Plan], Iterator[Row]]]] = {
    "preflight": _preflight,
    "conformance": _conformance,
    "streams": partial(_cases, "streams"),
    "failures": partial(_cases, "failures"),
    "bandwidth": _bandwidth,
    "training": _training,
    "host-cost": _host_cost,
    "tests": _tests,
}
"""The sections by name, in order."""


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
        said = done.stdout[-_TAIL:]
        if done.returncode or not report.exists():
            raise CheckFailedError(f"pytest ended with status {done.returncode}: {said}")
        suites = list(ET.parse(report).iter("testsuite"))  # noqa: S314 - pytest has just written it
    kinds = ("tests", "failures", "errors", "skipped")
    counts = {kind: sum(int(suite.get(kind, 0)) for suite in suites) for kind in kinds}
    if counts["skipped"]:
        raise CheckSkippedError(f"{counts['skipped']} of {counts['tests']} tests: {said}")
    found = f"{counts['tests']} tests passed"
    return f"{found}; left out: {left_out}" if left_out else found, counts


# ---- the command ---------------------------------------------------------------------------------------

_CUDA = "collectives.bench.acceptance.platform"
_DOUBLE = "nccl_double.platform"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    parser.add_argument(
        "--ranks",
        type=parse_counts(1),
        metavar="N,...",
        help="numbers of ranks; 1 is for training only (default: 1, 2, 3 and one for each GPU, of those that "
        "have a GPU for each rank; 1 and 2 that share it where there is one GPU)",
    )
    parser.add_argument(
        "--sections",
        type=parse_names,
        default=tuple(SECTIONS),
        metavar="NAME,...",
        help=f"only these, of {', '.join(SECTIONS)}",
    )
    parser.add_argument("--short", action="store_true", help="one data type and one provider stand for all")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run over the double of NCCL that the repository's tests have, without a GPU",
    )
    add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the checks, prints a row for each, and returns 0 where there were some and all passed, else 1.

    Raises:
        CommandError: there is nothing to check here, or no such section.
    """
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        raise CommandError(f"unknown sections {', '.join(unknown)}; known are {', '.join(SECTIONS)}")
    alone = [name for name in arguments.sections if name in OF_SEVERAL_RANKS]
    if alone and arguments.ranks and max(arguments.ranks) < 2:
        raise CommandError(
            f"one rank has nobody to talk to in {', '.join(alone)}; give 2 to --ranks, too, or training to "
            "--sections"
        )
    module = _DOUBLE if arguments.rehearse else _CUDA
    if arguments.rehearse:
        _find_double()
    platform = load(module)
    reason = platform.why_unavailable()
    if reason is not None:
        raise CommandError(f"accept: {reason}")
    platform.prepare()
    ranks = arguments.ranks or (1, *numbers_of_ranks(len(platform.gpus())))
    plan = Plan(module, platform, ranks, arguments.short)
    options = {"ranks": [*ranks], "sections": [*arguments.sections], "short": arguments.short}
    report = Report("collectives accept", {"on": platform.title, **describe_machine()}, options)
    print(f"# {report.program}: {platform.title}", flush=True)
    for name in arguments.sections:
        for row in SECTIONS[name](plan):
            report.records.append(row)
            print(row.line(), flush=True)
            write_files(report, arguments)  # what there is, should the machine go down
    print(f"# {report.summary()}")
    return int(not 0 < report.count(Verdict.PASSED) == len(report.records))


def _find_double() -> None:
    """Lets this process and the ranks import the double.

    Raises:
        CommandError: this is no checkout.
    """
    tests = root() / "tests"
    if not (tests / "nccl_double" / "platform.py").is_file():
        raise CommandError(
            "accept --rehearse needs the double of NCCL, which is part of the repository and not of the "
            "installed package; run it from a checkout that was installed with pip install -e '.[dev]'"
        )
    support = tests / "support"
    folders = [str(path) for path in (tests, support, support / "ranks", support / "interpreters")]
    sys.path[:0] = folders  # spawned ranks get this process's path, started ones the variable
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
