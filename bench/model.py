"""What an operation costs on any number of machines: pure functions of parameters.

The terms are those of the field: a message costs a latency and a time per byte (alpha and beta of Hockney,
"The communication challenge for MPP", Parallel Computing 1994), and keeps the processors of its sender and
its receiver for an overhead (o of LogP, Culler et al. 1993; time per byte G of LogGP, Alexandrov et al.
1995). Costs of ring, recursive doubling, halving and trees follow Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (IJHPCA 2005); lower bounds follow Chan et al.,
"Collective communication: theory, practice, and experience" (2007).

Words. *Ours* are the algorithms of the host backend. A *machine* has ranks that share its memory; its
*leader* speaks with the leaders of the others. A *meeting* begins each operation: all ranks of all machines
publish what they are about to do, and short contributions with it. A *term* is one cause of time, in
microseconds; the time of an operation is the sum of its terms, where what overlaps counts only as far as it
is not hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

__all__ = [
    "ALGORITHMS",
    "OURS",
    "Parameters",
    "Scale",
    "Terms",
    "connections_per_leader",
    "is_possible",
    "lower_bound_us",
    "most_staged",
    "our_algorithm",
    "segment_bytes",
    "terms",
    "time_us",
]

LINE_BYTES = 128
"""A line that one rank writes and others read."""

MOST_STAGED = 64 << 10
"""Longest contribution that may travel with the meeting on one machine."""

LEAST_ONE_SHOT, MOST_ONE_SHOT, SHARED_ONE_SHOT = 8 << 10, 128 << 10, 512 << 10
UNSPLIT = 256 << 10
PAST_CACHE = 8 << 20
SHORTEST_CHUNK, LONGEST_CHUNK, PAIR_CHUNK = 32 << 10, 256 << 10, 64 << 10
LEAST_REMOTE_CHUNK, REMOTE_CHUNKS_WANTED, REMOTE_WINDOW = 64 << 10, 8, 320 << 10
LEAST_NEAR, MOST_NEAR, SHARED_NEAR = 4 << 10, 32 << 10, 512 << 10
CHUNKS_WANTED = 4
RING_BYTES = 1 << 20
"""Defaults of the host backend: ``transport/tuning.cpp``; between machines, ``control_page.cpp`` there and
``algorithms/machine_parts.hpp``."""

HEAD_BYTES, ENTRY_BYTES = 16, 40
"""Of a frame of the leaders' meeting (``transport/exchange.hpp``): its head, and what tells of each rank."""

LEAST_SHARE = 256
"""Bytes of the shortest share of a chunk that a machine reduces for all: 64 elements, here of float32."""


def _written(size: float, total: float) -> float:
    """Bytes that move for an output other than the input; lines are fetched unless written past the cache."""
    return size * (1 if total > PAST_CACHE else 2)


# Names of terms.
MEETING = "meeting of the local ranks"
LINES = "arrival lines of all ranks"
COPIES = "copies in memory"
REDUCTION = "reduction"
FLAGS = "flags of chunks"
SWITCHES = "switches between ranks on a core"
LATENCY = "network latency"
MESSAGES = "messages of a leader"
LINK = "link of a machine"
SOCKETS = "copies through sockets"

Terms = dict[str, float]


