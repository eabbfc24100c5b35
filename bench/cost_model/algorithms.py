"""What algorithms do on the busiest rank or machine: counts of messages, bytes and waits, without any times.

The algorithms of the host backend take their thresholds from the core. Ring, recursive doubling, halving and
trees are those of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH" (IJHPCA 2005). The *leader* of a machine speaks with the leaders of the others; long messages go chunk
by chunk through all ranks of a machine in turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from collectives.backends.host import tuning_file
from collectives.bench.cost_model.parameters import Scale

__all__ = ["ALGORITHMS", "ALL_REDUCES", "HOST_ALL_REDUCES", "Counts", "Work", "host_algorithm", "is_possible"]

MOST_DIRECT = 32
"""Machines up to which each leader sends its frame to every other; beyond, leaders pass frames on."""
HEAD_BYTES, ENTRY_BYTES = 16, 40
"""Of a leader's frame (the core's ``arrival_exchange.hpp``): its head, and what tells of each rank."""

LEAST_STAGED, MOST_STAGED, SHARED_STAGED = 4 << 10, 32 << 10, 512 << 10
LEAST_CHUNK, MOST_CHUNK, CHUNKS_WANTED, WINDOW = 64 << 10, 256 << 10, 8, 320 << 10
LEAST_SHARE = 256
"""Between machines: longest contribution beside the arrival, chunks and window of a rank, and the shortest
share that a machine reduces (``segment_layout.cpp`` and ``machine_chunks.hpp`` of the core)."""

CHUNKS_IN_FLIGHT = 4
LINE = 64
"""Parts begin at multiples of a cache line."""

Counts = Mapping[str, float]
"""How often, or how many bytes, by what is counted: names of :data:`.predictions.PRICES`."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an algorithm does.

    Attributes:
        serial: one after the other.
        pipelined: chunk by chunk, the link beside everything else.
        chunks: number of these chunks.
    """

    serial: Counts
    pipelined: Counts = field(default_factory=dict)
    chunks: float = 1.0


def _sum(*parts: Counts) -> dict[str, float]:
    return {name: sum(part.get(name, 0.0) for part in parts) for part in parts for name in part}


@functools.cache
def _threshold(name: str, ranks: int) -> int:
    return tuning_file.defaults(ranks)[name]


# ---- arrival of all ranks, with which every operation of the host backend begins -------------------------


def _local_arrival(s: Scale) -> Counts:
    return {"arrivals": 1, "waits": 1} if s.ranks_per_machine > 1 else {}


def _arrival(s: Scale, carried: float = 0.0, *, one: bool = False) -> dict[str, float]:
    """All ranks publish what they are about to do; leaders exchange frames, or pass them on where many.

    Args:
        s: scale.
        carried: bytes that a machine's frame carries beside.
        one: whether the frame of one machine alone does.
    """
    local = _sum(_local_arrival(s), {"lines": s.ranks - 1})
    if s.machines == 1:
        return local
    bare = HEAD_BYTES + s.ranks_per_machine * ENTRY_BYTES
    frame = bare + carried
    others = s.machines - 1
    # Of a machine that alone has something to carry others get one long frame each; it sends them all, or
    # the first in every round.
    came = frame + (others - 1) * bare if one else others * frame
    if s.machines <= MOST_DIRECT:
        rounds, messages, sent = 1, others, others * frame
        moved = others * (frame + bare) if one else 2 * sent
        copied = frame + came
    else:
        rounds = messages = math.ceil(math.log2(s.machines))
        sent = rounds * frame + (others - rounds) * bare if one else came
        moved = sent + came
        copied = frame + 2 * came + sent  # a leader keeps what comes, and puts together what it passes on
    exchange = {"latencies": rounds, "leader messages": 2 * messages, "link": sent, "leader sockets": moved}
    return _sum(local, exchange, {"leader copies": copied}, _local_arrival(s))


def _contribution(s: Scale, size: float, carried: float, needed: float) -> dict[str, float]:
    """A short reduction for which each machine's leader makes one contribution of what its ranks staged.

    Args:
        s: scale; of few machines, which send to each other directly.
        size: bytes that a rank contributes.
        carried: bytes of them that a machine sends another.
        needed: bytes of them that a rank combines.
    """
    # A frame for each machine.
    work = {"leader copies": (s.machines - 2) * carried, "reductions": s.machines * needed}
    if s.ranks_per_machine > 1:
        work |= {"copies": size, "leader reductions": s.ranks_per_machine * size}
    return _sum(_arrival(s, carried), work)


def _most_staged(s: Scale) -> int:
    """Returns the longest contribution that travels with the arrival."""
    if s.machines == 1:
        return _threshold("staged_bytes", s.ranks)
    return max(LEAST_STAGED, min(MOST_STAGED, 1 << ((SHARED_STAGED // s.ranks) | 1).bit_length() - 1))


def _flags(s: Scale, chunks: float, stages: int) -> Counts:
    """Chunks are handed from rank to rank; those that share a core wait for each other."""
    if s.ranks_per_machine == 1:
        return {}
    waits = stages * math.ceil(chunks / CHUNKS_IN_FLIGHT)
    return {"flags": chunks * stages * (s.ranks_per_machine - 1), "waits": waits}


def _remote_chunk(size: float, most: float = MOST_CHUNK) -> float:
    return min(max(size / CHUNKS_WANTED, LEAST_CHUNK), most)


def _written(size: float, total: float, s: Scale) -> float:
    """Bytes that move for an output other than the input; lines are fetched unless written past the cache."""
    return size * (1 if total > _threshold("past_cache_bytes", s.ranks_per_machine) else 2)


# ---- all-reduce of the host backend ----------------------------------------------------------------------


def _one_shot(size: float, s: Scale) -> Work:
    """All contributions travel with the arrival, and every rank reduces all of them, or all machines'."""
    if 1 < s.machines <= MOST_DIRECT and s.ranks_per_machine > 1:
        return Work(_contribution(s, size, size, size))
    # Machine by machine, then the machines' sums, so that the length changes no bit.
    sums = s.machines if s.machines > 1 and s.ranks_per_machine > 1 else 0
    arrival = _arrival(s, s.ranks_per_machine * size)
    return Work(_sum(arrival, {"copies": size, "reductions": (s.ranks + sums) * size}))


