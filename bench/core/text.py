"""What the printed reports of all programs consist of: header, tables, peers that were skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from collectives.bench.core.records import BaseReport, Column, Skipped, Table


def table_lines(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields the headings of a table, each line behind a ``#``, then its rows."""
    if any(column.group for column in columns):
        line = ""
        for group, members in groupby(columns, lambda column: column.group):
            width = sum(abs(column.width) for column in members)
            line += f"  {f' {group} '.center(width - 2, '-')}" if group else " " * width
        yield f"#{line}".rstrip()
    names, units = [column.name for column in columns], [column.unit for column in columns]
    for mark, cells in (("#", names), *([("#", units)] if any(units) else []), *((" ", row) for row in rows)):
        padded = (
            cell.ljust(-column.width) if column.width < 0 else cell.rjust(column.width)
            for cell, column in zip(cells, columns, strict=True)
        )
        yield (mark + "".join(padded)).rstrip()


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
    """Returns the program, the versions, the machine and the options."""
    machine = report.environment
    peers = "; ".join(f"{peer} is {version}" for peer, version in machine.get("peers", {}).items())
    versions = ", ".join(f"{name} {machine[name]}" for name in _VERSIONS)
    facts = machine_facts(machine)
    where = [f"{name} {value}" if name in _NAMED else value for name, value in facts.items()]
    options = "; ".join(f"{name} {value}" for name, value in option_facts(report.options).items())
    return [
        f"# {report.program}: {versions}",
        f"# machine: {', '.join(where)}",
        *_gpu_lines(machine),
        *([f"# peers: {peers}"] if peers else []),
        f"# options: {options}",
    ]


_VERSIONS = ("collectives", "torch", "numpy", "python")
MACHINE = {
    "host", "cpu", "cores_usable", "cores_online", "cache_last_level_bytes", "memory_bytes", "architecture",
    "system", "load_average_1min",
}  # fmt: skip
"""The facts of an environment that :func:`machine_facts` puts in words."""

_NAMED = {"last-level cache", "memory", "load"}
"""Facts that say nothing without their names."""


def machine_facts(machine: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a machine is, in words by name."""
    cache = machine["cache_last_level_bytes"]
    return {
        "host": machine["host"],
        "processor": machine["cpu"],
        "cores": f"{machine['cores_usable']} of {machine['cores_online']} cores usable",
        "last-level cache": format_bytes(cache) if cache else "unknown",
        "memory": f"{machine['memory_bytes'] / 2**30:.0f} GiB",
        "architecture": machine["architecture"],
        "system": machine["system"],
        "load": f"{machine['load_average_1min']:.1f}",
    }


def option_facts(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a program was asked to do, in words by option; those left to it say so."""
    facts = {name: _plain(value) for name, value in options.items() if name != "sizes"}
    if sizes := options.get("sizes", ()):
        facts["sizes"] = f"{sizes[0]} to {sizes[-1]} ({len(sizes)})" if len(sizes) > 8 else _plain(sizes)
    if options.get("link", "") is None:
        facts["link"] = "unshaped"
    return facts


def network_of(options: Mapping[str, Any]) -> list[str]:
    """Returns how many machines took part, and the speed of their links, for titles; nothing for one."""
    machines, link = options.get("machines", 1), options.get("link")
    if machines == 1:
        return []
    return [f"{machines} machines", f"links of {link}"] if link else [f"{machines} machines"]


def _gpu_lines(machine: Mapping[str, Any]) -> Iterator[str]:
    """Yields the GPUs that tensors are on, and how ranks share them."""
    if "gpus" not in machine:
        return
    names = ", ".join(f"{number} x {name}" for name, number in Counter(machine["gpus"]).items())
    yield f"# gpus: {names}, driver {machine['gpu_driver']}, CUDA {machine['cuda']}"
    if "gpus_shared_by_ranks" in machine:
        runs = ",".join(map(str, machine["gpus_shared_by_ranks"]))
        words = " ".join(f"{name}={value}" for name, value in machine["gpus_shared_environment"].items())
        yield f"# ranks share gpus in runs of {runs} ranks, with {words}; that tells nothing of bandwidths"


def _plain(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    return "auto" if value is None else str(value)


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
        text: sizes and ranges, separated by commas. A range is ``FIRST:LAST`` in powers of two,
            ``FIRST:LAST:FACTOR``, or ``FIRST:LAST:+STEP``; its end belongs to it where the steps meet it.

    Raises:
        ValueError: ``text`` cannot be read, or a range does not ascend.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        first, *rest = part.split(":")
        if not rest:
            sizes.add(parse_bytes(first))
            continue
        if len(rest) > 2:
            raise ValueError(
                f"{part!r} is no range of sizes; write FIRST:LAST, FIRST:LAST:FACTOR or FIRST:LAST:+STEP"
            )
        sizes.update(
            _range(part, parse_bytes(first), parse_bytes(rest[0]), rest[1] if len(rest) == 2 else "2")
        )
    if min(sizes) < 1:
        raise ValueError(f"sizes must be positive, but {text!r} holds {min(sizes)}")
    return sorted(sizes)


def _range(part: str, first: int, last: int, step: str) -> list[int]:
    if first < 1 or last < first:
        raise ValueError(f"range {part!r} must ascend from 1 or more, but goes from {first} to {last} bytes")
    adds = step.startswith("+")
    width = parse_bytes(step.removeprefix("+"))
    if width < (1 if adds else 2):
        raise ValueError(f"range {part!r} does not ascend: its {'step' if adds else 'factor'} is {width}")
    sizes = [first]
    while (following := sizes[-1] + width if adds else sizes[-1] * width) <= last:
        sizes.append(following)
    return sizes


def format_bytes(size: int) -> str:
    """Returns a size in the largest unit that divides it, such as ``"64 KiB"``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
