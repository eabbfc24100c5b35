"""How much processor time do bytes between two machines take, beside what the kernel takes to move them?

Two ranks, which count as two machines, move the same bytes over TCP in turns: by system calls alone, in each
of :data:`WAYS`, and by operations of the ``host`` backend. Processor time is that of both ranks, with all
their threads; the kernel's share of a connection over the loopback interface is in it. An all-reduce adds
besides, so that its figure says how much more that is.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import select
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

import collectives
from collectives.bench.core.arguments import (
    add_files,
    at_least,
    conclude,
    failing_as_command,
    options_from,
    parse_sizes_argument,
    show_progress,
)
from collectives.bench.core.charts import Chart, Curve
from collectives.bench.core.groups import LOCALHOST, initialize, parent_store
from collectives.bench.core.machine import describe_machine
from collectives.bench.core.records import BaseReport
from collectives.bench.core.sizes import format_bytes
from collectives.bench.core.text import Column, table_lines
from collectives.ranks.processes import RankFailedError, SpawnedRanks, commands
from collectives.secret import provided

__all__ = ["OURS", "WAYS", "Options", "WireRecord", "WireReport", "add_arguments", "measure", "run"]

_LABEL = "COLLECTIVES_HOST_MACHINE"
_LARGE_BUFFER = 4 << 20
_BLOCK = 256 << 10
_SEVERAL = 4
_PIPE = 1 << 20
_SO_ZEROCOPY, _MSG_ZEROCOPY, _F_SETPIPE_SZ = 60, 0x4000000, 1031
"""Numbers of Linux that Python has no names for."""

Progress = Callable[[str], object]
Call = Callable[[], object]


# ---- by system calls -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wire:
    """A rank's ends of connections to the other one, and what it sends or fills.

    Attributes:
        sockets: of the connections.
        data: the bytes in memory.
        file: a file in memory with the same bytes.
    """

    sockets: Sequence[socket.socket]
    data: memoryview
    file: int


def _send(wire: _Wire) -> None:
    wire.sockets[0].sendall(wire.data)


def _fill(end: socket.socket, into: memoryview) -> None:
    while into:
        got = end.recv_into(into, 0, socket.MSG_WAITALL)
        if got == 0:
            raise EOFError("the other rank has closed the connection")
        into = into[got:]


def _receive(wire: _Wire) -> None:
    _fill(wire.sockets[0], wire.data)


def _blocks(wire: _Wire) -> Iterator[tuple[socket.socket, memoryview]]:
    for number, begin in enumerate(range(0, len(wire.data), _BLOCK)):
        yield wire.sockets[number % len(wire.sockets)], wire.data[begin : begin + _BLOCK]


def _send_blocks(wire: _Wire) -> None:
    for end, block in _blocks(wire):
        end.sendall(block)


def _receive_blocks(wire: _Wire) -> None:
    for end, block in _blocks(wire):
        _fill(end, block)


def _send_without_copy(wire: _Wire) -> None:
    end, data, calls = wire.sockets[0], wire.data, 0
    while data:
        with suppress(OSError):  # the kernel keeps track of no more calls
            data = data[end.send(data, _MSG_ZEROCOPY) :]
            calls += 1
            continue
        if calls == 0:
            raise OSError("the kernel sends nothing from the caller's memory")
        calls -= _completions(end)
    while calls:  # until then the memory belongs to the kernel
        calls -= _completions(end)


def _completions(end: socket.socket) -> int:
    """Waits until some calls of ``send`` are done with their memory; returns how many."""
    waiting = select.poll()
    waiting.register(end, select.POLLERR)
    waiting.poll()
    found = 0
    for _, _, content in end.recvmsg(0, 512, socket.MSG_ERRQUEUE)[1]:
        first, last = struct.unpack_from("=8xII", content, 0)  # sock_extended_err: ee_info, ee_data
        found += last - first + 1
    return found


def _send_file(wire: _Wire) -> None:
    begin = 0
    while begin < len(wire.data):
        begin += os.sendfile(wire.sockets[0].fileno(), wire.file, begin, len(wire.data) - begin)


def _splice(wire: _Wire) -> None:
    out, into = os.pipe()
    try:
        fcntl.fcntl(into, _F_SETPIPE_SZ, _PIPE)
        begin = 0
        while begin < len(wire.data):
            waiting = os.splice(wire.file, into, min(_PIPE, len(wire.data) - begin), offset_src=begin)
            begin += waiting
            while waiting:
                waiting -= os.splice(out, wire.sockets[0].fileno(), waiting)
    finally:
        os.close(out)
        os.close(into)


@dataclass(frozen=True)
class _Way:
    """How bytes are moved by system calls.

    Attributes:
        send: of the first rank.
        receive: of the second.
        connections: how many.
        buffer: bytes that the kernel may hold at each end; 0 for what it finds right.
        no_copy: whether the sockets send from the caller's memory.
    """

    send: Callable[[_Wire], None] = _send
    receive: Callable[[_Wire], None] = _receive
    connections: int = 1
    buffer: int = 0
    no_copy: bool = False


WAYS: Final[Mapping[str, _Way]] = {
    "send and recv": _Way(),
    "buffers of 4 MiB": _Way(buffer=_LARGE_BUFFER),
    "blocks of 256 KiB": _Way(_send_blocks, _receive_blocks),
    "4 connections": _Way(_send_blocks, _receive_blocks, connections=_SEVERAL),
    "MSG_ZEROCOPY": _Way(_send_without_copy, no_copy=True),
    "sendfile": _Way(_send_file),
    "splice": _Way(_splice),
}
"""Ways to move bytes by system calls, by name; the last two send from a file in memory."""


def _without_bbr(end: socket.socket) -> None:
    """Takes what ``host`` takes between near machines; before it listens or connects."""
    if end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr"):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


class _Rank:
    """One rank: its ends of all connections, and its group; the first one sends.

    Args:
        rank: the rank that this process is.
        size: bytes to move.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._sent = torch.arange(size, dtype=torch.int64).to(torch.uint8)
        self._bytes = self._sent.clone() if rank == 0 else torch.zeros_like(self._sent)
        self._numbers = torch.zeros(size // 4)
        self._file = os.memfd_create("collectives wire")
        if rank == 0:
            with open(self._file, "wb", closefd=False) as file:
                file.write(self._sent.numpy().data)
        self._server = socket.socket()
        _without_bbr(self._server)
        self._server.bind((LOCALHOST, 0))
        self._server.listen()
        self._calls: dict[str, Call] = {}

    def port(self) -> int:
        """Returns where the rank can be reached."""
        return int(self._server.getsockname()[1])

    def connect(self, port: int, store: int) -> None:
        """Makes the connections and the group.

        Args:
            port: of the second rank.
            store: the port of the parent's store.
        """
        view = self._bytes.numpy().data
        for name, way in WAYS.items():
            wire = _Wire([self._end(way, port) for _ in range(way.connections)], view, self._file)
            self._calls[name] = partial(way.send if self._rank == 0 else way.receive, wire)
        os.environ[_LABEL] = f"machine {self._rank}"
        initialize(self._rank, 2, store, "host")
        self._calls["broadcast"] = partial(collectives.broadcast, self._bytes, 0)
        self._calls["all_reduce"] = partial(collectives.all_reduce, self._numbers)

    def _end(self, way: _Way, port: int) -> socket.socket:
        if self._rank == 0:
            end = socket.socket()
            _without_bbr(end)
            end.connect((LOCALHOST, port))
        else:
            end, _ = self._server.accept()  # in the order in which the other rank connects
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if way.buffer else ():
            end.setsockopt(socket.SOL_SOCKET, option, way.buffer)
        if way.no_copy:
            end.setsockopt(socket.SOL_SOCKET, _SO_ZEROCOPY, 1)
        return end

    def check(self, name: str) -> bool:
        """Moves the bytes once; returns whether they are right."""
        if self._rank == 1:
            self._bytes.zero_()
        self._numbers.fill_(1.0)
        self._calls[name]()
        if name == "all_reduce":
            return bool((self._numbers == 2).all())
        return torch.equal(self._bytes, self._sent)

    def move(self, name: str, times: int) -> tuple[int, int]:
        """Moves the bytes so often; returns the nanoseconds, and those of processors."""
        self._numbers.zero_()
        collectives.barrier()
        began, used = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(times):
            self._calls[name]()
        return time.perf_counter_ns() - began, time.process_time_ns() - used


def _body(rank: int, connection: Connection, size: int) -> None:
    about = _Rank(rank, size)
    for step, *words in commands(connection):
        connection.send(getattr(about, step)(*words))
    collectives.destroy_process_group()


OURS: Final[Mapping[str, int]] = {"broadcast": 1, "all_reduce": 2}
"""Operations of ``host`` that move the bytes between the two ranks, and how often each byte crosses."""


# ---- the measurement -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        sizes: bytes to move, each a multiple of 8.
        rounds: turns of each way, 1 or more.
        seconds: least duration of a turn.

    Raises:
        ValueError: a number is too small, or a size is no multiple of 8.
    """

    sizes: tuple[int, ...] = (64 << 20,)
    rounds: int = 5
    seconds: float = 0.3

    def __post_init__(self) -> None:
        for size in self.sizes:
            if size < 8 or size % 8:
                raise ValueError(f"sizes must be multiples of 8 bytes, but one is {size}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be 1 or more, but is {self.rounds}")
        if not 0 < self.seconds < 3600:
            raise ValueError(f"seconds must be more than 0 and less than 3600, but is {self.seconds}")


@dataclass(frozen=True, slots=True)
class WireRecord:
    """One way to move bytes of one size.

    Attributes:
        size_bytes: how many.
        way: its name, of :data:`WAYS` or :data:`OURS`.
        cpu_ms_per_gb: milliseconds of processors that both ranks take for a gigabyte, by round.
        sender_share: which part of them the first rank takes.
        gb_per_s: gigabytes that cross in a second; median of the rounds.
        over_kernel: processor time as a multiple of what the best of the system calls takes.
        right: whether the bytes arrived.
    """

    size_bytes: int
    way: str
    cpu_ms_per_gb: tuple[float, ...]
    sender_share: float
    gb_per_s: float
    over_kernel: float
    right: bool

    @property
    def cpu(self) -> float:
        """Milliseconds of processors for a gigabyte; median of the rounds."""
        return statistics.median(self.cpu_ms_per_gb)


class WireReport(BaseReport[WireRecord]):
    """All that the program found out."""

    def record_as_json(self, record: WireRecord) -> dict[str, Any]:
        """Returns a record as plain values."""
        return {**asdict(record), "cpu_ms_per_gb_median": record.cpu}

    def charts(self) -> Sequence[Chart]:
        """Returns the processor time of all ways, for each size."""
        return [
            Chart(f"{format_bytes(size)} over TCP", "", "ms of processors for a GB", [self._curve(size)])
            for size in dict.fromkeys(record.size_bytes for record in self.records)
        ]

    def _curve(self, size: int) -> Curve:
        records = [record for record in self.records if record.size_bytes == size]
        return Curve(
            "both ranks",
            [record.way for record in records],
            [record.cpu for record in records],
            [min(record.cpu_ms_per_gb) for record in records],
            [max(record.cpu_ms_per_gb) for record in records],
        )


@dataclass
class _Turns:
    """What the turns of one way took; a turn is nanoseconds and those of processors, by rank, for a byte."""

    crossings: int
    times: int = 1
    right: bool = True
    wall: list[float] = field(default_factory=list)
    cpu: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, ranks: Sequence[tuple[int, int]], size: int) -> None:
        moved = self.times * self.crossings * size
        self.wall.append(max(wall for wall, _ in ranks) / moved)
        self.cpu.append(tuple(used / moved for _, used in ranks))


def measure(options: Options, progress: Progress | None = None) -> WireReport:
    """Runs the measurement and returns its report.

    Args:
        options: what is measured.
        progress: called with a short line from time to time.

    Raises:
        RankFailedError: a rank failed.
    """
    say = progress or (lambda _: None)
    report = WireReport("wire", describe_machine(), asdict(options))
    for size in options.sizes:
        with provided(), closing(parent_store()) as store, SpawnedRanks(2, _body, (size,)) as ranks:
            _, port = ranks.ask(("port",))
            ranks.ask(("connect", port, store.port))
            turns = {
                name: _Turns(crossings) for name, crossings in {**dict.fromkeys(WAYS, 1), **OURS}.items()
            }
            for name, turn in turns.items():
                turn.right = all(ranks.ask(("check", name)))
                once = max(wall for wall, _ in ranks.ask(("move", name, 2))) / 2e9
                turn.times = max(1, math.ceil(options.seconds / once))
            for number in range(options.rounds):
                say(f"{format_bytes(size)}: round {number + 1} of {options.rounds}")
                for name, turn in turns.items():
                    turn.add(ranks.ask(("move", name, turn.times)), size)
        report.records += _records(size, turns)
    return report


def _records(size: int, turns: Mapping[str, _Turns]) -> Iterator[WireRecord]:
    medians = {name: statistics.median(map(sum, turn.cpu)) for name, turn in turns.items()}
    best = min(medians[name] for name in WAYS)
    for name, turn in turns.items():
        yield WireRecord(
            size,
            name,
            tuple(sum(ranks) * 1e3 for ranks in turn.cpu),
            sum(ranks[0] for ranks in turn.cpu) / sum(map(sum, turn.cpu)),
            1 / statistics.median(turn.wall),
            medians[name] / best,
            turn.right,
        )


# ---- the program ---------------------------------------------------------------------------------------


_COLUMNS: Sequence[Column] = (
    ("size", "", -9),
    ("way", "", -18),
    ("processors", "ms/GB", 11),
    ("sender", "%", 7),
    ("crosses", "GB/s", 8),
    ("over best", "", 10),
    ("right", "", 6),
)


def _report_lines(report: WireReport) -> Iterator[str]:
    """Yields the lines of the report's table."""
    rows = (
        (
            format_bytes(record.size_bytes),
            record.way,
            f"{record.cpu:.0f}",
            f"{record.sender_share * 100:.0f}",
            f"{record.gb_per_s:.2f}",
            f"{record.over_kernel:.2f}",
            "yes" if record.right else "no",
        )
        for record in report.records
    )
    yield from table_lines(_COLUMNS, rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    parser.add_argument(
        "--sizes",
        type=parse_sizes_argument,
        default=Options().sizes,
        metavar="SIZES",
        help="bytes to move, such as 1M,64M (default: 64M)",
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=5, metavar="N", help="turns of each way (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, metavar="S", help="least time of a turn (default: %(default)s)"
    )
    add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; returns 1 where bytes arrived wrong.

    Raises:
        CommandError: the arguments do not fit together, or a rank failed.
    """
    options = options_from(Options, arguments)
    with failing_as_command(RankFailedError):
        report = measure(options, show_progress)
    return conclude(report, _report_lines(report), lambda record: record.right, arguments)