def _fits_arrival(for_machine: float, s: Scale) -> bool:
    """Whether so many bytes of a machine for the ranks of another travel with the arrival."""
    return 1 < s.machines <= MOST_DIRECT and for_machine <= _most_staged(s)


def _staged_in_parts(size: float, s: Scale) -> Work:
    """Each machine gets its ranks' parts with the arrival; they reduce them, and leaders exchange results."""
    m, r, part = s.machines, s.ranks_per_machine, size / s.ranks
    arrival = _contribution(s, size, r * part, part)
    results = (m - 1) * (HEAD_BYTES + r * part)
    exchange = {
        "latencies": 1,
        "leader messages": 2 * (m - 1),
        "link": results,
        "leader sockets": 2 * results,
    }
    copies = {"copies": size, "leader copies": HEAD_BYTES + r * part + results}
    return Work(_sum(arrival, _local_arrival(s), exchange, copies, _local_arrival(s)))


def _sliced(size: float, s: Scale) -> Work:
    """Every rank reduces a slice of each chunk for all."""
    longest = _threshold("chunk_bytes", s.ranks)
    chunk = max(size, 1.0)
    if size > _threshold("unsplit_bytes", s.ranks):
        wanted = size / _threshold("chunks_wanted", s.ranks)
        chunk = min(max(wanted, _threshold("shortest_chunk_bytes", s.ranks)), longest)
    moved = 2 * (s.ranks - 1) / s.ranks  # everything but the own slice in, the others' results out
    slices = {"copies": size * moved, "reductions": size}
    return Work(_sum(_arrival(s), slices, _flags(s, math.ceil(size / chunk), 2)))


def _hierarchical(size: float, s: Scale) -> Work:
    """Slices within machines, and shares of each chunk directly between its gateways, in two phases."""
    m, ranks = s.machines, s.ranks_per_machine
    # A rank has windows for contributions, results and, of two ranks at least, slices of sums.
    chunk = _remote_chunk(size, MOST_CHUNK if ranks == 1 else WINDOW / 2.5)
    chunks = math.ceil(size / chunk)
    # A chunk has no more shares than this; machines beyond have none to reduce, only to send and to receive.
    shares = min(m, max(1, math.ceil(min(size, chunk) / LEAST_SHARE)))
    # Of a machine with a share: the others' shares, then the result of its own to everybody.
    sent = size * ((shares - 1) / shares + (m - 1) / shares)
    leader = {
        "leader messages": 2 * chunks * (m - 1 + shares - 1),
        "leader sockets": 2 * sent,
        "leader reductions": size * m / shares,
    }
    inside: Counts = {}
    kept: Counts = {}
    if ranks > 1:
        # All but the own slice into the window, all of the result out of it; a gateway keeps its share.
        moved = {"copies": size * (2 - 1 / ranks), "reductions": size}
        inside = _sum(moved, _flags(s, chunks, 2))
        kept = {"leader copies": size / shares}
    steps = _sum(_in_turn(_sum(leader, kept), s, chunks), inside, {"link": sent})
    return Work(_sum(_arrival(s), {"latencies": 2}), steps, chunks)


