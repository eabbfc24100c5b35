"""What became slower or faster between two runs of ``collectives bench allreduce`` or ``collectives``?

Each point, an operation by a peer with some ranks at some size, has its cold, hot and loop times. A time is
slower where its median lies above the ninetieth percentile of the old run, and the old median below the tenth
percentile of the new one; faster the other way round. What lies closer is noise. A machine that was busy
during one run makes everything slower, peers of other libraries too: look at those first, and better let both
runs alternate.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from collectives.bench.comparison.records import KINDS, Record, Report, read_report
from collectives.bench.core.arguments import failing_as_command, parse_names
from collectives.bench.core.records import Timing
from collectives.bench.core.text import Column, table_lines

__all__ = ["Change", "add_arguments", "changes", "run"]

Point = tuple[str, str, int, int, str, str, bool, str]
"""What two records are compared by: operation, peer, ranks, bytes, data type, reduction, place and device."""

_COLUMNS: Sequence[Column] = (
    ("operation", "", -16),
    ("peer", "", -18),
    ("ranks", "", 6),
    ("size", "(B)", 11),
    ("time", "", 6),
    ("old", "(us)", 11),
    ("new", "(us)", 11),
    ("new/old", "", 9),
    ("", "", 8),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One time of one point in both runs.

    Attributes:
        record: the point, as the new run has it.
        kind: which of its times, one of :data:`~collectives.bench.comparison.records.KINDS`.
        old: that time in the old run.
        new: in the new one.
    """

    record: Record
    kind: str
    old: Timing
    new: Timing

    @property
    def result(self) -> str:
        """``"slower"``, ``"faster"``, or nothing where the difference is no more than noise."""
        if self.new.median_us > self.old.p90_us and self.old.median_us < self.new.p10_us:
            return "slower"
        if self.new.median_us < self.old.p10_us and self.old.median_us > self.new.p90_us:
            return "faster"
        return ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser.

    Args:
        parser: of the command ``collectives bench compare``.
    """
    parser.add_argument("old", type=Path, metavar="OLD.json", help="written by --json before")
    parser.add_argument("new", type=Path, metavar="NEW.json", help="written by --json now")
    parser.add_argument(
        "--kinds",
        type=parse_names,
        default=KINDS,
        metavar="KIND,...",
        help=f"times to compare, of {', '.join(KINDS)} (default: all)",
    )
    parser.add_argument("--all", action="store_true", help="show what did not change, too")


def changes(old: Report, new: Report, kinds: Sequence[str] = KINDS) -> list[Change]:
    """Returns the times that both runs have, in the order of the new run.

    Args:
        old: the one run.
        new: the other.
        kinds: which times.
    """
    before = {_point(record): record for record in old.records}
    pairs = [(before[_point(record)], record) for record in new.records if _point(record) in before]
    return [
        Change(now, kind, then_timing, now_timing)
        for then, now in pairs
        for kind in kinds
        if (then_timing := then.timing(kind)) is not None and (now_timing := now.timing(kind)) is not None
    ]


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks.

    Args:
        arguments: as :func:`add_arguments` describes them.

    Returns:
        The exit status: 1 where something is slower, else 0.

    Raises:
        CommandError: a file cannot be read or holds something else, the runs have nothing in common, or there
            is no such time.
    """
    with failing_as_command(OSError, ValueError):
        unknown = [kind for kind in arguments.kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"unknown times {', '.join(unknown)}; known are {', '.join(KINDS)}")
        old, new = read_report(arguments.old), read_report(arguments.new)
        found = changes(old, new, arguments.kinds)
        if not found:
            files = f"{arguments.old} and {arguments.new}"
            raise ValueError(f"{files} have no operation, peer, number of ranks and size in common")
    print("\n".join(_lines(old, new, found, everything=arguments.all)))
    return int(any(change.result == "slower" for change in found))


def _point(record: Record) -> Point:
    return (
        record.operation,
        record.peer,
        record.ranks,
        record.size_bytes,
        record.dtype,
        record.redop,
        record.in_place,
        record.device,
    )


def _lines(old: Report, new: Report, found: Sequence[Change], *, everything: bool) -> Iterator[str]:
    yield from _differing_environment(old, new)
    shown = [change for change in found if everything or change.result]
    if shown:
        yield from table_lines(_COLUMNS, map(_row, shown))
    numbers = {result: sum(c.result == result for c in found) for result in ("slower", "faster", "")}
    yield (
        f"# {len(found)} times in both runs: {numbers['slower']} slower, {numbers['faster']} faster, "
        f"{numbers['']} within noise"
    )
    for name, one, other in (("old", old, new), ("new", new, old)):
        points = {_point(record) for record in other.records}
        alone = sum(_point(record) not in points for record in one.records)
        if alone:
            yield f"# {alone} points are in the {name} run only"


def _row(change: Change) -> list[str]:
    record = change.record
    return [
        record.operation,
        record.peer,
        str(record.ranks),
        str(record.size_bytes),
        change.kind,
        f"{change.old.median_us:.2f}",
        f"{change.new.median_us:.2f}",
        f"{change.new.median_us / max(change.old.median_us, 1e-3):.2f}",
        change.result,
    ]


_CHANGES_ANYWAY = ("load_average_1min",)


def _differing_environment(old: Report, new: Report) -> Iterator[str]:
    """Yields what the runs do not share, of machine, versions and options."""
    for what in ("environment", "options"):
        before, now = getattr(old, what), getattr(new, what)
        for name in sorted((before.keys() | now.keys()) - set(_CHANGES_ANYWAY)):
            if before.get(name) != now.get(name):
                yield f"# differs: {name}: {before.get(name)} in the old run, {now.get(name)} in the new one"
