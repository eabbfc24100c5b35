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

from collections.abc import Callable, Iterator

from collectives.bench.cost_model.classics import leaders, rabenseifner, recursive_doubling, ring, tree
from collectives.bench.cost_model.host import (
    all_gather,
    all_to_all,
    barrier,
    broadcast,
    hierarchical,
    one_shot,
    reduce_scatter,
    sliced,
)
from collectives.bench.cost_model.terms import LINK, Parameters, Scale, Terms, turns_of_a_core

__all__ = ["ALGORITHMS", "OURS", "is_possible", "lower_bound_us", "terms", "time_us"]

OURS = ("one-shot", "sliced", "hierarchical")
"""Our algorithms of an all-reduce."""

ALGORITHMS: dict[str, Callable[[float, Scale, Parameters], Terms]] = {
    "one-shot": one_shot,
    "sliced": sliced,
    "hierarchical": hierarchical,
    "ring": ring,
    "recursive doubling": recursive_doubling,
    "Rabenseifner": rabenseifner,
    "tree": tree,
    "leaders' ring": leaders(ring),
    "leaders' Rabenseifner": leaders(rabenseifner),
    "leaders' doubling": leaders(recursive_doubling),
    "barrier": barrier,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}
"""Functions of size in bytes, scale and parameters by name; those before ``barrier`` are all-reduces."""


def is_possible(algorithm: str, s: Scale) -> bool:
    """Returns whether an algorithm exists at a scale."""
    if algorithm == "sliced":
        return s.machines == 1 and s.ranks > 1
    if algorithm == "hierarchical" or algorithm.startswith("leaders'"):
        return s.machines > 1
    return True


def terms(algorithm: str, size_bytes: float, scale: Scale, parameters: Parameters) -> Terms:
    """Returns the terms of an algorithm, without those that are 0.

    Args:
        algorithm: a name of :data:`ALGORITHMS`.
        size_bytes: the size of the array, as :mod:`collectives.bench.comparison.operations` counts it.
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
    return max(latency + local, link, turns_of_a_core(p, s) * size_bytes * p.copy_us_per_byte)


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