def _in_turn(leader: Counts, s: Scale, chunks: int) -> Counts:
    """Returns what a leader would do alone as each rank of its machine does it, chunk by chunk in turn."""
    ranks = min(s.ranks_per_machine, chunks)
    if ranks == 1:
        return leader
    dealt: Counts = {}
    for name, count in leader.items():
        own = name.removeprefix("leader ")
        dealt = _sum(dealt, {own: count if own == name else count / ranks})
    return dealt


# ---- other operations of the host backend ----------------------------------------------------------------


def _barrier(size: float, s: Scale) -> Work:  # noqa: ARG001
    return Work(_arrival(s))


def _chunked(size: float, piece: float, s: Scale, inside: Counts, network: Counts, phases: int = 1) -> Work:
    """A long movement: chunk by chunk, beside the network.

    Args:
        size: bytes that are cut into chunks.
        piece: bytes of a chunk between machines.
        s: scale.
        inside: what the local ranks do.
        network: what the busiest machine does there, messages for each chunk.
        phases: how often a byte goes from machine to machine, one after the other.
    """
    if s.machines == 1:
        chunks = math.ceil(size / _threshold("chunk_bytes", s.ranks))
        return Work(_sum(_arrival(s), inside, _flags(s, chunks, 1)))
    chunks = math.ceil(size / piece)
    network = {name: count * (chunks if "messages" in name else 1) for name, count in network.items()}
    network = _in_turn(network, s, chunks)
    return Work(_sum(_arrival(s), {"latencies": phases}), _sum(inside, _flags(s, chunks, 1), network), chunks)


def _broadcast(size: float, s: Scale) -> Work:
    # One machine: the root copies into its ring, the others out of it, one chunk behind.
    copied = size + min(size, _threshold("chunk_bytes", s.ranks))
    if size <= _most_staged(s):
        return Work(_sum(_arrival(s, size, one=True), {"copies": copied}))
    if s.machines > 1:
        # The root into its window, everybody else out of one.
        copied = size if s.ranks_per_machine > 1 else 0.0
    # The root deals shares to the other machines, which pass them on to each other: each link carries the
    # size at most, each machine but the root's as much in as it passes on.
    others = max(s.machines - 2, 0)
    network = {
        "link": size,
        "leader sockets": size * (1 + others / (others + 1)),
        "leader messages": s.machines - 1 + others,
    }
    return _chunked(size, _remote_chunk(size), s, {"copies": copied}, network, 2 if others else 1)


def _parts(size: float, s: Scale, staged: float, copied: float, reduced: float, at_home: float) -> Work:
    """An array of a part for each rank, of which ``at_home`` bytes stay on their machine."""
    work = {"copies": copied, "reductions": reduced}
    if staged <= _most_staged(s):
        return Work(_sum(_arrival(s, s.ranks_per_machine * staged), work))
    sent = size - at_home
    network = {"link": sent, "leader sockets": 2 * sent, "leader messages": 2 * (s.machines - 1)}
    part = size / s.ranks
    return _chunked(part, _remote_chunk(part), s, work, network)


def _all_gather(size: float, s: Scale) -> Work:
    """``size`` is that of the output."""
    part = size / s.ranks
    return _parts(size, s, part, part + _written(size, size, s), 0.0, size / s.machines)


def _reduce_scatter(size: float, s: Scale) -> Work:
    """``size`` is that of the input."""
    part = size / s.ranks
    sums = s.machines * part if s.machines > 1 else 0.0
    if _fits_arrival(size / s.machines, s):
        staged = {"copies": size} if s.ranks_per_machine == 1 else {}
        return Work(_sum(_contribution(s, size, size / s.machines, part), staged))
    return _parts(size, s, size, size + _written(part, size, s), size + sums, size / s.machines)


