"""What a report shows as curves or bars, whatever draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Chart", "Curve"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Values of one peer.

    Attributes:
        name: in the legend.
        at: where the values are: numbers, or names of bars.
        values: as many.
        low: lower ends of their spread.
        high: upper ends.
    """

    name: str
    at: Sequence[float] | Sequence[str]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves with common axes; bars where they are at names.

    Attributes:
        title: above it.
        x: quantity and unit of the horizontal axis; may be empty for bars.
        y: of the vertical axis.
        curves: in the order of the legend.
    """

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
