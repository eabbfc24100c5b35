"""Where algorithms stop scaling: pure functions over the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from collectives.bench.cost_model.host import our_algorithm
from collectives.bench.cost_model.model import ALGORITHMS, OURS, is_possible, lower_bound_us, terms, time_us
from collectives.bench.cost_model.terms import Parameters, Scale

__all__ = [
    "ALL_REDUCES",
    "End",
    "Prediction",
    "best",
    "end_of",
    "ends",
    "first_scale",
    "is_ours",
    "ours",
    "predict",
    "predictions",
    "scales_up_to",
]

ALL_REDUCES = tuple(name for name in list(ALGORITHMS)[: list(ALGORITHMS).index("barrier")])
"""Names of the algorithms of an all-reduce."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """An all-reduce by one algorithm.

    Attributes:
        algorithm: its name.
        size_bytes: its size.
        scale: where the ranks are.
        time_us: how long it takes.
        efficiency: the time that no algorithm can beat, over this one's.
        limit: the largest term.
    """

    algorithm: str
    size_bytes: int
    scale: Scale
    time_us: float
    efficiency: float
    limit: str


@dataclass(frozen=True, slots=True)
class End:
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
    machines = [1]
    while machines[-1] * 2 < most:
        machines.append(machines[-1] * 2)
    return [Scale(number, ranks_per_machine) for number in dict.fromkeys([*machines, most])]


def predict(algorithm: str, size_bytes: int, scale: Scale, parameters: Parameters) -> Prediction:
    """Returns what the model says of an algorithm."""
    parts = terms(algorithm, size_bytes, scale, parameters)
    total = sum(parts.values())
    efficiency = lower_bound_us(size_bytes, scale, parameters) / total if total else 1.0
    limit = max(parts, key=lambda name: parts[name]) if parts else "nothing"
    return Prediction(algorithm, size_bytes, scale, total, efficiency, limit)


def predictions(size_bytes: int, scale: Scale, parameters: Parameters) -> list[Prediction]:
    """Returns what the model says of all algorithms of an all-reduce that exist at a scale."""
    return [predict(name, size_bytes, scale, parameters) for name in ALL_REDUCES if is_possible(name, scale)]


def ours(size_bytes: int, scale: Scale, parameters: Parameters) -> Prediction:
    """Returns what the model says of the algorithm that the host backend takes."""
    return predict(our_algorithm("all_reduce", size_bytes, scale), size_bytes, scale, parameters)


def best(size_bytes: int, scale: Scale, parameters: Parameters) -> Prediction:
    """Returns the fastest algorithm of an all-reduce."""
    return min(predictions(size_bytes, scale, parameters), key=lambda each: each.time_us)


def end_of(algorithm: str, size_bytes: int, scales: Sequence[Scale], parameters: Parameters) -> End:
    """Returns where an algorithm stops scaling, of scales in ascending order.

    The time is compared with that on the first scale that has two machines or more.
    """
    possible = [scale for scale in scales if scale.machines > 1 and is_possible(algorithm, scale)]
    if not possible:
        raise ValueError(f"{algorithm} does not exist on any of {len(scales)} scales with several machines")
    first = time_us(algorithm, size_bytes, possible[0], parameters)
    found = [predict(algorithm, size_bytes, scale, parameters) for scale in possible]
    doubles = next((each.scale for each in found if each.time_us >= 2 * first), None)
    inefficient = None
    for each in reversed(found):
        if each.efficiency >= 0.5:
            break
        inefficient = each.scale
    return End(algorithm, size_bytes, doubles, inefficient, found[-1].limit)


def ends(sizes: Sequence[int], scales: Sequence[Scale], parameters: Parameters) -> Iterator[End]:
    """Yields where each algorithm stops scaling, by size."""
    for size in sizes:
        for name in ALL_REDUCES:
            if any(scale.machines > 1 and is_possible(name, scale) for scale in scales):
                yield end_of(name, size, scales, parameters)


def first_scale(scales: Sequence[Scale], quantity: Callable[[Scale], float], limit: float) -> Scale | None:
    """Returns the first scale on which a quantity is above a limit; ``None`` where it is on none."""
    return next((scale for scale in scales if quantity(scale) > limit), None)


def is_ours(algorithm: str) -> bool:
    """Returns whether the host backend has an algorithm."""
    return algorithm in OURS
