"""What the host backend's algorithms cost, in terms of :mod:`collectives.bench.model`, and hold."""

from __future__ import annotations

import math

from collectives.bench.model_terms import (
    COPIES,
    FLAGS,
    LATENCY,
    LINES,
    LINK,
    MESSAGES,
    REDUCTION,
    SOCKETS,
    SWITCHES,
    Parameters,
    Scale,
    Terms,
    add,
    exchange_of_leaders,
    local_meeting,
    overlapped,
    turns_of_a_core,
    work,
)

__all__ = [
    "all_gather",
    "all_to_all",
    "barrier",
    "broadcast",
    "connections_per_leader",
    "hierarchical",
    "most_staged",
    "one_shot",
    "our_algorithm",
    "reduce_scatter",
    "segment_bytes",
    "sliced",
    "sliced_stages",
]

LINE_BYTES = 128
"""A line that one rank writes and others read."""

MOST_STAGED = 64 << 10
"""Longest contribution that may travel with the meeting on one machine."""

PAIR_ONE_SHOT, LEAST_ONE_SHOT, MOST_ONE_SHOT, SHARED_ONE_SHOT = 4 << 10, 8 << 10, 64 << 10, 256 << 10
UNSPLIT = 256 << 10
PAST_CACHE = 8 << 20
SHORTEST_CHUNK, LONGEST_CHUNK, PAIR_CHUNK = 32 << 10, 96 << 10, 64 << 10
LEAST_REMOTE_CHUNK, MOST_REMOTE_CHUNK = 64 << 10, 256 << 10
REMOTE_CHUNKS_WANTED, REMOTE_WINDOW = 8, 320 << 10
LEAST_NEAR, MOST_NEAR, SHARED_NEAR = 4 << 10, 32 << 10, 512 << 10
CHUNKS_WANTED = SLICED_RING_CHUNKS = 4
RING_BYTES = 2 << 20
"""Defaults of the host backend: ``selection/tuning.cpp``; between machines, ``state/segment_layout.cpp`` and
``algorithms/machine_chunks.hpp``; of slices, ``selection/selection.hpp``."""

HEAD_BYTES, ENTRY_BYTES = 16, 40
"""Of a frame of arrivals (``transport/arrival_exchange.hpp``): its head, and what tells of each rank."""

MOST_DIRECT = 32
"""Machines up to which each leader sends its frame to every other; beyond, leaders pass frames on."""

LEAST_SHARE = 256
"""Bytes of the shortest share of a chunk that a machine reduces for all: 64 elements, here of float32."""


def _written(size: float, total: float) -> float:
    """Bytes that move for an output other than the input; lines are fetched unless written past the cache."""
    return size * (1 if total > PAST_CACHE else 2)


def _handing_of_chunks(p: Parameters, s: Scale, chunks: float, stages: float, ring: float) -> Terms:
    """Flags of a pipeline over chunks, and the switches where a rank waits for those that share its core."""
    if s.ranks_per_machine == 1:
        return {}
    waits = stages * math.ceil(chunks / max(ring, 1))
    return {
        FLAGS: p.flag_us * chunks * stages * (s.ranks_per_machine - 1),
        SWITCHES: p.switch_us * waits * (turns_of_a_core(p, s) - 1),
    }


def _meet(p: Parameters, s: Scale, staged: float = 0.0, stagers: int | None = None) -> Terms:
    """The meeting of all ranks: leaders exchange frames, or pass them on where there are many.

    Args:
        p: parameters.
        s: scale.
        staged: bytes that a rank stages.
        stagers: ranks that stage, all of one machine; ``None`` for all ranks of all machines.
    """
    local = add(local_meeting(p, s), {LINES: turns_of_a_core(p, s) * p.line_us * (s.ranks - 1)})
    if s.machines == 1:
        return local
    bare = HEAD_BYTES + s.ranks_per_machine * ENTRY_BYTES
    frame = bare + (s.ranks_per_machine if stagers is None else stagers) * staged
    others = s.machines - 1
    # What a leader sends and what comes to it. Of a machine that alone stages something others get one long
    # frame each; it sends them all, or the first in every round.
    came = others * frame if stagers is None else frame + (others - 1) * bare
    if s.machines <= MOST_DIRECT:
        exchange = exchange_of_leaders(p, others, others * frame)
        if stagers is not None:  # the machine that stages receives nothing long
            exchange[SOCKETS] = others * (frame + bare) * p.socket_us_per_byte
        copied = frame + came
    else:
        rounds = math.ceil(math.log2(s.machines))
        sent = came if stagers is None else rounds * frame + (others - rounds) * bare
        exchange = add(
            {LATENCY: rounds * p.latency_us, MESSAGES: 2 * rounds * p.message_us},
            {LINK: sent * p.link_us_per_byte, SOCKETS: (sent + came) * p.socket_us_per_byte},
        )
        copied = frame + 2 * came + sent  # it keeps what comes, and puts together what it passes on
    # The leader puts its frame together, and writes what came for its local ranks.
    return add(local, exchange, {COPIES: copied * p.copy_us_per_byte}, local_meeting(p, s))


