"""The parent's side of a comparison: plans turns within a time budget and collects results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from collectives.bench.comparison.groups import parent_store
from collectives.bench.comparison.mpi4py_peer import MPI4PY, start_team
from collectives.bench.comparison.operations import ADD, OPERATIONS, ROOT, rounded_count
from collectives.bench.comparison.player import LIMIT, Introduction, Turn, TurnResult, Workload, play
from collectives.bench.core.launching import start_ranks
from collectives.bench.core.lockstep import create_board
from collectives.bench.core.namespaces import Machines
from collectives.bench.core.ranks import Team
from collectives.bench.core.records import Record, Skipped, Timing

__all__ = ["MAX_CALLS", "MIN_CALLS", "ROUNDS", "Findings", "Point", "Schedule", "points_of", "sweep"]

ROUNDS = 10
"""Turns of each peer at each size."""

MIN_CALLS = 5
MAX_CALLS = 200
"""Calls of each peer at each size where the user names no number; the budget decides between the two."""

WARMUP = 5
"""Calls before those that count, where the budget allows so many."""

WARMUP_SHARE = 0.15
"""Part of the budget that may go into them."""

LOOP_MAX_BYTES = 32 << 10
"""Largest size that is also measured by a loop."""

LOOP_NS = 5_000_000
"""Time that one loop should take, with at least and at most so many calls:"""
LOOP_MIN_CALLS = 10
LOOP_MAX_CALLS = 500

Progress = Callable[[str], object]
Found = Callable[[Sequence[Record]], object]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often and how long.

    Attributes:
        sizes: sizes of the arrays in bytes, ascending.
        calls: cold and hot calls of each peer at each size; ``None`` lets the budget decide.
        warmup: calls of each kind before those that count, at least 2; checked, but not timed. ``None`` lets
            the budget decide.
        budget_s: seconds that the sweep over all operations, sizes and peers should take; the least number of
            calls is made even if it takes longer.
    """

    sizes: tuple[int, ...]
    calls: int | None
    warmup: int | None
    budget_s: float


@dataclass(slots=True)
class Findings:
    """What came of a sweep.

    Attributes:
        records: by operation, then by size, then by peer.
        skipped: peers that could not be measured.
        versions: of the software behind peers, by peer.
    """

    records: list[Record] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Point:
    """An operation at a size.

    Attributes:
        operation: its name.
        count: elements of the array.
        size_bytes: its bytes.
    """

    operation: str
    count: int
    size_bytes: int


class _Peer:
    """What is known of a peer at one point.

    Args:
        name: its name.
        team: the ranks that play it.
        point: the operation and its size.
    """

    def __init__(self, name: str, team: Team, point: Point) -> None:
        self.name = name
        self.team = team
        self.point = point
        self.calls = 0
        self.loop_calls = 0
        # Nanoseconds by rank, then by call.
        self.cold: list[list[int]] = [[] for _ in range(team.size)]
        self.hot: list[list[int]] = [[] for _ in range(team.size)]
        self.loop: list[list[int]] = [[] for _ in range(team.size)]
        self.cold_wrong = 0
        self.hot_wrong = 0

    def play(self, calls: int, loop_calls: int = 0, *, timed: bool = True) -> list[TurnResult]:
        """Has the ranks play a turn and takes their results, the durations only where ``timed``."""
        turn = Turn(self.name, self.point.operation, self.point.count, calls, calls, loop_calls)
        results: list[TurnResult] = self.team.ask(turn)
        self.cold_wrong += sum(result.cold_wrong for result in results) + _left_early(results)
        self.hot_wrong += sum(result.hot_wrong for result in results)
        if timed:
            for rank, result in enumerate(results):
                self.cold[rank] += result.cold_ns
                self.hot[rank] += result.hot_ns
                self.loop[rank] += result.loop_ns
        return results


def _left_early(results: Sequence[TurnResult]) -> int:
    """Returns how many ranks left a barrier before the last had come."""
    crossings = zip(*(result.crossings_ns for result in results), strict=True)
    return sum(left < max(came for came, _ in all_ranks) for all_ranks in crossings for _, left in all_ranks)


