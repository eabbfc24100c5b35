"""Lists the backends, why some cannot be used here, and what they can do.

The first table tells which backends can be used on this machine. The others are made of what the backends
state, of those too that cannot be used here: the functions, the reductions of each data type, and the data
types that the other functions move. A column is a backend on a device type; "all" stands for all columns.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from collectives.cli import CommandError
from collectives.core.capabilities import Capabilities
from collectives.registry.backends import backend_names, backend_spec, why_unavailable
from collectives.registry.capability_table import (
    Table,
    columns,
    markdown,
    plain_text,
    short_tables,
    statements,
)

__all__ = ["add_arguments", "run"]


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
    return Table(
        ("backend", "devices", "usable", "reason, and what would mend it"),
        tuple(
            (entry.name, ", ".join(entry.devices), "yes" if entry.usable else "no", entry.reason)
            for entry in entries
        ),
    )


def _every_statement(found: dict[str, Capabilities]) -> Table:
    rows = []
    for one in statements(found):
        answer = "no" if not one.offered else "yes" if one.reductions is None else " ".join(one.reductions)
        rows.append((one.backend, one.device, one.function, one.dtype or "", answer))
    return Table(("backend", "device", "function", "data type", "offered"), tuple(rows))