@dataclass(frozen=True, slots=True)
class Parameters:
    """A machine and its network. Times are in microseconds.

    Attributes:
        cores: processors that the ranks of a machine may use.
        meeting_us: a rank publishes its arrival and sees another's.
        line_us: each further arrival line that a rank looks at.
        switch_us: another rank takes its turn on a core.
        flag_us: a chunk is handed from a rank to another.
        copy_us_per_byte: a core copies a byte from memory to memory.
        reduce_us_per_byte: a core reads a byte of a contribution and adds it to the result.
        crowding: part by which a byte costs more for each further rank on a core, as its cache is shared.
        latency_us: from one machine to another, beside the overhead (L).
        message_us: a leader's core sends or receives a message (o).
        link_us_per_byte: a byte on a machine's link, in each direction (G).
        socket_us_per_byte: a core moves a byte to or from the network.
        burst_bytes: what passes a machine's link at once before it counts, as where a token bucket shapes it.
    """

    cores: int = 2
    meeting_us: float = 1.0
    line_us: float = 0.1
    switch_us: float = 4.0
    flag_us: float = 0.3
    copy_us_per_byte: float = 1e-4
    reduce_us_per_byte: float = 5e-5
    crowding: float = 0.5
    latency_us: float = 20.0
    message_us: float = 3.0
    link_us_per_byte: float = 8e-4
    socket_us_per_byte: float = 2e-4
    burst_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How many ranks there are and where.

    Attributes:
        machines: number of machines.
        ranks_per_machine: ranks on each.
    """

    machines: int
    ranks_per_machine: int

    def __post_init__(self) -> None:
        if self.machines < 1 or self.ranks_per_machine < 1:
            raise ValueError(f"there must be a machine and a rank, but this is {self}")

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.machines * self.ranks_per_machine


def _sum(*parts: Mapping[str, float]) -> Terms:
    total: Terms = {}
    for part in parts:
        for name, us in part.items():
            total[name] = total.get(name, 0.0) + us
    return total


def _times(factor: float, part: Mapping[str, float]) -> Terms:
    return {name: us * factor for name, us in part.items()}


def _overlap(chunks: float, *stages: Mapping[str, float]) -> Terms:
    """Stages of a pipeline of so many chunks: the longest, and of the others the first chunk."""
    longest = max(range(len(stages)), key=lambda i: sum(stages[i].values()))
    return _sum(
        *(stage if i == longest else _times(1 / max(chunks, 1), stage) for i, stage in enumerate(stages))
    )


def _turns(p: Parameters, s: Scale) -> float:
    """How many ranks a core serves."""
    return max(1.0, s.ranks_per_machine / p.cores)


def _work(p: Parameters, s: Scale, copied: float, reduced: float = 0.0) -> Terms:
    """Every local rank copies and reduces so many bytes."""
    turns = _turns(p, s)
    each = turns * (1 + p.crowding * (turns - 1))
    return {COPIES: each * copied * p.copy_us_per_byte, REDUCTION: each * reduced * p.reduce_us_per_byte}


def _local_meeting(p: Parameters, s: Scale) -> Terms:
    if s.ranks_per_machine == 1:
        return {}
    return {MEETING: p.meeting_us, SWITCHES: p.switch_us * (_turns(p, s) - 1)}


def _chunks(p: Parameters, s: Scale, chunks: float, stages: float, ring: float) -> Terms:
    """Flags of a pipeline over chunks, and the switches where a rank waits for those that share its core."""
    if s.ranks_per_machine == 1:
        return {}
    waits = stages * math.ceil(chunks / max(ring, 1))
    return {
        FLAGS: p.flag_us * chunks * stages * (s.ranks_per_machine - 1),
        SWITCHES: p.switch_us * waits * (_turns(p, s) - 1),
    }


def _exchange(p: Parameters, peers: float, sent: float, times: float = 1.0) -> Terms:
    """A leader exchanges ``sent`` bytes each way with ``peers`` leaders, so many times one by one."""
    return {
        LATENCY: times * p.latency_us,
        MESSAGES: times * 2 * peers * p.message_us,
        LINK: times * sent * p.link_us_per_byte,
        SOCKETS: times * 2 * sent * p.socket_us_per_byte,
    }


def _meet(p: Parameters, s: Scale, staged: float = 0.0, stagers: int | None = None) -> Terms:
    """The meeting of all ranks: leaders exchange frames, each with each.

    Args:
        p: parameters.
        s: scale.
        staged: bytes that a rank stages.
        stagers: ranks that stage, all of one machine; ``None`` for all ranks of all machines.
    """
    local = _sum(_local_meeting(p, s), {LINES: _turns(p, s) * p.line_us * (s.ranks - 1)})
    if s.machines == 1:
        return local
    bare = HEAD_BYTES + s.ranks_per_machine * ENTRY_BYTES
    frame = bare + (s.ranks_per_machine if stagers is None else stagers) * staged
    others = s.machines - 1
    exchange = _exchange(p, others, others * frame)
    came = others * frame
    if stagers is not None:  # the machine that stages receives nothing long, the others one long frame
        came = frame + (others - 1) * bare
        exchange[SOCKETS] = others * (frame + bare) * p.socket_us_per_byte
    # The leader puts its frame together, and writes what came for its local ranks.
    return _sum(local, exchange, {COPIES: (frame + came) * p.copy_us_per_byte}, _local_meeting(p, s))


# ---- ours ----------------------------------------------------------------------------------------------


def most_staged(s: Scale) -> int:
    """Returns the longest contribution that travels with the meeting."""
    if s.machines == 1:
        return MOST_STAGED
    return max(LEAST_NEAR, min(MOST_NEAR, 1 << ((SHARED_NEAR // s.ranks) | 1).bit_length() - 1))


def _one_shot_limit(s: Scale) -> float:
    if s.machines > 1:
        return most_staged(s)
    return min(max(SHARED_ONE_SHOT / s.ranks, LEAST_ONE_SHOT), MOST_ONE_SHOT)


def _one_shot(size: float, s: Scale, p: Parameters) -> Terms:
    # Machine by machine, then the machines' sums, so that the length changes no bit.
    sums = s.machines if s.machines > 1 and s.ranks_per_machine > 1 else 0
    return _sum(_meet(p, s, size), _work(p, s, size, (s.ranks + sums) * size))


def _pair(size: float, s: Scale, p: Parameters) -> Terms:
    chunks = math.ceil(size / PAIR_CHUNK)
    first = _times(1 / max(chunks, 1), _work(p, s, size))  # nothing can be reduced before it
    ring = RING_BYTES / PAIR_CHUNK
    return _sum(_meet(p, s), _work(p, s, size, 2 * size), first, _chunks(p, s, chunks, 1, ring))


def _sliced_stages(size: float, s: Scale, p: Parameters) -> Terms:
    ranks = s.ranks_per_machine
    moved = (
        2 * (ranks - 1) / ranks + 1 / ranks
    )  # everything but the own slice in, the own result, the others' out
    chunk = min(max(size / CHUNKS_WANTED, SHORTEST_CHUNK), LONGEST_CHUNK) if size > UNSPLIT else max(size, 1)
    chunks = math.ceil(size / chunk)
    return _sum(_work(p, s, size * moved, size), _chunks(p, s, chunks, 2, min(RING_BYTES / chunk, chunks)))


def _sliced(size: float, s: Scale, p: Parameters) -> Terms:
    return _sum(_meet(p, s), _sliced_stages(size, s, p))


def _remote_chunk(size: float, most: float = LONGEST_CHUNK) -> float:
    """Bytes of a chunk between machines."""
    return min(max(size / REMOTE_CHUNKS_WANTED, LEAST_REMOTE_CHUNK), most)


def _hierarchical(size: float, s: Scale, p: Parameters) -> Terms:
    """Slices within machines, and shares of each chunk directly between all leaders, in two phases."""
    m, ranks = s.machines, s.ranks_per_machine
    # A rank has windows for contributions, results and, of two ranks at least, slices of sums.
    chunk = _remote_chunk(size, LONGEST_CHUNK if ranks == 1 else REMOTE_WINDOW / 2.5)
    chunks = math.ceil(size / chunk)
    # A chunk has no more shares than this; machines beyond have none to reduce, only to send and to receive.
    shares = min(m, max(1, math.ceil(min(size, chunk) / LEAST_SHARE)))
    inside, combined = Terms(), {REDUCTION: size * m / shares * p.reduce_us_per_byte}
    if ranks > 1:
        # All but the own slice into the window, all of the result out of it; the leader keeps its share.
        inside = _sum(_work(p, s, size * (2 - 1 / ranks), size), _chunks(p, s, chunks, 2, 4))
        combined[COPIES] = size / shares * p.copy_us_per_byte
    # Of a machine with a share: the others' shares, then the result of its own to everybody.
    sent = size * ((shares - 1) / shares + (m - 1) / shares)
    messages = 2 * chunks * (m - 1 + shares - 1) * p.message_us
    # The leader's core does the messages, the socket copies and the combination; the link works beside it.
    leader = _sum({MESSAGES: messages, SOCKETS: 2 * sent * p.socket_us_per_byte}, combined, inside)
    network = {LINK: sent * p.link_us_per_byte}
    return _sum(_meet(p, s), {LATENCY: 2 * p.latency_us}, _overlap(chunks, leader, network))


def our_algorithm(operation: str, size: float, s: Scale) -> str:
    """Returns which of our algorithms an all-reduce takes; the operation's own name for others."""
    if operation != "all_reduce":
        return operation
    if size <= _one_shot_limit(s):
        return "one-shot"
    if s.machines > 1:
        return "hierarchical"
    return "pair" if s.ranks == 2 else "sliced"