# ---- all-reduce ----------------------------------------------------------------------------------------


def most_staged(s: Scale) -> int:
    """Returns the longest contribution that travels with the meeting."""
    if s.machines == 1:
        return MOST_STAGED
    return max(LEAST_NEAR, min(MOST_NEAR, 1 << ((SHARED_NEAR // s.ranks) | 1).bit_length() - 1))


def _one_shot_limit(s: Scale) -> float:
    if s.machines > 1:
        return most_staged(s)
    if s.ranks == 2:
        return PAIR_ONE_SHOT
    return min(max(SHARED_ONE_SHOT / s.ranks, LEAST_ONE_SHOT), MOST_ONE_SHOT)


def one_shot(size: float, s: Scale, p: Parameters) -> Terms:
    """All contributions travel with the meeting, and every rank reduces all of them."""
    # Machine by machine, then the machines' sums, so that the length changes no bit.
    sums = s.machines if s.machines > 1 and s.ranks_per_machine > 1 else 0
    return add(_meet(p, s, size), work(p, s, size, (s.ranks + sums) * size))


def sliced_stages(size: float, s: Scale, p: Parameters) -> Terms:
    """Every rank reduces a slice of each chunk for all, without the meeting."""
    ranks = s.ranks_per_machine
    moved = 2 * (ranks - 1) / ranks  # everything but the own slice in, the others' results out
    longest = _local_chunk(ranks)
    chunk = min(max(size / CHUNKS_WANTED, SHORTEST_CHUNK), longest) if size > UNSPLIT else max(size, 1)
    chunks = math.ceil(size / chunk)
    ring = min(RING_BYTES / chunk, SLICED_RING_CHUNKS)
    return add(work(p, s, size * moved, size), _handing_of_chunks(p, s, chunks, 2, ring))


def sliced(size: float, s: Scale, p: Parameters) -> Terms:
    """Every rank reduces a slice of each chunk for all."""
    return add(_meet(p, s), sliced_stages(size, s, p))


def _local_chunk(ranks: int) -> int:
    """Most bytes of a chunk between the ranks of one machine."""
    return PAIR_CHUNK if ranks == 2 else LONGEST_CHUNK


def _remote_chunk(size: float, most: float = MOST_REMOTE_CHUNK) -> float:
    """Bytes of a chunk between machines."""
    return min(max(size / REMOTE_CHUNKS_WANTED, LEAST_REMOTE_CHUNK), most)


def hierarchical(size: float, s: Scale, p: Parameters) -> Terms:
    """Slices within machines, and shares of each chunk directly between all leaders, in two phases."""
    m, ranks = s.machines, s.ranks_per_machine
    # A rank has windows for contributions, results and, of two ranks at least, slices of sums.
    chunk = _remote_chunk(size, MOST_REMOTE_CHUNK if ranks == 1 else REMOTE_WINDOW / 2.5)
    chunks = math.ceil(size / chunk)
    # A chunk has no more shares than this; machines beyond have none to reduce, only to send and to receive.
    shares = min(m, max(1, math.ceil(min(size, chunk) / LEAST_SHARE)))
    inside, combined = Terms(), {REDUCTION: size * m / shares * p.reduce_us_per_byte}
    if ranks > 1:
        # All but the own slice into the window, all of the result out of it; the leader keeps its share.
        inside = add(work(p, s, size * (2 - 1 / ranks), size), _handing_of_chunks(p, s, chunks, 2, 4))
        combined[COPIES] = size / shares * p.copy_us_per_byte
    # Of a machine with a share: the others' shares, then the result of its own to everybody.
    sent = size * ((shares - 1) / shares + (m - 1) / shares)
    messages = 2 * chunks * (m - 1 + shares - 1) * p.message_us
    # The leader's core does the messages, the socket copies and the combination; the link works beside it.
    leader = add({MESSAGES: messages, SOCKETS: 2 * sent * p.socket_us_per_byte}, combined, inside)
    network = {LINK: sent * p.link_us_per_byte}
    return add(_meet(p, s), {LATENCY: 2 * p.latency_us}, overlapped(chunks, leader, network))


def our_algorithm(operation: str, size: float, s: Scale) -> str:
    """Returns which of our algorithms an all-reduce takes; the operation's own name for others."""
    if operation != "all_reduce":
        return operation
    if size <= _one_shot_limit(s):
        return "one-shot"
    if s.machines > 1:
        return "hierarchical"
    return "sliced"


# ---- other operations ----------------------------------------------------------------------------------


def barrier(size: float, s: Scale, p: Parameters) -> Terms:  # noqa: ARG001
    """A meeting and nothing else."""
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
        chunks = math.ceil(size / _local_chunk(s.ranks))
        return add(_meet(p, s), inside, _handing_of_chunks(p, s, chunks, 1, 4))
    chunks = math.ceil(size / piece)
    leader = add(
        inside,
        _handing_of_chunks(p, s, chunks, 1, 4),
        {SOCKETS: carried * p.socket_us_per_byte, MESSAGES: chunks * messages * p.message_us},
    )
    network = {LINK: sent * p.link_us_per_byte}
    return add(_meet(p, s), {LATENCY: phases * p.latency_us}, overlapped(chunks, leader, network))


def broadcast(size: float, s: Scale, p: Parameters) -> Terms:
    """From one rank to all."""
    # One machine: the root copies into its ring, the others out of it, one chunk behind.
    copied = size + min(size, _local_chunk(s.ranks))
    if _staged(size, s):
        return add(_meet(p, s, size, 1), work(p, s, copied))
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
        inside=work(p, s, copied),
        piece=_remote_chunk(size),
        sent=size,
        carried=size * (1 + max(others, 0) / max(others + 1, 1)),
        messages=s.machines - 1 + max(others, 0),
        phases=2 if others > 0 else 1,
    )


def all_gather(size: float, s: Scale, p: Parameters) -> Terms:
    """``size`` is that of the output."""
    part, r = size / s.ranks, s.ranks_per_machine
    if _staged(part, s):
        return add(_meet(p, s, part), work(p, s, part + _written(size, size)))
    if s.machines == 1:
        return _long(size, s, p, inside=work(p, s, part + _written(size, size)))
    # With one rank a machine the others' parts come straight into the output.
    copied = part + _written(size, size) if r > 1 else _written(part, size)
    most = MOST_REMOTE_CHUNK if r == 1 else max(REMOTE_WINDOW // s.ranks, LEAST_SHARE)
    sent = (s.machines - 1) * r * part
    return _long(
        part,
        s,
        p,
        inside=work(p, s, copied),
        piece=min(_remote_chunk(part), most),
        sent=sent,
        carried=2 * sent,
        messages=2 * (s.machines - 1),
    )


def reduce_scatter(size: float, s: Scale, p: Parameters) -> Terms:
    """``size`` is that of the input."""
    part, r, m = size / s.ranks, s.ranks_per_machine, s.machines
    inside = work(p, s, size + _written(part, size), size)
    if _staged(size, s):
        return add(_meet(p, s, size), inside)
    if m == 1:
        return _long(size, s, p, inside=inside)
    most = MOST_REMOTE_CHUNK / m
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
        inside=work(p, s, copied + _written(part, size), reduced),
        piece=max(min(_remote_chunk(part), most), LEAST_SHARE),
        sent=sent,
        carried=2 * sent,
        messages=2 * (m - 1),
    )


def all_to_all(size: float, s: Scale, p: Parameters) -> Terms:
    """``size`` is that of the input, and of the output."""
    # What a rank gets of its own machine goes through memory, the rest directly from rank to rank.
    inside = work(p, s, size + _written(size, size))
    if _staged(size, s):
        return add(_meet(p, s, size), inside)
    if s.machines == 1:
        return _long(size, s, p, inside=inside)
    m, r = s.machines, s.ranks_per_machine
    sent = size * (m - 1) / m  # of each rank; its own core moves them
    at_home = size / m
    return _long(
        size,
        s,
        p,
        inside=work(p, s, at_home + _written(at_home, size)),
        piece=size,
        sent=r * sent,
        carried=2 * turns_of_a_core(p, s) * sent,
        messages=2 * turns_of_a_core(p, s) * (m - 1) * r,
    )


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
    """Returns a leader's connections: control and data with each other leader, and those of the meeting."""
    others = scale.machines - 1
    if scale.machines <= MOST_DIRECT:
        return 3 * others
    # In each round it sends to one and hears from another; in the last both may be the same.
    distances = [1 << k for k in range(math.ceil(math.log2(scale.machines)))]
    met = {(way * d) % scale.machines for d in distances for way in (1, -1)}
    return 2 * others + len(met)
