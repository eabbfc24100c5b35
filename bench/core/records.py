"""What the reports of all programs consist of, and their text; names of fields carry their units."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np

__all__ = ["BaseReport", "Chart", "Curve", "Skipped", "Table", "Timing", "curve_of", "write_json"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Values of one peer.

    Attributes:
        name: in the legend; empty for none.
        at: where the values are: numbers, or names of bars.
        values: as many.
        low: lower ends of their spread; empty where there is none.
        high: upper ends, likewise.
        look: a line (solid, dashed or dotted), which is bars where it is at names; points alone; or a
            box for all values at a name, with their mean where the curve has a name.
        color: its number among the colours; ``None`` for the curve's place in the chart.
    """

    name: str
    at: Sequence[float] | Sequence[str]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    look: Literal["solid", "dash", "dot", "points", "boxes"] = "solid"
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


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of calls, each the slowest rank's, in microseconds.

    Attributes:
        calls: how many were timed.
        median_us: median.
        p10_us: tenth percentile.
        p90_us: ninetieth percentile.
        min_us: shortest.
        mean_us: arithmetic mean, which rare long calls show in.
    """

    calls: int
    median_us: float
    p10_us: float
    p90_us: float
    min_us: float
    mean_us: float

    @classmethod
    def of(cls, ranks_ns: Sequence[Sequence[int]]) -> Timing:
        """Returns the statistics of calls.

        Args:
            ranks_ns: nanoseconds by rank, then by call; all ranks' lists have the same length.
        """
        slowest_us = np.asarray(ranks_ns, dtype=np.float64).max(axis=0) / 1e3
        p10, median, p90 = np.percentile(slowest_us, (10, 50, 90))
        ends = float(slowest_us.min()), float(slowest_us.mean())
        return cls(slowest_us.size, float(median), float(p10), float(p90), *ends)


Samples = dict[str, list[Any]]
"""What one rank measured in some calls, by name; a value for each call."""


def add_samples(kept: Sequence[Samples], new: Sequence[Samples], without: Collection[str] = ()) -> None:
    """Adds what each rank has measured to what is kept of it.

    Args:
        kept: by rank.
        new: by rank.
        without: names of what is not kept.
    """
    for mine, more in zip(kept, new, strict=True):
        for name, values in more.items():
            if name not in without:
                mine.setdefault(name, []).extend(values)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A peer that was not measured.

    Attributes:
        peer: its name.
        reason: why.
        install: the command that would add it; empty where none would.
        ranks: number of ranks of the run; ``None`` for all runs.
        operation: the only operation that it was not measured at; empty for all.
    """

    peer: str
    reason: str
    install: str = ""
    ranks: int | None = None
    operation: str = ""


_T = TypeVar("_T")
_K = TypeVar("_K")