# ---- other algorithms for an all-reduce ----------------------------------------------------------------


def _hop(p: Parameters, s: Scale, sent: float, crossing: float, times: float, reduced: float) -> Terms:
    """A step of an algorithm of messages between ranks, so many times.

    Args:
        p: parameters.
        s: scale.
        sent: bytes that each rank sends.
        crossing: ranks of a machine whose message leaves it; where none does, it goes through memory.
        times: how often.
        reduced: bytes that each rank adds to its own.
    """
    if crossing:
        out = _exchange(p, crossing, crossing * sent, times)
        for name in (MESSAGES, SOCKETS):  # each rank's own core does its part
            out[name] /= min(crossing, p.cores)
        return _sum(out, _work(p, s, 0, 2 * times * reduced))
    return _sum(_times(times, _local_meeting(p, s)), _work(p, s, times * 2 * sent, 2 * times * reduced))


def _ring(size: float, s: Scale, p: Parameters) -> Terms:
    n = s.ranks
    if n == 1:
        return {}
    crossing = 1 if s.machines > 1 else 0
    return _sum(
        _hop(p, s, size / n, crossing, n - 1, size / n),
        _hop(p, s, size / n, crossing, n - 1, 0),
    )


def _log_steps(s: Scale) -> tuple[int, int]:
    """Returns the steps of doubling within machines and between them."""
    return math.ceil(math.log2(s.ranks_per_machine)), math.ceil(math.log2(s.machines))


