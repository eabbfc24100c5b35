"""How many calls of a key/value store does one client make in a second, beside ``torch.distributed``'s?

Two stores, ``collectives`` (:class:`collectives.TCPStore`) and ``torch``
(:class:`torch.distributed.TCPStore`), each with a server and a client of its own, take turns at every
operation; the figure is the median of the rounds. The server runs in the client's process (``here``), on its
own thread, or in another one (``process``).

What the calls promise is not the same: ``set`` and ``multi_set`` of torch return when the request is handed
to the kernel, those of collectives when the server has carried it out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from torch._C import _distributed_c10d as c10d

from collectives.bench.core.arguments import (
    Progress,
    add_files,
    add_options,
    at_least,
    option,
    parse_names,
    run_measurement,
    silent,
)
from collectives.bench.core.devices import describe_machine
from collectives.bench.core.ranks import LOCALHOST, TIMEOUT
from collectives.bench.core.records import BaseReport, Chart, Curve, Table, check_known, grouped
from collectives.ranks.processes import SpawnedRanks
from collectives.secret import provided
from collectives.store import TCPStore

_KINDS: dict[str, type[Any]] = {"collectives": TCPStore, "torch": c10d.TCPStore}
SERVERS = ("here", "process")
_KEYS = [f"key {i}" for i in range(16)]
_VALUES = [f"value {i}".ljust(32) for i in range(16)]
_FEW = 20
"""Calls that are made before the clock is looked at again."""


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "set": lambda store: store.set("key", _VALUES[0]),
    "get": lambda store: store.get(_KEYS[0]),
    "add": lambda store: store.add("sum", 1),
    "check": lambda store: store.check(_KEYS[:1]),
    "multi_set": lambda store: store.multi_set(_KEYS, _VALUES),
    "multi_get": lambda store: store.multi_get(_KEYS),
    "compare_set": lambda store: store.compare_set(_KEYS[0], _VALUES[0], _VALUES[0]),
    "wait": lambda store: store.wait(_KEYS[:1]),
}
"""One call of each; of 16 keys in the operations on many, with values of 32 bytes. The keys are there."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        operations: names of operations.
        servers: where the servers run: ``here``, ``process``.
        rounds: turns of each store at an operation, 1 or more.
        seconds: least duration of a turn.

    Raises:
        ValueError: a name is not known, or a number is too small.
    """

    operations: tuple[str, ...] = option(
        tuple(OPERATIONS), "--operations", type=parse_names, metavar="NAME,..."
    )
    servers: tuple[str, ...] = option(SERVERS, "--servers", type=parse_names, metavar="NAME,...")
    rounds: int = option(5, "--rounds", type=at_least(1), metavar="N")
    seconds: float = option(0.2, "--seconds", type=float, metavar="S")

    def __post_init__(self) -> None:
        check_known("operation", self.operations, OPERATIONS)
        check_known("place of a server", self.servers, SERVERS)
        if not 0 < self.seconds < 3600:
            raise ValueError(f"seconds must be more than 0 and less than 3600, but is {self.seconds}")


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """One operation at one place of the servers.

    Attributes:
        server: where they run.
        operation: its name.
        calls_per_s: median of the rounds, by store.
        rounds: every round's figure, by store, in their order.
        right: whether the stores held afterwards what the calls had to leave there.
    """

    server: str
    operation: str
    calls_per_s: dict[str, float]
    rounds: dict[str, list[float]]
    right: bool

    @property
    def over_torch(self) -> float:
        """How many times as many calls as torch's the store of collectives makes."""
        return self.calls_per_s["collectives"] / self.calls_per_s["torch"]


