"""What a report shows as curves or bars, whatever draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Chart", "Curve"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Values of one peer.

    Attributes:
        name: in the legend; empty for none.
        at: where the values are: numbers, or names of bars.
        values: as many.
        low: lower ends of their spread; empty where there is none.
        high: upper ends, likewise.
        look: a line, which is bars where it is at names; a wide one, pale below others; points alone; or a
            box for all values at a name.
        color: its number among the colours; ``None`` for the curve's place in the chart.
    """

    name: str
    at: Sequence[float] | Sequence[str]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    look: Literal["line", "dashed", "dotted", "wide", "points", "boxes"] = "line"
    color: int | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves with common axes; bars where they are at names.

    Attributes:
        title: above it.
        x: quantity and unit of the horizontal axis; may be empty for bars.
        y: of the vertical axis.
        curves: in the order of the legend.
        log: letters of the logarithmic axes; where there are names, none is.
        x_names: what stands at places of the horizontal axis, where that is not the number.
        stacked: whether bars stand on one another.
        from_zero: whether the vertical axis begins there; bars always do.
    """

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    log: Literal["xy", "x", ""] = "xy"
    x_names: Mapping[int, str] = field(default_factory=dict)
    stacked: bool = False
    from_zero: bool = False

    @property
    def names(self) -> list[str]:
        """Names that its curves are at, in order; empty where they are at numbers."""
        return list(dict.fromkeys(at for curve in self.curves for at in curve.at if isinstance(at, str)))
