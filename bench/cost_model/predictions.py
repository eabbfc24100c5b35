"""Times of algorithms, and where they stop scaling: pure functions of parameters.

A message costs a latency and a time per byte (Hockney, "The communication challenge for MPP", Parallel
Computing 1994), and keeps the cores of sender and receiver for an overhead (LogP, Culler et al. 1993; LogGP,
Alexandrov et al. 1995). A *term* is one cause of time; the time of an operation is the sum of its terms,
where what overlaps counts only as far as it is not hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from collectives.bench.cost_model.algorithms import (
    ALGORITHMS,
    ALL_REDUCES,
    Counts,
    host_algorithm,
    is_possible,
)
from collectives.bench.cost_model.parameters import Parameters, Scale

__all__ = [
    "PRICES",
    "Prediction",
    "ScalingEnd",
    "lower_bound_us",
    "predict",
    "predict_host",
    "predictions",
    "scales_up_to",
    "scaling_end",
    "scaling_ends",
    "terms",
    "time_us",
]

LINK = "link of a machine"

PRICES = {
    "arrivals": ("arrival of the local ranks", "arrival_us"),
    "lines": ("arrivals of all ranks", "line_us"),
    "waits": ("switches between ranks on a core", "switch_us"),
    "flags": ("flags of chunks", "flag_us"),
    "copies": ("copies in memory", "copy_us_per_byte"),
    "leader copies": ("copies in memory", "copy_us_per_byte"),
    "reductions": ("reduction", "reduce_us_per_byte"),
    "leader reductions": ("reduction", "reduce_us_per_byte"),
    "latencies": ("network latency", "latency_us"),
    "messages": ("messages", "message_us"),
    "leader messages": ("messages", "message_us"),
    "link": (LINK, "link_us_per_byte"),
    "sockets": ("copies through sockets", "socket_us_per_byte"),
    "leader sockets": ("copies through sockets", "socket_us_per_byte"),
}
"""What algorithms count: the term that it adds to, and the parameter that it is multiplied by."""


def _ranks_on_core(p: Parameters, s: Scale) -> float:
    return max(1.0, s.ranks_per_machine / p.cores)


def _terms_of(counts: Counts, s: Scale, p: Parameters) -> dict[str, float]:
    """Returns counts as terms; what every rank does is done by each of those that share a core."""
    sharing = _ranks_on_core(p, s)
    crowded = sharing * (1 + p.crowding * (sharing - 1))
    factors = {"lines": sharing, "waits": sharing - 1, "messages": sharing, "sockets": sharing}
    factors |= {"copies": crowded, "reductions": crowded}
    found: dict[str, float] = {}
    for name, count in counts.items():
        term, parameter = PRICES[name]
        found[term] = found.get(term, 0.0) + count * factors.get(name, 1.0) * getattr(p, parameter)
    return found


def terms(algorithm: str, size_bytes: float, scale: Scale, parameters: Parameters) -> dict[str, float]:
    """Returns the terms of an algorithm in microseconds, without those that are 0.

    Args:
        algorithm: a name of :data:`~collectives.bench.cost_model.algorithms.ALGORITHMS`.
        size_bytes: the size of the array, as :mod:`collectives.bench.comparison.operations` counts it.
        scale: where the ranks are.
        parameters: of machine and network.
    """
    if scale.ranks == 1:
        return {}
    work = ALGORITHMS[algorithm](size_bytes, scale)
    total = _terms_of(work.serial, scale, parameters)
    beside = _terms_of(work.pipelined, scale, parameters)
    link = {LINK: beside.pop(LINK, 0.0)}
    hidden = beside if link[LINK] > sum(beside.values()) else link  # but for the first chunk
    hidden.update({name: us / max(work.chunks, 1) for name, us in hidden.items()})
    for name, us in (*beside.items(), *link.items()):
        total[name] = total.get(name, 0.0) + us
    total[LINK] = max(0.0, total[LINK] - parameters.burst_bytes * parameters.link_us_per_byte)
    return {name: us for name, us in total.items() if us}


def time_us(algorithm: str, size_bytes: float, scale: Scale, parameters: Parameters) -> float:
    """Returns the time of an algorithm in microseconds; arguments as of :func:`terms`."""
    return sum(terms(algorithm, size_bytes, scale, parameters).values())


def lower_bound_us(size_bytes: float, scale: Scale, parameters: Parameters) -> float:
    """Returns what no all-reduce can beat on these machines and this network.

    The largest of (after Chan et al., "Collective communication: theory, practice, and experience", 2007,
    section 4): the latencies of the best of all schemes in which everybody speaks with k others at a time;
    2(m-1)/m of the size on each machine's link; every byte of every rank's array read and written once.
    """
    p, m = parameters, scale.machines
    if scale.ranks == 1:
        return 0.0
    fan_outs = {1 << k for k in range(m.bit_length()) if 1 << k < m} | ({m - 1} if m > 1 else set())
    latency = min((_rounds(m, k) * (p.latency_us + 2 * k * p.message_us) for k in fan_outs), default=0.0)
    local = p.arrival_us if scale.ranks_per_machine > 1 else 0.0
    link = 2 * (m - 1) / m * size_bytes * p.link_us_per_byte
    return max(latency + local, link, _ranks_on_core(p, scale) * size_bytes * p.copy_us_per_byte)


def _rounds(machines: int, peers: int) -> int:
    """Returns the rounds after which all have heard of all, where each hears of ``peers`` more in each."""
    rounds, heard = 0, 1
    while heard < machines:
        heard *= peers + 1
        rounds += 1
    return rounds


@dataclass(frozen=True, slots=True)
class Prediction:
    """An operation by one algorithm.

    Attributes:
        algorithm: its name.
        size_bytes: its size.
        scale: where the ranks are.
        time_us: how long it takes.
        efficiency: the time that no all-reduce can beat, over this one's.
        limit: the largest term.
    """

    algorithm: str
    size_bytes: int
    scale: Scale
    time_us: float
    efficiency: float
    limit: str


def predict(algorithm: str, size_bytes: int, scale: Scale, parameters: Parameters) -> Prediction:
    """Returns what the model says of an algorithm."""
    parts = terms(algorithm, size_bytes, scale, parameters)
    total = sum(parts.values())
    efficiency = lower_bound_us(size_bytes, scale, parameters) / total if total else 1.0
    limit = max(parts, key=lambda name: parts[name], default="nothing")
    return Prediction(algorithm, size_bytes, scale, total, efficiency, limit)


def predictions(size_bytes: int, scale: Scale, parameters: Parameters) -> list[Prediction]:
    """Returns what the model says of all algorithms of an all-reduce that exist at a scale."""
    return [predict(name, size_bytes, scale, parameters) for name in ALL_REDUCES if is_possible(name, scale)]


def predict_host(size_bytes: int, scale: Scale, parameters: Parameters) -> Prediction:
    """Returns what the model says of an all-reduce of the host backend."""
    return predict(host_algorithm("all_reduce", size_bytes, scale), size_bytes, scale, parameters)


@dataclass(frozen=True, slots=True)
class ScalingEnd:
    """Where an algorithm stops scaling at one size.

    Attributes:
        algorithm: its name.
        size_bytes: the size.
        doubles: where its time is twice that with two machines; ``None`` where it is not on any scale.
        inefficient: where its efficiency is below one half for good; ``None`` where it is not on any scale.
        limit: the largest term on the largest scale.
    """

    algorithm: str
    size_bytes: int
    doubles: Scale | None
    inefficient: Scale | None
    limit: str


def scales_up_to(ranks: int, ranks_per_machine: int) -> list[Scale]:
    """Returns one machine, two, four and so on, and the largest number of machines for so many ranks."""
    most = max(1, ranks // ranks_per_machine)
    powers = (1 << k for k in range(most.bit_length()))
    return [Scale(number, ranks_per_machine) for number in dict.fromkeys([*powers, most])]


def scaling_end(
    algorithm: str, size_bytes: int, scales: Sequence[Scale], parameters: Parameters
) -> ScalingEnd:
    """Returns where an algorithm stops scaling, of scales in ascending order.

    The time is compared with that on the first scale that has two machines or more.
    """
    possible = [scale for scale in scales if scale.machines > 1 and is_possible(algorithm, scale)]
    if not possible:
        raise ValueError(f"{algorithm} does not exist on any of {len(scales)} scales with several machines")
    found = [predict(algorithm, size_bytes, scale, parameters) for scale in possible]
    doubles = next((each.scale for each in found if each.time_us >= 2 * found[0].time_us), None)
    inefficient = None
    for each in reversed(found):
        if each.efficiency >= 0.5:
            break
        inefficient = each.scale
    return ScalingEnd(algorithm, size_bytes, doubles, inefficient, found[-1].limit)


def scaling_ends(
    sizes: Sequence[int], scales: Sequence[Scale], parameters: Parameters
) -> Iterator[ScalingEnd]:
    """Yields where each algorithm stops scaling, by size."""
    for size in sizes:
        for name in ALL_REDUCES:
            if any(scale.machines > 1 and is_possible(name, scale) for scale in scales):
                yield scaling_end(name, size, scales, parameters)
