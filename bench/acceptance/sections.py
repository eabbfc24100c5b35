"""The sections of the report, each a function that yields its rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Final

import torch

from collectives.backends.nccl import providers
from collectives.backends.nccl.providers import loaded_files
from collectives.bench.acceptance import failures, streams
from collectives.bench.acceptance.cases import Case
from collectives.bench.acceptance.platform import Platform
from collectives.bench.acceptance.processes import run_ranks
from collectives.bench.acceptance.report import CheckFailedError, Found, Row, checked
from collectives.bench.acceptance.repository import run_tests
from collectives.bench.acceptance.speed import (
    bandwidth_rows,
    host_cost_rows,
    models_of,
    other_bandwidth_rows,
    training_rows,
)
from collectives.conformance.examination import (
    Answer,
    Question,
    Status,
    examine,
    questions,
    unkept,
)

__all__ = ["OF_SEVERAL_RANKS", "SECTIONS", "Budget", "Plan", "Work", "budget_for", "budget_of"]

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
        provider = plan.providers[0]
        for rows in (bandwidth_rows, other_bandwidth_rows):
            yield from rows(plan.platform, ranks, provider, plan.short, plan.measurement_s)


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