class StoreReport(BaseReport[StoreRecord]):
    """All that the program found out."""

    def record_as_json(self, record: StoreRecord) -> dict[str, Any]:
        """Returns a record as plain values."""
        return {**asdict(record), "over_torch": record.over_torch}

    def tables(self) -> Sequence[Table]:
        """Returns all records in a table."""
        columns = ("server", "operation", *(f"{store}\n(calls/s)" for store in _KINDS), "ratio", "right")
        rows = [
            (
                record.server,
                record.operation,
                *(f"{record.calls_per_s[store]:.0f}" for store in _KINDS),
                f"{record.over_torch:.2f}",
                "yes" if record.right else "no",
            )
            for record in self.records
        ]
        return [Table("calls by a client, median of the rounds", columns, rows)]

    def charts(self) -> Sequence[Chart]:
        """Returns the calls in a second of both stores, for each place of the servers."""
        charts = []
        for server, records in grouped(self.records, lambda record: record.server).items():
            curves = [
                Curve(
                    store,
                    [record.operation for record in records],
                    [record.calls_per_s[store] for record in records],
                    [min(record.rounds[store]) for record in records],
                    [max(record.rounds[store]) for record in records],
                )
                for store in _KINDS
            ]
            charts.append(Chart(f"server: {server}", "", "calls/s, median and range", curves))
        return charts


class _Counted:
    """A store, and how often the counter was added to."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.added = 0
        store.multi_set(_KEYS, _VALUES)
        store.set("key", "")

    def rate(self, operation: str, seconds: float) -> float:
        """Returns the calls in a second, over at least so many seconds."""
        call, store, calls = OPERATIONS[operation], self.store, 0
        began = time.perf_counter()
        while True:
            for _ in range(_FEW):
                call(store)
            calls += _FEW
            took = time.perf_counter() - began
            if took >= seconds:
                break
        self.added += calls if operation == "add" else 0
        return calls / took

    def right(self) -> bool:
        """Returns whether the store holds what it must."""
        held = [value.decode() for value in self.store.multi_get(_KEYS)]
        return held == _VALUES and self.store.add("sum", 0) == self.added


def measure(options: Options, say: Progress = silent) -> StoreReport:
    """Runs the measurement and returns its report.

    Args:
        options: what is measured.
        say: called with a short line from time to time.

    Raises:
        RankFailedError: the process of the servers failed.
    """
    report = StoreReport("store", describe_machine(), asdict(options))
    for server in options.servers:
        with provided(), ExitStack() as stack:
            stores = _stores(server, stack)
            for operation in options.operations:
                rounds: dict[str, list[float]] = {name: [] for name in stores}
                for turn in range(options.rounds):
                    say(f"server {server}: {operation} ({turn + 1} of {options.rounds})")
                    for name, counted in stores.items():
                        rounds[name].append(counted.rate(operation, options.seconds))
                right = all(counted.right() for counted in stores.values())
                medians = {name: statistics.median(rates) for name, rates in rounds.items()}
                report.records.append(StoreRecord(server, operation, medians, rounds, right))
    return report


def _stores(server: str, stack: ExitStack) -> dict[str, _Counted]:
    """Returns the clients by name; they and their servers end with the stack."""
    if server == "here":
        stores = {name: _serve(kind) for name, kind in _KINDS.items()}
    else:
        (ports,) = stack.enter_context(SpawnedRanks(1, _serve_all)).gather()
        stores = {
            name: kind(LOCALHOST, ports[name], timeout=TIMEOUT, wait_for_workers=False)
            for name, kind in _KINDS.items()
        }
    stack.callback(stores["collectives"].close)
    return {name: _Counted(store) for name, store in stores.items()}


def _serve(kind: type[Any]) -> Any:
    return kind(LOCALHOST, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)


def _serve_all(rank: int, connection: Connection) -> None:  # noqa: ARG001 - the body of a rank
    """Body of the servers' process: tells their ports, and serves until the parent closes."""
    stores = {name: _serve(kind) for name, kind in _KINDS.items()}
    connection.send({name: store.port for name, store in stores.items()})
    connection.poll(None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    add_options(parser, Options)
    add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 1 where a store held something wrong.

    Raises:
        CommandError: the arguments do not fit together, or the servers' process failed.
    """
    return run_measurement(Options, measure, lambda record: record.right, arguments)
