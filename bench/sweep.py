"""The parent's side of the all-reduce measurement: plans turns within a time budget and collects results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from collectives.bench.groups import parent_store
from collectives.bench.lockstep import create_board
from collectives.bench.mpi4py_peer import MPI4PY, start_team
from collectives.bench.player import LIMIT, Turn, TurnResult, Workload, play
from collectives.bench.ranks import SpawnedTeam, Team
from collectives.bench.records import Record, Skipped, Timing

__all__ = ["MAX_CALLS", "MIN_CALLS", "ROUNDS", "Schedule", "sweep"]

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


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often and how long.

    Attributes:
        sizes: sizes of the tensors in bytes, ascending.
        calls: cold and hot calls of each peer at each size; ``None`` lets the budget decide.
        warmup: calls of each kind before those that count, at least 2; checked, but not timed. ``None`` lets
            the budget decide.
        budget_s: seconds that the sweep over all sizes and peers should take; the least number of calls is
            made even if it takes longer.
    """

    sizes: tuple[int, ...]
    calls: int | None
    warmup: int | None
    budget_s: float


class _Peer:
    """What is known of a peer at one size.

    Args:
        name: its name.
        team: the ranks that play it.
    """

    def __init__(self, name: str, team: Team) -> None:
        self.name = name
        self.team = team
        self.calls = 0
        self.loop_calls = 0
        # Nanoseconds by rank, then by call.
        self.cold: list[list[int]] = [[] for _ in range(team.size)]
        self.hot: list[list[int]] = [[] for _ in range(team.size)]
        self.loop: list[list[int]] = [[] for _ in range(team.size)]
        self.cold_wrong = 0
        self.hot_wrong = 0

    def play(self, turn: Turn, *, timed: bool = True) -> list[TurnResult]:
        """Has the ranks play a turn and takes their results, the durations only where ``timed``."""
        results: list[TurnResult] = self.team.ask(turn)
        self.cold_wrong += sum(result.cold_wrong for result in results)
        self.hot_wrong += sum(result.hot_wrong for result in results)
        if timed:
            for rank, result in enumerate(results):
                self.cold[rank] += result.cold_ns
                self.hot[rank] += result.hot_ns
                self.loop[rank] += result.loop_ns
        return results


def sweep(
    ranks: int,
    workload: Workload,
    schedule: Schedule,
    progress: Progress | None = None,
) -> tuple[list[Record], list[Skipped]]:
    """Measures all peers at all sizes with so many ranks; returns the records by size, then by peer.

    Args:
        ranks: number of ranks.
        workload: what is reduced, and the peers.
        schedule: sizes and numbers of calls.
        progress: called with a short line before each size.

    Raises:
        RankFailedError: a rank failed.
    """
    own = replace(workload, backends=tuple(name for name in workload.backends if name != MPI4PY))
    store = parent_store()
    with ExitStack() as stack:
        teams: list[Team] = []
        if own.backends or own.limit:
            args = (ranks, own, _board(stack, ranks), store.port)
            teams.append(stack.enter_context(SpawnedTeam(ranks, play, args)))
        if MPI4PY in workload.backends:
            other = replace(workload, backends=(MPI4PY,), limit=False)
            teams.append(stack.enter_context(start_team(ranks, other, _board(stack, ranks))))
        return _conduct(teams, workload, schedule, progress)


def _board(stack: ExitStack, ranks: int) -> str:
    descriptor, path = create_board(ranks)
    stack.callback(os.close, descriptor)
    return path


def _conduct(
    teams: Sequence[Team], workload: Workload, schedule: Schedule, progress: Progress | None
) -> tuple[list[Record], list[Skipped]]:
    refused = {name: reason for team in teams for name, reason in team.gather()[0].items()}
    ranks = teams[0].size
    skipped = [Skipped(name, reason, ranks=ranks) for name, reason in refused.items()]
    names = [*workload.backends, *[LIMIT] * workload.limit]
    players = {name: teams[-1 if name == MPI4PY else 0] for name in names if name not in refused}
    item_bytes = getattr(torch, workload.dtype).itemsize
    records: list[Record] = []
    end = time.monotonic() + schedule.budget_s
    for i, size in enumerate(schedule.sizes if players else ()):
        if progress is not None:
            progress(f"{ranks} ranks, {size} B ({i + 1} of {len(schedule.sizes)} sizes)")
        left_s = max(0.0, end - time.monotonic()) / (len(schedule.sizes) - i)
        peers = _measure(players, size, size // item_bytes, schedule, left_s)
        records += [_record(ranks, workload, size, size // item_bytes, peer) for peer in peers]
    return records, skipped


def _measure(
    players: Mapping[str, Team], size: int, count: int, schedule: Schedule, budget_s: float
) -> list[_Peer]:
    """Measures all peers at one size, turn by turn; each round begins with another peer.

    Where a noisy machine makes the plan too long, later rounds are left out.
    """
    end = time.monotonic() + budget_s
    peers = [_Peer(name, team) for name, team in players.items()]
    for peer in peers:
        _prepare(peer, size, count, schedule, budget_s / len(peers))
    for this in range(ROUNDS):
        first = this % len(peers)
        for peer in peers[first:] + peers[:first]:
            calls = peer.calls * (this + 1) // ROUNDS - peer.calls * this // ROUNDS
            if calls or peer.loop_calls:
                peer.play(Turn(peer.name, count, calls, calls, peer.loop_calls))
        enough = schedule.calls is None and all(len(peer.cold[0]) >= MIN_CALLS for peer in peers)
        if enough and time.monotonic() > end:
            break
    return peers


def _prepare(peer: _Peer, size: int, count: int, schedule: Schedule, budget_s: float) -> None:
    """Warms a peer up at a size, and decides how often it is called."""
    peer.play(Turn(peer.name, count, 1, 1), timed=False)
    begin = time.monotonic()
    results = peer.play(Turn(peer.name, count, 1, 1), timed=False)
    both_s = time.monotonic() - begin  # a cold and a hot call, with all that is done around them
    warmup = schedule.warmup
    if warmup is None:
        warmup = min(WARMUP, int(WARMUP_SHARE * budget_s / both_s))
    if warmup > 2:
        begin = time.monotonic()
        results = peer.play(Turn(peer.name, count, warmup - 2, warmup - 2), timed=False)
        both_s = (time.monotonic() - begin) / (warmup - 2)
    peer.calls = schedule.calls or max(MIN_CALLS, min(MAX_CALLS, int((1 - WARMUP_SHARE) * budget_s / both_s)))
    if size <= LOOP_MAX_BYTES:
        hot_ns = max(result.hot_ns[-1] for result in results)
        peer.loop_calls = max(LOOP_MIN_CALLS, min(LOOP_MAX_CALLS, LOOP_NS // max(hot_ns, 1)))


def _record(ranks: int, workload: Workload, size: int, count: int, peer: _Peer) -> Record:
    return Record(
        operation="add_" if peer.name == LIMIT else "all_reduce",
        peer=peer.name,
        ranks=ranks,
        size_bytes=size,
        count_elements=count,
        dtype=workload.dtype,
        redop=workload.redop,
        in_place=workload.in_place,
        cold=Timing.of(peer.cold),
        cold_wrong_elements=peer.cold_wrong,
        hot=Timing.of(peer.hot),
        hot_wrong_elements=peer.hot_wrong,
        loop=Timing.of(peer.loop) if peer.loop_calls else None,
    )