def grouped(records: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Returns records by what a function says of each, both in their order."""
    found: dict[_K, list[_T]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def usable(
    peers: Iterable[_T], why_not: Callable[[_T], tuple[str | None, str]], skipped: list[Skipped]
) -> list[_T]:
    """Returns the peers that can be measured here, and adds the others to those that are skipped.

    Args:
        peers: whatever has a name by ``str``.
        why_not: returns why one cannot be measured, ``None`` where it can, and the command that would add it.
        skipped: of the report.
    """
    found = []
    for peer in peers:
        reason, install = why_not(peer)
        if reason is None:
            found.append(peer)
        else:
            skipped.append(Skipped(str(peer), reason, install))
    return found


def curve_of(name: str, points: Iterable[tuple[float | str, Timing]], unit_us: float = 1.0) -> Curve:
    """Returns medians as a curve, with the percentiles as their spread.

    Args:
        name: in the legend.
        points: where each time belongs.
        unit_us: microseconds of the unit that is shown.
    """
    at, times = zip(*points, strict=True)
    values, low, high = (
        [getattr(time, quantile) / unit_us for time in times]
        for quantile in ("median_us", "p10_us", "p90_us")
    )
    return Curve(name, at, values, low, high)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a report, for text and for a page.

    Attributes:
        heading: what it shows.
        columns: name and unit of each, which may have several lines.
        rows: a cell for each column.
        notes: lines below it.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


_R = TypeVar("_R")


@dataclass(slots=True)
class BaseReport(ABC, Generic[_R]):
    """All that a program found out, in records of one kind.

    Attributes:
        program: its name.
        environment: machine and versions.
        options: what the program was asked to do.
        records: measurements, in order.
        skipped: peers that were not measured.
    """

    SCHEMA: ClassVar[int] = 1
    """Version of the JSON form of a program; grows when a field changes its meaning or goes."""

    program: str
    environment: Mapping[str, Any]
    options: Mapping[str, Any]
    records: list[_R] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Returns the report as plain values."""
        return {
            "schema": self.SCHEMA,
            "program": self.program,
            "environment": dict(self.environment),
            "options": dict(self.options),
            "records": [self.record_as_json(record) for record in self.records],
            "skipped": [asdict(skipped) for skipped in self.skipped],
        }

    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """Returns the tables."""

    def reading(self) -> Sequence[str]:
        """Returns how to read the tables, in lines; none where that needs no words."""
        return ()

    def charts(self) -> Sequence[Chart]:
        """Returns what a page shows as curves or bars; none where the table says it all."""
        return ()

    def record_as_json(self, record: _R) -> dict[str, Any]:
        """Returns a record as plain values.

        Args:
            record: one of :attr:`records`, a dataclass.
        """
        return asdict(record)  # type: ignore[call-overload, no-any-return]


def write_json(path: Path, plain: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Writes plain values to a file and makes its directory; NaN and infinities become null.

    Args:
        path: the file; what it held is lost.
        plain: numbers, text, lists and mappings of such.
        indent: spaces before what is within something else; ``None`` for all in a line, as of many numbers.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(plain), indent=indent, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- text ----------------------------------------------------------------------------------------------


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the headings of a table, each line behind a ``#``, then its rows; numbers stand on the right."""
    heads = [*zip_longest(*(column.split("\n") for column in columns), fillvalue="")]
    widths = [max(map(len, cells)) for cells in zip(*heads, *rows, strict=True)]
    numbers = [all(cell[:1] in "-0123456789" for cell in cells) for cells in zip(*rows, strict=True)]
    for mark, cells in (*(("#", head) for head in heads), *((" ", row) for row in rows)):
        padded = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(cells, widths, numbers or [False] * len(cells), strict=True)
        )
        yield f"{mark} {'  '.join(padded)}".rstrip()


def lines_of(tables: Iterable[Table]) -> Iterator[str]:
    """Yields tables with their headings and notes, each behind an empty line."""
    for table in tables:
        yield ""
        yield f"# {table.heading}"
        yield from table_lines(table.columns, table.rows)
        yield from (f"# {note}" for note in table.notes)


def report_lines(report: BaseReport[Any]) -> Iterator[str]:
    """Yields the tables of a report, how to read them, and the peers that were skipped."""
    yield from lines_of(report.tables())
    reading = report.reading() if report.records else ()
    for lines in ([f"# {line}" for line in reading], list(skipped_lines(report.skipped))):
        yield from ["", *lines] if lines else []


def check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Checks names that a user gives.

    Args:
        what: they are of, in a word or two.
        names: those of the user.
        known: all that there are; a mapping or a tuple.

    Raises:
        ValueError: one is not known.
    """
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; known are {', '.join(known)}")


def or_dash(value: float | None, form: str) -> str:
    """Returns a number by a format, a dash where there is none."""
    return "-" if value is None else format(value, form)


def number_of_ranks(number: int) -> str:
    """Returns the number with the word for it."""
    return "1 rank" if number == 1 else f"{number} ranks"


def header_lines(report: BaseReport[Any]) -> list[str]:
    """Returns the program, the machine with its versions, and the options."""
    lines = [f"# {report.program}"]
    for title, plain in (("machine", report.environment), ("options", report.options)):
        lines.append(f"# {title}: {'; '.join(f'{name} {value}' for name, value in facts(plain).items())}")
    return lines


_UNITS_OF_NAMES = {"s": "s", "us": "us", "mb": "MB"}


def facts(plain: Mapping[str, Any]) -> dict[str, str]:
    """Returns plain values in words by their names; what was left to the program says so."""
    found = {}
    for name, value in plain.items():
        words, _, unit = name.rpartition("_")
        if unit == "bytes" and value is not None:
            found[words.replace("_", " ")] = f"{value / 2**20:.0f} MiB"
        elif unit in _UNITS_OF_NAMES and words:
            found[words.replace("_", " ")] = f"{_plain(value)} {_UNITS_OF_NAMES[unit]}"
        else:
            found[name.replace("_", " ")] = _plain(value)
    return found


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} is {one}" for name, one in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        shown = value if len(value) <= 12 else [value[0], "...", value[-1]]
        return ",".join(map(str, shown)) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "auto" if value is None else str(value)


def network_of(options: Mapping[str, Any]) -> list[str]:
    """Returns how many machines took part, and the speed of their links, for titles; nothing for one."""
    machines, link = options.get("machines", 1), options.get("link")
    if machines == 1:
        return []
    return [f"{machines} machines", f"links of {link}"] if link else [f"{machines} machines"]


def made_with(environment: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Returns machines and versions of a report in a line."""
    versions = ", ".join(f"{name} {environment[name]}" for name in ("collectives", "torch", "python"))
    machine = [environment["cpu"], f"{environment['cores_usable']} cores", *network_of(options)]
    return f"{', '.join(machine)}; {versions}"


def skipped_facts(entry: Skipped) -> tuple[str, str]:
    """Returns what was not measured, and why."""
    run = f" at {entry.operation}" if entry.operation else ""
    run += "" if entry.ranks is None else f" with {number_of_ranks(entry.ranks)}"
    return f"{entry.peer}{run}", entry.reason


def skipped_lines(skipped: Sequence[Skipped]) -> Iterator[str]:
    """Yields why peers were not measured and what would add them."""
    for entry in skipped:
        yield f"# skipped {': '.join(skipped_facts(entry))}"
        if entry.install and entry.install not in entry.reason:
            yield f"#   to add it: {entry.install}"


_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """Returns a number of bytes given as ``"8"``, ``"64K"``, ``"4MiB"``; K, M and G are powers of 1024.

    Raises:
        ValueError: ``text`` is no such number.
    """
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number.lstrip("0123456789")
    digits = number.removesuffix(unit) if unit else number
    if not digits or unit not in _UNITS:
        raise ValueError(f"{text!r} is no size; write bytes with an optional K, M or G, such as 8, 64K or 4M")
    return int(digits) * _UNITS[unit]


def parse_sizes(text: str) -> list[int]:
    """Returns the message sizes of a sweep in bytes, ascending, each once.

    Args:
        text: sizes and ranges, separated by commas. A range is ``FIRST:LAST`` in powers of two or
            ``FIRST:LAST:FACTOR``; its end belongs to it where the steps meet it.

    Raises:
        ValueError: ``text`` cannot be read, or a range does not ascend.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        numbers = [parse_bytes(number) for number in part.split(":")]
        if len(numbers) > 3:
            raise ValueError(f"{part!r} is no range of sizes; write FIRST:LAST or FIRST:LAST:FACTOR")
        first, last, factor = [*numbers, *(numbers[0], 2)[len(numbers) - 1 :]]
        if first < 1:
            raise ValueError(f"sizes must be positive, but {text!r} holds {first}")
        if last < first or factor < 2:
            raise ValueError(f"range {part!r} must ascend, but goes from {first} to {last} by {factor}")
        while first <= last:
            sizes.add(first)
            first *= factor
    return sorted(sizes)


def format_bytes(size: int) -> str:
    """Returns a size in the largest unit that divides it, such as ``"64 KiB"``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