def _recursive_doubling(size: float, s: Scale, p: Parameters) -> Terms:
    inside, between = _log_steps(s)
    return _sum(_hop(p, s, size, 0, inside, size), _hop(p, s, size, s.ranks_per_machine, between, size))


def _rabenseifner(size: float, s: Scale, p: Parameters) -> Terms:
    """Halving within the machine, then between machines, and doubling back; parts shrink on the way."""
    inside, between = _log_steps(s)
    total = Terms()
    for steps, whole, parts, crossing in (
        (inside, size, s.ranks_per_machine, 0),
        (between, size / s.ranks_per_machine, s.machines, s.ranks_per_machine),
    ):
        if steps:
            sent = whole * (parts - 1) / parts / steps  # all steps together halve the whole down to a part
            there = _hop(p, s, sent, crossing, steps, sent)
            total = _sum(total, there, _hop(p, s, sent, crossing, steps, 0))
    return total


def _tree(size: float, s: Scale, p: Parameters) -> Terms:
    """Binomial reduce to a root, then binomial broadcast."""
    inside, between = _log_steps(s)
    return _sum(
        _hop(p, s, size, 0, inside, size),
        _hop(p, s, size, 1, between, size),
        _hop(p, s, size, 1, between, 0),
        _hop(p, s, size, 0, inside, 0),
    )


def _leaders(
    inner: Callable[[float, Scale, Parameters], Terms],
) -> Callable[[float, Scale, Parameters], Terms]:
    """Slices within machines as ours, and an algorithm of one rank a machine between the leaders."""

    def of(size: float, s: Scale, p: Parameters) -> Terms:
        own = _sliced_stages(size, s, p) if s.ranks_per_machine > 1 else Terms()
        return _sum(_local_meeting(p, s), own, inner(size, Scale(s.machines, 1), p))

    return of


# ---- other operations ----------------------------------------------------------------------------------


def _barrier(size: float, s: Scale, p: Parameters) -> Terms:  # noqa: ARG001
    return _meet(p, s)


def _staged(total: float, s: Scale) -> bool:
    return total <= most_staged(s)


def _long(
    size: float,
    s: Scale,
    p: Parameters,
    *,
    inside: Terms,
    piece: float = 0.0,
    sent: float = 0.0,
    carried: float = 0.0,
    messages: float = 0.0,
    phases: int = 1,
) -> Terms:
    """A long movement: chunk by chunk, beside the network.

    Args:
        size: bytes that are cut into chunks.
        s: scale.
        p: parameters.
        inside: what the local ranks do.
        piece: bytes of a chunk between machines.
        sent: bytes that the busiest machine puts on its link in one direction.
        carried: bytes that the busiest leader moves to and from its sockets.
        messages: sent or received by that leader for each chunk.
        phases: how often a byte goes from machine to machine, one after the other.
    """
    if s.machines == 1:
        chunks = math.ceil(size / LONGEST_CHUNK)
        return _sum(_meet(p, s), inside, _chunks(p, s, chunks, 1, 4))
    chunks = math.ceil(size / piece)
    leader = _sum(
        inside,
        _chunks(p, s, chunks, 1, 4),
        {SOCKETS: carried * p.socket_us_per_byte, MESSAGES: chunks * messages * p.message_us},
    )
    network = {LINK: sent * p.link_us_per_byte}
    return _sum(_meet(p, s), {LATENCY: phases * p.latency_us}, _overlap(chunks, leader, network))


