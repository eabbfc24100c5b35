"""What the printed reports of all programs consist of: header, tables, peers that were skipped; sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from collectives.bench.core.records import BaseReport, Skipped, Table


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