def _all_to_all(size: float, s: Scale) -> Work:
    """``size`` is that of the input, and of the output."""
    if size <= _most_staged(s):
        arrival = _arrival(s, s.ranks_per_machine * size)
        return Work(_sum(arrival, {"copies": size + _written(size, size, s)}))
    # What a rank gets of its own machine goes through memory, the rest directly from rank to rank.
    m, r = s.machines, s.ranks_per_machine
    at_home, sent = size / m, size * (m - 1) / m
    network = {"link": r * sent, "sockets": 2 * sent, "messages": 2 * (m - 1) * r}
    return _chunked(size, size, s, {"copies": at_home + _written(at_home, size, s)}, network)


# ---- all-reduce by textbook algorithms -------------------------------------------------------------------


def _steps(s: Scale, *steps: tuple[float, float, int, bool]) -> Work:
    """Steps of messages between ranks.

    Each is how often, the bytes that each rank sends, how many messages leave each machine at once (where
    none does, they go through memory), and whether each rank adds what comes to its own.
    """
    total: Counts = {}
    for times, sent, crossing, adds in steps:
        if crossing:
            who = "leader " if crossing == 1 else ""  # each rank's own core does its part
            done = {"latencies": times, "link": times * crossing * sent}
            done |= {f"{who}messages": 2 * times, f"{who}sockets": 2 * times * sent}
        else:
            done = {name: times * count for name, count in _local_arrival(s).items()}
            done["copies"] = 2 * times * sent
        total = _sum(total, done, {"reductions": 2 * times * sent * adds})
    return Work(total)


def _log_steps(s: Scale) -> tuple[int, int]:
    """Returns the steps of doubling within machines and between them."""
    return math.ceil(math.log2(s.ranks_per_machine)), math.ceil(math.log2(s.machines))


def _ring(size: float, s: Scale) -> Work:
    """Reduce-scatter and all-gather around a ring of all ranks."""
    crossing = 1 if s.machines > 1 else 0
    return _steps(s, *((s.ranks - 1, size / s.ranks, crossing, adds) for adds in (True, False)))


def _recursive_doubling(size: float, s: Scale) -> Work:
    """Whole arrays between partners at distances 1, 2, 4, ..."""
    inside, between = _log_steps(s)
    return _steps(s, (inside, size, 0, True), (between, size, s.ranks_per_machine, True))


def _rabenseifner(size: float, s: Scale) -> Work:
    """Halving within the machine, then between machines, and doubling back; parts shrink on the way."""
    inside, between = _log_steps(s)
    m, r = s.machines, s.ranks_per_machine
    # All steps together halve the whole down to a part.
    here = (inside, size * (r - 1) / r / max(inside, 1), 0)
    there = (between, size / r * (m - 1) / m / max(between, 1), r)
    return _steps(s, *((*place, adds) for place in (here, there) for adds in (True, False)))


def _tree(size: float, s: Scale) -> Work:
    """Binomial reduce to a root, then binomial broadcast."""
    inside, between = _log_steps(s)
    places = ((inside, size, 0), (between, size, 1))
    return _steps(s, *((*place, adds) for place in places for adds in (True, False)))


ALGORITHMS: dict[str, Callable[[float, Scale], Work]] = {
    "one-shot": _one_shot,
    "staged in parts": _staged_in_parts,
    "sliced": _sliced,
    "hierarchical": _hierarchical,
    "ring": _ring,
    "recursive doubling": _recursive_doubling,
    "Rabenseifner": _rabenseifner,
    "tree": _tree,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
"""Functions of size in bytes and scale by name; those before ``barrier`` are all-reduces."""

ALL_REDUCES = tuple(ALGORITHMS)[: list(ALGORITHMS).index("barrier")]
HOST_ALL_REDUCES = ALL_REDUCES[:4]


def host_algorithm(operation: str, size: float, s: Scale) -> str:
    """Returns the algorithm that the host backend takes: of an all-reduce its name, else the operation's."""
    if operation != "all_reduce":
        return operation
    limit = _most_staged(s) if s.machines > 1 else _threshold("one_shot_bytes", s.ranks)
    if size <= limit:
        return "one-shot"
    part = LINE * math.ceil(size / s.ranks / LINE)
    if _fits_arrival(part * s.ranks_per_machine, s):
        return "staged in parts"
    return "hierarchical" if s.machines > 1 else "sliced"


def is_possible(algorithm: str, s: Scale) -> bool:
    """Returns whether an algorithm exists at a scale."""
    if algorithm == "sliced":
        return s.machines == 1 and s.ranks > 1
    if algorithm == "staged in parts":
        return _fits_arrival(0, s)
    return s.machines > 1 or algorithm != "hierarchical"
