"""What became slower or faster between two runs of a program that times calls?

The files are JSON reports of ``collectives bench allreduce``, ``collectives``, ``ddp`` or ``store``, both of
the same kind. Each point, such as an operation by a peer with some ranks at some size, has one or more times.
A time is slower where its median lies above the ninetieth percentile of the old run, and the old median below
the tenth percentile of the new one; faster the other way round. What lies closer is noise. A machine that was
busy during one run makes everything slower, peers of other libraries too: look at those first, and better let
both runs alternate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives.bench.comparison.records import KINDS
from collectives.bench.core.arguments import failing_as_command, parse_names
from collectives.bench.core.records import SCHEMA, Column, Timing
from collectives.bench.core.text import table_lines

Point = tuple[Any, ...]
"""What two records are compared by: the values of their kind's fields."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How reports of some programs are compared.

    Attributes:
        programs: their names in reports.
        shown: fields that tell points apart, by their headings.
        times: fields that hold times.
        unshown: further fields that tell points apart.
        split: makes records with such fields of one record.
    """

    programs: tuple[str, ...]
    shown: Mapping[str, str]
    times: tuple[str, ...]
    unshown: tuple[str, ...] = ()
    split: Callable[[dict[str, Any]], Iterable[Mapping[str, Any]]] = lambda record: (record,)


def _stores(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a record for each store: a round's calls in a second as the mean time of a call."""
    for store, rates in record["rounds"].items():
        timing = Timing.of([[1e9 / rate for rate in rates]])
        yield {**record, "store": store, "call": {name: getattr(timing, name) for name in Timing.__slots__}}


_COMPARISON = _Kind(
    ("allreduce", "collectives", "demo"),
    {"operation": "operation", "peer": "peer", "ranks": "ranks", "size_bytes": "size (B)"},
    KINDS,
    ("dtype", "redop", "in_place", "device"),
)
_TRAINING = _Kind(
    ("ddp",),
    {"model": "model", "peer": "peer", "ranks": "ranks", "batch": "batch", "length": "length"},
    ("iteration", "forward", "backward", "step"),
)
_STORE = _Kind(
    ("store",), {"server": "server", "operation": "operation", "store": "store"}, ("call",), split=_stores
)
_KIND_OF = {name: kind for kind in (_COMPARISON, _TRAINING, _STORE) for name in kind.programs}


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as its file has it.

    Attributes:
        program: name of the program.
        environment: machine and versions.
        options: what the program was asked to do.
        times: of each point, by their names.
    """

    program: str
    environment: Mapping[str, Any]
    options: Mapping[str, Any]
    times: Mapping[Point, Mapping[str, Timing]]


@dataclass(frozen=True, slots=True)
class Change:
    """One time of one point in both runs.

    Attributes:
        point: the values that tell it apart; those that are shown come first.
        time: name of the time.
        old: that time in the old run.
        new: in the new one.
    """

    point: Point
    time: str
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
        metavar="KIND,...",
        help=f"times to compare: of all-reduces {', '.join(KINDS)}, of ddp {', '.join(_TRAINING.times)} "
        "(default: all)",
    )
    parser.add_argument("--all", action="store_true", help="show what did not change, too")


def read_run(path: Path) -> Run:
    """Returns the run whose report a JSON file holds.

    Args:
        path: of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, or has another schema.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        program, schema = plain["program"], plain["schema"]
        if schema == SCHEMA and program in _KIND_OF:
            kind = _KIND_OF[program]
            records = [one for record in plain["records"] for one in kind.split(record)]
            names = (*kind.shown, *kind.unshown)
            times = {tuple(one[name] for name in names): _times(one, kind.times) for one in records}
            return Run(program, {**plain["environment"]}, {**plain["options"]}, times)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{path} holds no report of {_programs()}: {type(error).__name__}: {error}"
        ) from error
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}, but this version reads {SCHEMA}")
    raise ValueError(f"{path} holds a report of {program!r}, but only those of {_programs()} are compared")