def sweep(
    ranks: int,
    workload: Workload,
    schedule: Schedule,
    progress: Progress | None = None,
    found: Found | None = None,
) -> Findings:
    """Measures all peers at all operations and sizes with so many ranks.

    Args:
        ranks: number of ranks.
        workload: what is measured, and the peers.
        schedule: sizes and numbers of calls.
        progress: called with a short line before each size.
        found: called with the records of each size of an operation when they are there.

    Raises:
        RankFailedError: a rank failed.
        NamespacesUnavailableError: there can be no network namespaces here.
    """
    own = replace(workload, backends=tuple(name for name in workload.backends if name != MPI4PY))
    with ExitStack() as stack:
        if own.machines > 1:
            machines = stack.enter_context(Machines(own.machines, own.link))
            places = tuple(machines.namespace(rank * own.machines // ranks) for rank in range(ranks))
            own = replace(own, host=machines.host, namespaces=places)
        store = parent_store(own.host)
        stack.callback(store.close)
        teams: list[Team] = []
        if own.backends or own.limit:
            args = (ranks, own, _board(stack, ranks), store.port)
            teams.append(stack.enter_context(start_ranks(own.backends, ranks, play, args)))
        if MPI4PY in workload.backends:
            other = replace(workload, backends=(MPI4PY,), limit=False)
            teams.append(stack.enter_context(start_team(ranks, other, _board(stack, ranks))))
        return _conduct(teams, workload, schedule, progress, found)


def _board(stack: ExitStack, ranks: int) -> str:
    descriptor, path = create_board(ranks)
    stack.callback(os.close, descriptor)
    return path


def _conduct(
    teams: Sequence[Team],
    workload: Workload,
    schedule: Schedule,
    progress: Progress | None,
    found: Found | None,
) -> Findings:
    introductions: list[Introduction] = [team.gather()[0] for team in teams]
    ranks = teams[0].size
    refused = {what: why for introduction in introductions for what, why in introduction.refused.items()}
    findings = Findings(skipped=_skipped(refused, workload.operations, ranks))
    for introduction in introductions:
        findings.versions |= introduction.versions
    players = {name: teams[-1 if name == MPI4PY else 0] for name in workload.backends}
    if workload.limit:
        players[LIMIT] = teams[0]
    item_bytes = getattr(torch, workload.dtype).itemsize
    points = [
        point for name in workload.operations for point in points_of(name, schedule.sizes, item_bytes, ranks)
    ]
    end = time.monotonic() + schedule.budget_s
    for i, point in enumerate(points):
        if progress is not None:
            what = f"{point.operation}, {ranks} ranks, {point.size_bytes} B"
            progress(f"{what} ({i + 1} of {len(points)} measurements)")
        peers = [
            _Peer(name, team, point)
            for name, team in players.items()
            if (name, point.operation) not in refused and not (name == LIMIT and point.operation == "barrier")
        ]
        left_s = max(0.0, end - time.monotonic()) / (len(points) - i)
        _measure(peers, schedule, left_s)
        records = [_record(ranks, workload, peer) for peer in peers]
        findings.records += records
        if found is not None and records:
            found(records)
    return findings


def _skipped(refused: Mapping[tuple[str, str], str], operations: Sequence[str], ranks: int) -> list[Skipped]:
    """Returns the entries of a report, one for a peer whose reason is the same at all operations."""
    skipped: list[Skipped] = []
    for peer in dict.fromkeys(peer for peer, _ in refused):
        reasons = [refused.get((peer, name)) for name in operations]
        if len(set(reasons)) == 1:
            skipped.append(Skipped(peer, reasons[0] or "", ranks=ranks))
            continue
        skipped += [
            Skipped(peer, reason, ranks=ranks, operation=name)
            for name, reason in zip(operations, reasons, strict=True)
            if reason is not None
        ]
    return skipped


def points_of(name: str, sizes: Sequence[int], item_bytes: int, ranks: int) -> list[Point]:
    """Returns what is measured of an operation: each size rounded up to whole parts, each once."""
    counts = dict.fromkeys(rounded_count(OPERATIONS[name], size, item_bytes, ranks) for size in sizes)
    return [Point(name, count, count * item_bytes) for count in counts]


def _measure(peers: Sequence[_Peer], schedule: Schedule, budget_s: float) -> None:
    """Measures peers at one point, turn by turn; each round begins with another peer.

    Where a noisy machine makes the plan too long, later rounds are left out.
    """
    end = time.monotonic() + budget_s
    for peer in peers:
        _prepare(peer, schedule, budget_s / len(peers))
    for this in range(ROUNDS if peers else 0):
        first = this % len(peers)
        for peer in [*peers[first:], *peers[:first]]:
            calls = peer.calls * (this + 1) // ROUNDS - peer.calls * this // ROUNDS
            if calls or peer.loop_calls:
                peer.play(calls, peer.loop_calls)
        enough = schedule.calls is None and all(len(peer.cold[0]) >= MIN_CALLS for peer in peers)
        if enough and time.monotonic() > end:
            break


def _prepare(peer: _Peer, schedule: Schedule, budget_s: float) -> None:
    """Warms a peer up, and decides how often it is called."""
    peer.play(1, timed=False)
    begin = time.monotonic()
    peer.play(1, timed=False)
    both_s = time.monotonic() - begin  # a cold and a hot call, with all that is done around them
    warmup = schedule.warmup
    if warmup is None:
        warmup = min(WARMUP, int(WARMUP_SHARE * budget_s / both_s))
    if warmup > 2:
        begin = time.monotonic()
        peer.play(warmup - 2, timed=False)
        both_s = (time.monotonic() - begin) / (warmup - 2)
    peer.calls = schedule.calls or max(MIN_CALLS, min(MAX_CALLS, int((1 - WARMUP_SHARE) * budget_s / both_s)))
    if peer.point.size_bytes <= LOOP_MAX_BYTES:
        peer.loop_calls = LOOP_MIN_CALLS
        # In a short loop the wait for ranks that start late weighs much, so its length is found in two steps.
        for _ in range(2):
            results = peer.play(0, peer.loop_calls, timed=False)
            loop_ns = max(result.loop_ns[0] for result in results)
            peer.loop_calls = max(LOOP_MIN_CALLS, min(LOOP_MAX_CALLS, LOOP_NS // max(loop_ns, 1)))


def _record(ranks: int, workload: Workload, peer: _Peer) -> Record:
    operation = ADD if peer.name == LIMIT else OPERATIONS[peer.point.operation]
    return Record(
        operation=operation.name,
        peer=peer.name,
        ranks=ranks,
        size_bytes=peer.point.size_bytes,
        count_elements=peer.point.count,
        dtype=workload.dtype,
        redop=workload.redop if operation.reduces else "none",
        in_place=operation.in_place and (workload.in_place or operation.name != "all_reduce"),
        cold=Timing.of(peer.cold),
        cold_wrong_elements=peer.cold_wrong,
        hot=Timing.of(peer.hot),
        hot_wrong_elements=peer.hot_wrong,
        loop=Timing.of(peer.loop) if peer.loop_calls else None,
        root=ROOT if operation.rooted else -1,
        compared_as=peer.point.operation,
        device=workload.device,
    )
