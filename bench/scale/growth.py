"""Which law a count follows as worlds grow: the simplest that fits what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Growth", "World", "growth_of"]

_CLOSE = 0.05
"""A law fits where its values differ from those measured by less than this part of their mean."""

_VISIBLE = 0.01
"""A term is shown where it makes at least this part of the largest value."""


@dataclass(frozen=True, slots=True)
class World:
    """Machines with equally many ranks.

    Attributes:
        machines: their number.
        local: ranks of each.

    Raises:
        ValueError: there are fewer than two ranks.
    """

    machines: int
    local: int

    def __post_init__(self) -> None:
        if min(self.machines, self.local) < 1 or self.size < 2:
            raise ValueError(f"a world of {self} has fewer than 2 ranks")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.machines * self.local

    def __str__(self) -> str:
        return f"{self.machines}x{self.local}"


@dataclass(frozen=True, slots=True)
class Growth:
    """A law, and what it comes to.

    Attributes:
        law: its name, of :data:`LAWS`.
        formula: it with its numbers; ``n`` ranks are ``m`` machines with ``r`` ranks each.
        error: how far it is from what was measured: root of the mean square over the mean.
    """

    law: str
    formula: str
    error: float

    def __str__(self) -> str:
        return self.formula if self.error <= _CLOSE else f"{self.formula} (+-{self.error:.0%})"


_Terms = dict[str, Callable[[World], float]]

_M: _Terms = {"m": lambda world: world.machines}
_R: _Terms = {"r": lambda world: world.local}
LAWS: dict[str, _Terms] = {
    "constant": {},
    "log n": {"log2 n": lambda world: math.log2(world.size)},
    "machines": _M,
    "ranks of a machine": _R,
    "machines + ranks of a machine": {**_M, **_R},
    "n": {"n": lambda world: world.size},
    "n log n": {"n log2 n": lambda world: world.size * math.log2(world.size)},
    "n^2": {"n^2": lambda world: world.size**2},
}
"""By name, from slow growth to fast: the terms that are added to a constant."""


def growth_of(worlds: Sequence[World], values: Sequence[float]) -> Growth | None:
    """Returns the first law that fits; where none does, the one that comes closest.

    Args:
        worlds: where it was measured.
        values: what was measured there, 0 or more.

    Returns:
        The law; ``None`` for fewer than three worlds, which any law of two numbers fits.
    """
    if len(set(worlds)) < 3:
        return None
    found = [
        fitted
        for law, terms in LAWS.items()
        if len(set(worlds)) > len(terms) + 1 and (fitted := _fitted(law, terms, worlds, values)) is not None
    ]
    close = [one for one in found if one.error <= _CLOSE]
    return close[0] if close else min(found, key=lambda one: one.error)


def _fitted(law: str, terms: _Terms, worlds: Sequence[World], values: Sequence[float]) -> Growth | None:
    """Returns a law with the numbers that fit best; ``None`` where a term would have to shrink."""
    columns = np.array([[1.0, *(term(world) for term in terms.values())] for world in worlds])
    wanted = np.asarray(values, dtype=np.float64)
    numbers, *_ = np.linalg.lstsq(columns, wanted, rcond=None)
    if any(number < 0 for number in numbers[1:]):
        return None
    mean = wanted.mean()
    error = 0.0 if mean == 0 else float(np.sqrt(np.mean((columns @ numbers - wanted) ** 2)) / mean)
    largest = columns.max(axis=0) * np.abs(numbers)
    shown = [
        f"{number:.3g}{name and ' ' + name}"
        for number, name, size in zip(numbers, ("", *terms), largest, strict=True)
        if size >= _VISIBLE * wanted.max() and size > 0
    ]
    return Growth(law, " + ".join(shown).replace("+ -", "- ") or "0", error)