def _broadcast(size: float, s: Scale, p: Parameters) -> Terms:
    # One machine: the root copies into its ring, the others out of it, one chunk behind.
    copied = size + min(size, LONGEST_CHUNK)
    if _staged(size, s):
        return _sum(_meet(p, s, size, 1), _work(p, s, copied))
    if s.machines > 1:
        # Of each machine one rank copies: the root into the window, or those beside a leader out of it.
        copied = size if s.ranks_per_machine > 1 else 0.0
    # The root deals shares to the other machines, which pass them on to each other: each link carries the
    # size at most, each leader but the root's as much in as it passes on.
    others = s.machines - 2
    return _long(
        size,
        s,
        p,
        inside=_work(p, s, copied),
        piece=_remote_chunk(size),
        sent=size,
        carried=size * (1 + max(others, 0) / max(others + 1, 1)),
        messages=s.machines - 1 + max(others, 0),
        phases=2 if others > 0 else 1,
    )


def _all_gather(size: float, s: Scale, p: Parameters) -> Terms:
    part, r = size / s.ranks, s.ranks_per_machine
    if _staged(part, s):
        return _sum(_meet(p, s, part), _work(p, s, part + _written(size, size)))
    if s.machines == 1:
        return _long(size, s, p, inside=_work(p, s, part + _written(size, size)))
    # With one rank a machine the others' parts come straight into the output.
    copied = part + _written(size, size) if r > 1 else _written(part, size)
    most = LONGEST_CHUNK if r == 1 else max(REMOTE_WINDOW // s.ranks, LEAST_SHARE)
    sent = (s.machines - 1) * r * part
    return _long(
        part,
        s,
        p,
        inside=_work(p, s, copied),
        piece=min(_remote_chunk(part), most),
        sent=sent,
        carried=2 * sent,
        messages=2 * (s.machines - 1),
    )


def _reduce_scatter(size: float, s: Scale, p: Parameters) -> Terms:
    part, r, m = size / s.ranks, s.ranks_per_machine, s.machines
    inside = _work(p, s, size + _written(part, size), size)
    if _staged(size, s):
        return _sum(_meet(p, s, size), inside)
    if m == 1:
        return _long(size, s, p, inside=inside)
    most = LONGEST_CHUNK / m
    copied, reduced = 0.0, size  # with one rank a machine: as many parts as machines are combined
    if r > 1:
        # Windows hold contributions for all ranks, sums for those that one looks after, and what has come.
        elements = s.ranks + (s.ranks - r) / r + 2 + r * (m - 1)
        most = REMOTE_WINDOW / elements
        copied, reduced = size - part, size + m * part
    sent = size * (m - 1) / m
    return _long(
        part,
        s,
        p,
        inside=_work(p, s, copied + _written(part, size), reduced),
        piece=max(min(_remote_chunk(part), most), LEAST_SHARE),
        sent=sent,
        carried=2 * sent,
        messages=2 * (m - 1),
    )


def _all_to_all(size: float, s: Scale, p: Parameters) -> Terms:
    # What a rank gets of its own machine goes through memory, the rest directly from rank to rank.
    inside = _work(p, s, size + _written(size, size))
    if _staged(size, s):
        return _sum(_meet(p, s, size), inside)
    if s.machines == 1:
        return _long(size, s, p, inside=inside)
    m, r = s.machines, s.ranks_per_machine
    sent = size * (m - 1) / m  # of each rank; its own core moves them
    at_home = size / m
    return _long(
        size,
        s,
        p,
        inside=_work(p, s, at_home + _written(at_home, size)),
        piece=size,
        sent=r * sent,
        carried=2 * _turns(p, s) * sent,
        messages=2 * _turns(p, s) * (m - 1) * r,
    )


OURS = ("one-shot", "pair", "sliced", "hierarchical")
"""Our algorithms of an all-reduce."""

ALGORITHMS: dict[str, Callable[[float, Scale, Parameters], Terms]] = {
    "one-shot": _one_shot,
    "pair": _pair,
    "sliced": _sliced,
    "hierarchical": _hierarchical,
    "ring": _ring,
    "recursive doubling": _recursive_doubling,
    "Rabenseifner": _rabenseifner,
    "tree": _tree,
    "leaders' ring": _leaders(_ring),
    "leaders' Rabenseifner": _leaders(_rabenseifner),
    "leaders' doubling": _leaders(_recursive_doubling),
    "barrier": _barrier,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
"""Functions of size in bytes, scale and parameters by name; those before ``barrier`` are all-reduces."""


def is_possible(algorithm: str, s: Scale) -> bool:
    """Returns whether an algorithm exists at a scale."""
    if algorithm == "pair":
        return s.ranks == 2 and s.machines == 1
    if algorithm == "sliced":
        return s.machines == 1 and s.ranks > 1
    if algorithm == "hierarchical" or algorithm.startswith("leaders'"):
        return s.machines > 1
    return True


def terms(algorithm: str, size_bytes: float, scale: Scale, parameters: Parameters) -> Terms:
    """Returns the terms of an algorithm, without those that are 0.

    Args:
        algorithm: a name of :data:`ALGORITHMS`.
        size_bytes: the size of the array, as :mod:`collectives.bench.operations` counts it.
        scale: where the ranks are.
        parameters: of machine and network.
    """
    if scale.ranks == 1:
        return {}
    parts = ALGORITHMS[algorithm](size_bytes, scale, parameters)
    if parts.get(LINK):
        parts[LINK] = max(0.0, parts[LINK] - parameters.burst_bytes * parameters.link_us_per_byte)
    return {name: us for name, us in parts.items() if us}


def time_us(algorithm: str, size_bytes: float, scale: Scale, parameters: Parameters) -> float:
    """Returns the time of an algorithm in microseconds; arguments as of :func:`terms`."""
    return sum(terms(algorithm, size_bytes, scale, parameters).values())


def lower_bound_us(size_bytes: float, scale: Scale, parameters: Parameters) -> float:
    """Returns what no all-reduce can beat on these machines and this network.

    The largest of (after Chan et al. 2007, section 4): the latencies of the best of all schemes in which
    everybody speaks with k others at a time; 2(m-1)/m of the size on each machine's link; every byte of every
    rank's array read and written once by the cores.
    """
    p, s = parameters, scale
    m = s.machines
    if s.ranks == 1:
        return 0.0
    latency = min(
        (_steps(m, peers) * (p.latency_us + 2 * peers * p.message_us) for peers in _fan_outs(m)), default=0.0
    )
    local = p.meeting_us if s.ranks_per_machine > 1 else 0.0
    link = 2 * (m - 1) / m * size_bytes * p.link_us_per_byte
    return max(latency + local, link, _turns(p, s) * size_bytes * p.copy_us_per_byte)


def _fan_outs(machines: int) -> Iterator[int]:
    """Yields 1, 2, 4, ... and all others."""
    peers = 1
    while peers < machines - 1:
        yield peers
        peers *= 2
    if machines > 1:
        yield machines - 1


def _steps(machines: int, peers: int) -> int:
    """Returns the steps after which all have heard of all, where each hears of ``peers`` more in each."""
    steps, heard = 0, 1
    while heard < machines:
        heard *= peers + 1
        steps += 1
    return steps


# ---- limits that are no times --------------------------------------------------------------------------


def segment_bytes(scale: Scale) -> float:
    """Returns the memory that the ranks of a machine hold for a group, over its local ranks.

    Each rank has a row in the segment of every machine: control page, split table and mail counters with an
    entry for every rank, slots for short contributions; local ones a staging arena, too. So tables grow with
    the square of the number of ranks. Mailboxes are left out: they have no memory before their first use.
    """
    page = 4096

    def pages(count: float) -> float:
        return math.ceil(count / page) * page

    near = most_staged(scale) if scale.machines > 1 else LEAST_NEAR
    row = page + pages(32 * scale.ranks) + pages(2 * LINE_BYTES * scale.ranks) + pages(2 * near)
    arenas = scale.ranks_per_machine * (4 << 20)
    return (page + scale.ranks * row + arenas) / scale.ranks_per_machine


def connections_per_leader(scale: Scale) -> int:
    """Returns a leader's connections: control, meeting and data with each other leader."""
    return 3 * (scale.machines - 1)