def changes(old: Run, new: Run, kinds: Sequence[str] | None = None) -> list[Change]:
    """Returns the times that both runs have, in the order of the new run.

    Args:
        old: the one run.
        new: the other.
        kinds: names of the times; ``None`` for all.
    """
    return [
        Change(point, name, old.times[point][name], timing)
        for point, times in new.times.items()
        for name, timing in times.items()
        if name in old.times.get(point, ()) and (kinds is None or name in kinds)
    ]


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks.

    Args:
        arguments: as :func:`add_arguments` describes them.

    Returns:
        The exit status: 1 where something is slower, else 0.

    Raises:
        CommandError: a file cannot be read or holds something else, the runs are of different kinds or have
            nothing in common, or there is no such time.
    """
    with failing_as_command(OSError, ValueError):
        old, new = read_run(arguments.old), read_run(arguments.new)
        kind = _KIND_OF[old.program]
        if _KIND_OF[new.program] is not kind:
            raise ValueError(
                f"{arguments.old} holds a report of {old.program!r}, "
                f"but {arguments.new} one of {new.program!r}"
            )
        unknown = [name for name in arguments.kinds or () if name not in kind.times]
        if unknown:
            raise ValueError(f"unknown times {', '.join(unknown)}; known are {', '.join(kind.times)}")
        found = changes(old, new, arguments.kinds)
        if not found:
            what = ", ".join(kind.shown.values())
            raise ValueError(f"{arguments.old} and {arguments.new} have no point in common ({what})")
    print("\n".join(_lines(old, new, found, everything=arguments.all)))
    return int(any(change.result == "slower" for change in found))


def _programs() -> str:
    *others, last = _KIND_OF
    return f"{', '.join(others)} or {last}"


def _times(record: Mapping[str, Any], names: Sequence[str]) -> dict[str, Timing]:
    """Returns a record's times by their names; some may not have been measured."""
    return {
        name: Timing(**{key: record[name][key] for key in Timing.__slots__})
        for name in names
        if record[name] is not None
    }


def _lines(old: Run, new: Run, found: Sequence[Change], *, everything: bool) -> Iterator[str]:
    yield from _differing_environment(old, new)
    shown = [change for change in found if everything or change.result]
    if shown:
        yield from _table(_KIND_OF[new.program], shown)
    numbers = {result: sum(c.result == result for c in found) for result in ("slower", "faster", "")}
    yield (
        f"# {len(found)} times in both runs: {numbers['slower']} slower, {numbers['faster']} faster, "
        f"{numbers['']} within noise"
    )
    for name, one, other in (("old", old, new), ("new", new, old)):
        alone = len(one.times.keys() - other.times.keys())
        if alone:
            yield f"# {alone} points are in the {name} run only"


def _table(kind: _Kind, shown: Sequence[Change]) -> Iterator[str]:
    names = [*kind.shown.values(), "time", "old (us)", "new (us)", "new/old", ""]
    rows = [_row(change, len(kind.shown)) for change in shown]
    widths = [2 + max(map(len, cells)) for cells in zip(names, *rows, strict=True)]
    # Words stand on the left, numbers on the right.
    words = [isinstance(value, str) for value in shown[0].point[: len(kind.shown)]] + [False] * 5
    yield from table_lines(
        [Column(name, "", -w if word else w) for name, w, word in zip(names, widths, words, strict=True)],
        rows,
    )


def _row(change: Change, shown: int) -> list[str]:
    return [
        *map(str, change.point[:shown]),
        change.time,
        f"{change.old.median_us:.2f}",
        f"{change.new.median_us:.2f}",
        f"{change.new.median_us / max(change.old.median_us, 1e-3):.2f}",
        change.result,
    ]


_CHANGES_ANYWAY = ("load_average_1min",)


def _differing_environment(old: Run, new: Run) -> Iterator[str]:
    """Yields what the runs do not share, of machine, versions and options."""
    for what in ("environment", "options"):
        before, now = getattr(old, what), getattr(new, what)
        for name in sorted((before.keys() | now.keys()) - set(_CHANGES_ANYWAY)):
            if before.get(name) != now.get(name):
                yield f"# differs: {name}: {before.get(name)} in the old run, {now.get(name)} in the new one"
