"""Lists the backends, why some cannot be used here, and what they can do.

The first table tells which backends can be used on this machine. The others are made of what the backends
state, of those too that cannot be used here: the functions, the reductions of each data type, and the data
types that the other functions move: what a backend states of data types holds for all functions of a kind
alike. A column is a backend on a device type; "all" stands for all columns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from collectives.cli import CommandError
from collectives.cli.tables import Table, markdown, plain_text
from collectives.core.capabilities import OPERATIONS, REDUCING, Capabilities
from collectives.core.types import ReduceOp
from collectives.registry.backends import backend_names, backend_spec, capabilities_of, why_unavailable


@dataclass(frozen=True, slots=True)
class _Entry:
    """A backend and whether it can be used here."""

    name: str
    devices: tuple[str, ...]
    usable: bool
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help="backends to list; without, all")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--all", action="store_true", help="a line for each backend, device type, function and data type"
    )
    form.add_argument("--json", action="store_true", help="the same as --all, with the reasons, as JSON")
    form.add_argument(
        "--markdown", action="store_true", help="what the backends can do in Markdown, as in the manual"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables; returns 0 where at least one backend can be used, else 1.

    Raises:
        CommandError: a name is not known.
    """
    names: list[str] = arguments.backends or backend_names()
    try:
        entries = [_entry(name) for name in names]
    except ValueError as error:
        raise CommandError(str(error)) from error
    found = columns(entry.name for entry in entries)
    if arguments.json:
        whole = {
            "backends": [asdict(entry) for entry in entries],
            "statements": [asdict(statement) for statement in statements(found)],
        }
        print(json.dumps(whole, indent=1))
    elif arguments.all:
        print(plain_text(_every_statement(found)))
    elif arguments.markdown:
        print("\n\n".join(markdown(table) for table in short_tables(found)))
    else:
        tables = [_usability(entries), *(short_tables(found) if found else ())]
        print("\n\n".join(plain_text(table) for table in tables))
    return 0 if any(entry.usable for entry in entries) else 1


def _entry(name: str) -> _Entry:
    spec = backend_spec(name)
    reason = why_unavailable(name)
    if reason is not None and spec.install and spec.install not in reason:
        reason += f"; install with: {spec.install}"
    return _Entry(spec.name, spec.devices, reason is None, reason or "")


def _usability(entries: list[_Entry]) -> Table:
    return [
        ("backend", "devices", "usable", "reason, and what would mend it"),
        *(
            (entry.name, ", ".join(entry.devices), "yes" if entry.usable else "no", entry.reason)
            for entry in entries
        ),
    ]


def _every_statement(found: dict[str, Capabilities]) -> Table:
    rows = []
    for one in statements(found):
        answer = "no" if not one.offered else "yes" if one.reductions is None else " ".join(one.reductions)
        rows.append((one.backend, one.device, one.function, one.dtype or "", answer))
    return [("backend", "device", "function", "data type", "offered"), *rows]


# ---- what backends state -----------------------------------------------------------------------------------

REDUCTIONS = tuple(ReduceOp.__members__)
"""The names of all reductions, in the order of the tables."""

