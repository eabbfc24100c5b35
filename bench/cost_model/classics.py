"""What the field's algorithms for an all-reduce cost, in terms of :mod:`collectives.bench.cost_model.model`.

After Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
(IJHPCA 2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from collectives.bench.cost_model.host import sliced_stages
from collectives.bench.cost_model.terms import (
    MESSAGES,
    SOCKETS,
    Parameters,
    Scale,
    Terms,
    add,
    exchange_of_leaders,
    local_meeting,
    scaled,
    work,
)

__all__ = ["leaders", "rabenseifner", "recursive_doubling", "ring", "tree"]


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
        out = exchange_of_leaders(p, crossing, crossing * sent, times)
        for name in (MESSAGES, SOCKETS):  # each rank's own core does its part
            out[name] /= min(crossing, p.cores)
        return add(out, work(p, s, 0, 2 * times * reduced))
    return add(scaled(times, local_meeting(p, s)), work(p, s, times * 2 * sent, 2 * times * reduced))


def ring(size: float, s: Scale, p: Parameters) -> Terms:
    """Reduce-scatter and all-gather around a ring of all ranks."""
    n = s.ranks
    if n == 1:
        return {}
    crossing = 1 if s.machines > 1 else 0
    return add(
        _hop(p, s, size / n, crossing, n - 1, size / n),
        _hop(p, s, size / n, crossing, n - 1, 0),
    )


def _log_steps(s: Scale) -> tuple[int, int]:
    """Returns the steps of doubling within machines and between them."""
    return math.ceil(math.log2(s.ranks_per_machine)), math.ceil(math.log2(s.machines))


def recursive_doubling(size: float, s: Scale, p: Parameters) -> Terms:
    """Whole arrays between partners at distances 1, 2, 4, ..."""
    inside, between = _log_steps(s)
    return add(_hop(p, s, size, 0, inside, size), _hop(p, s, size, s.ranks_per_machine, between, size))


def rabenseifner(size: float, s: Scale, p: Parameters) -> Terms:
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
            total = add(total, there, _hop(p, s, sent, crossing, steps, 0))
    return total


def tree(size: float, s: Scale, p: Parameters) -> Terms:
    """Binomial reduce to a root, then binomial broadcast."""
    inside, between = _log_steps(s)
    return add(
        _hop(p, s, size, 0, inside, size),
        _hop(p, s, size, 1, between, size),
        _hop(p, s, size, 1, between, 0),
        _hop(p, s, size, 0, inside, 0),
    )


def leaders(
    inner: Callable[[float, Scale, Parameters], Terms],
) -> Callable[[float, Scale, Parameters], Terms]:
    """Slices within machines as ours, and an algorithm of one rank a machine between the leaders."""

    def of(size: float, s: Scale, p: Parameters) -> Terms:
        own = sliced_stages(size, s, p) if s.ranks_per_machine > 1 else Terms()
        return add(local_meeting(p, s), own, inner(size, Scale(s.machines, 1), p))

    return of