_WITHOUT_TENSORS = frozenset({"barrier"})
_YES, _NO, _EVERY = "yes", "-", "all"
_FAMILIES = (
    ("integers", tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))),
    ("sub-byte integers", tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))),
    ("float8", ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")),
    ("complex", ("complex32", "complex64", "complex128")),
    ("bits", ("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16")),
    ("quantized", ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")),
)
"""Words for data types that are treated alike by many backends, and the data types."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What a backend states about one function and one data type.

    Attributes:
        backend: its name.
        device: device type of the tensors.
        function: name of the user function.
        dtype: name of the data type, such as ``"float32"``; ``None`` for a function without tensors.
        offered: whether the function takes it.
        reductions: those that are offered; ``None`` for a function that does not compute.
        reason: why it is not offered; empty where it is.
    """

    backend: str
    device: str
    function: str
    dtype: str | None
    offered: bool
    reductions: tuple[str, ...] | None
    reason: str


def data_types() -> tuple[torch.dtype, ...]:
    """Returns all data types of the installed torch, each under its own name only."""
    return tuple(
        value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
    )


def columns(backends: Iterable[str]) -> dict[str, Capabilities]:
    """Returns the statements of backends by column; a backend that states nothing has none.

    Args:
        backends: their names.

    Raises:
        ValueError: a name is not known.
    """
    found: dict[str, Capabilities] = {}
    for name in backends:
        stated = capabilities_of(name)
        if stated is not None:
            found |= {f"{device}:{name}": stated.on(device) for device in sorted(stated.devices)}
    return found


def statements(found: Mapping[str, Capabilities]) -> Iterator[Statement]:
    """Yields the whole table, a statement for each column, function and data type."""
    for column, can in found.items():
        device, _, backend = column.partition(":")
        for function in OPERATIONS:
            if function in _WITHOUT_TENSORS:
                reason = can.why_not(function)
                yield Statement(backend, device, function, None, reason is None, None, reason or "")
                continue
            for dtype in data_types():
                reason = can.why_not(function, device=device, dtype=dtype)
                reductions = None
                if function in REDUCING:
                    names = can.reductions.get(dtype, frozenset()) if reason is None else frozenset()
                    reductions = tuple(name for name in REDUCTIONS if name in names)
                yield Statement(
                    backend, device, function, _name(dtype), reason is None, reductions, reason or ""
                )


def short_tables(found: Mapping[str, Capabilities]) -> tuple[Table, Table, Table]:
    """Returns the tables of functions, of reductions by data type, and of data types that move."""
    return _functions(found), _reductions(found), _moves(found)


def _functions(found: Mapping[str, Capabilities]) -> Table:
    """One row for functions that no backend treats differently."""

    def row(title: str, cells: Iterable[bool]) -> tuple[str, ...]:
        return title, *(_YES if cell else _NO for cell in cells)

    groups = _grouped(OPERATIONS, lambda name: tuple(name in can.operations for can in found.values()))
    rows = []
    for names in sorted(groups, key=len):
        title = ", ".join(names)
        if len(names) > len(OPERATIONS) / 2:
            title = "every function" if len(groups) == 1 else "every other function"
        rows.append(row(title, (names[0] in can.operations for can in found.values())))
    rows.append(row("parts of different sizes", (can.uneven for can in found.values())))
    rows.append(row("tags of messages", (can.tags for can in found.values())))
    return [("function", *found), *rows]


def _reductions(found: Mapping[str, Capabilities]) -> Table:
    """One row for data types, and one column for reductions, that no backend treats differently."""
    dtypes = [dtype for dtype in data_types() if any(dtype in can.reductions for can in found.values())]

    def who(dtype: torch.dtype, reduction: str) -> tuple[str, ...]:
        return tuple(
            column for column, can in found.items() if reduction in can.reductions.get(dtype, frozenset())
        )

    by_row = _grouped(dtypes, lambda dtype: tuple(who(dtype, name) for name in REDUCTIONS))
    by_column = _grouped(REDUCTIONS, lambda name: tuple(who(dtype, name) for dtype in dtypes))
    rows = [
        (_in_words(alike), *(_named(who(alike[0], names[0]), found) for names in by_column))
        for alike in by_row
    ]
    return [("reductions of", *(", ".join(names) for names in by_column)), *rows]


def _moves(found: Mapping[str, Capabilities]) -> Table:
    def who(dtype: torch.dtype) -> tuple[str, ...]:
        return tuple(column for column, can in found.items() if can.moves is None or dtype in can.moves)

    by_row = _grouped(data_types(), who)
    rows = [(_in_words(alike), _named(who(alike[0]), found)) for alike in by_row]
    return [("data moved as it is", "taken by"), *rows]


def _grouped(values: Sequence[Any], key: Any) -> list[list[Any]]:
    """Returns the values in groups of the same key, in the order of the first of each."""
    groups: dict[Any, list[Any]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return list(groups.values())


def _named(who: Sequence[str], found: Mapping[str, Capabilities]) -> str:
    missing = [column for column in found if column not in who]
    if not missing:
        return _EVERY
    if len(missing) < len(who):
        return f"{_EVERY} but {', '.join(missing)}"
    return ", ".join(who) or _NO


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_words(dtypes: Sequence[torch.dtype]) -> str:
    """Returns data types as a list of their names, or of words for those that are there as a whole."""
    if len(dtypes) == len(data_types()):
        return "every data type"
    names = [_name(dtype) for dtype in dtypes]
    known = {_name(dtype) for dtype in data_types()}
    for word, members in _FAMILIES:
        present = [member for member in members if member in known]
        if len(present) > 1 and set(present) <= set(names):
            place = min(names.index(member) for member in present)
            names[place] = word
            names = [name for name in names if name not in present]
    return ", ".join(names)
