"""How long does an all-reduce take, or another collective, by backend, size and number of ranks?

Calls go through the public functions, such as ``collectives.all_reduce``. Before every call the ranks leave a
barrier together; each rank times the call with its own clock, and the slowest rank counts. Peers alternate in
batches of a few calls, so that noise of the machine meets all of them alike.

- *cold* calls rotate through buffers that were all rewritten since they were last used, as gradients are;
- *hot* calls reuse one buffer, as many benchmarks do, which flatters small and middle sizes;
- *loop* is the time of one call in a row of many without a barrier, for small sizes.

Columns and bandwidths are those of nccl-tests: size is that of the whole array, algbw = size / time,
busbw = algbw * 2(n-1)/n of an all-reduce, algbw * (n-1)/n where the array consists of a part for each
rank, in 1e9 bytes a second. ``#wrong`` counts elements over all calls and ranks that differ from a formula of
rank. ``sendrecv`` is half of a ping-pong between neighbours, all pairs at once; the root is rank 0.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed as torch_dist

import collectives
from collectives.backends.host.threads import MOST
from collectives.backends.nccl import providers
from collectives.bench import operations
from collectives.bench.core.arguments import (
    Progress,
    add_files,
    add_options,
    at_least,
    option,
    parse_counts,
    parse_names,
    parse_sizes_argument,
    positive,
    run_measurement,
    silent,
)
from collectives.bench.core.devices import DEVICES, cores_of_ranks, mpi_version, why_not_on
from collectives.bench.core.ranks import (
    Placement,
    PlacementOptions,
    SpinBarrier,
    rounds_of,
    share_of,
    without_collection,
)
from collectives.bench.core.records import (
    BaseReport,
    Chart,
    Curve,
    Samples,
    Skipped,
    Table,
    Timing,
    add_samples,
    check_known,
    curve_of,
    format_bytes,
    grouped,
    number_of_ranks,
    or_dash,
    parse_sizes,
    usable,
)
from collectives.bench.operations import (
    OPERATIONS,
    REDUCTIONS,
    ROOT,
    Operation,
    bus_factor,
    input_values,
    rounded_count,
    wanted_values,
)
from collectives.bench.peers import (
    INSTALL_MPI4PY,
    MPI4PY,
    TORCH,
    TORCH_NCCL,
    Bind,
    group_peer,
    inexactness,
    is_mpi4py,
    is_own_backend,
    mpi_peer,
    nccl_version,
    open_group,
    open_torch,
    split_name,
    threads_of,
    why_mpi_refuses,
    why_no_mpi4py,
    why_no_torch,
    why_not,
    why_torch_refuses,
)
from collectives.cli.mpi_job import usual_ranks
from collectives.ranks.cores import shares
from collectives.ranks.mpirun import Mpirun, find_mpirun, needs_mpirun
from collectives.ranks.processes import RankProcesses, commands
from collectives.registry.backends import backend_names, backend_spec, why_unavailable

DTYPES = tuple(
    sorted(
        name
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
    )
)
"""Names of torch's data types."""

SIZES = "8:64M"

ARENA_MIN_BYTES = 64 << 20
"""Memory that buffers rotate through: beyond the caches of a core on today's machines."""


SLICE_GAP_BYTES = 4096 + 64
"""Distance between two buffers: another page, and another set of the first-level cache."""


def stride(size_bytes: int) -> int:
    """Returns the distance between the beginnings of two buffers; each begins at a cache line."""
    return -(-size_bytes // 64) * 64 + SLICE_GAP_BYTES


def _parse_mpis(text: str) -> tuple[tuple[str, str], ...]:
    """Converts the argument of ``--mpi``."""
    pairs = tuple((name, folder) for name, _, folder in (part.partition("=") for part in parse_names(text)))
    if not all(name and folder for name, folder in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER,...")
    return pairs


def _parse_operations(text: str) -> tuple[str, ...]:
    """Converts the argument of ``--ops``."""
    return tuple(OPERATIONS) if text == "all" else parse_names(text)


@dataclass(frozen=True, slots=True)
class Options(PlacementOptions):
    """What is measured.

    Attributes:
        backends: names of backends; BACKEND:ALGORITHM for an all-reduce made of a backend's messages or
            broadcasts (naive, gather, ring, tree); host:clear for host without encryption between machines;
            torch:NAME for torch's functions on its backend NAME; mpi4py for plain mpi4py under mpirun (where
            none are named, nor threads, all backends usable here, and mpi4py or torch:nccl).
        ranks: numbers of ranks; one run each.
        sizes: bytes of the arrays: SIZE,... or FIRST:LAST[:FACTOR]; K, M, G; rounded up to a whole part for
            each rank.
        operations: names of the operations, or all: all_reduce, reduce, broadcast, all_gather,
            reduce_scatter, all_to_all, gather, scatter, sendrecv, barrier.
        dtype: data type.
        redop: reduction.
        in_place: whether an all-reduce reduces the user's tensor itself; the option has it reduce a copy,
            with the copy in the time.
        calls: cold and hot calls of each peer at each size (where it is not named, 5 to 200, as the budget
            allows).
        warmup: how many calls come before, not timed (where it is not named, 2 to 5, as the budget allows).
        budget_s: seconds that each run should take.
        mpis: further installations of MPI, folders with ``bin`` and ``lib``, each a peer mpi4py:NAME.
        threads: numbers of threads of a rank, each a peer host:NUMBER besides; a bound rank has an equal
            share of the cores then, and peers that need more are left out.

    Raises:
        ValueError: a backend, an MPI or an operation is not known, a size is no multiple of the element's,
            there is no such device, too little memory or too few cores, or the machines do not fit the ranks
            or the device.
    """

    backends: tuple[str, ...] | None = option(None, "--backends", type=parse_names, metavar="NAME,...")
    ranks: tuple[int, ...] = option(
        (2,), "--nproc", type=parse_counts(1), default=lambda: (usual_ranks(),), metavar="N,..."
    )
    sizes: tuple[int, ...] = option(
        tuple(parse_sizes(SIZES)), "--sizes", type=parse_sizes_argument, metavar="SIZES"
    )
    operations: tuple[str, ...] = option(("all_reduce",), "--ops", type=_parse_operations, metavar="NAME,...")
    dtype: str = option("float32", "--dtype", choices=DTYPES, metavar="TYPE")
    redop: str = option("sum", "--op", choices=REDUCTIONS)
    in_place: bool = option(True, "--out-of-place", action="store_false")
    calls: int | None = option(None, "--iters", type=at_least(1), metavar="N")
    warmup: int | None = option(None, "--warmup", type=at_least(2), metavar="N")
    budget_s: float = option(40.0, "--budget", type=positive, metavar="SECONDS")
    mpis: tuple[tuple[str, str], ...] = option((), "--mpi", type=_parse_mpis, metavar="NAME=FOLDER,...")
    threads: tuple[int, ...] = option((), "--threads", type=parse_counts(1), metavar="N,...")

    def __post_init__(self) -> None:
        for ranks in self.ranks:
            self.check_placement(ranks)
        for name in self.backends or ():
            if is_own_backend(name):
                backend_spec(split_name(name)[0])
            elif is_mpi4py(name) and name not in {MPI4PY, *(f"{MPI4PY}:{mpi}" for mpi, _ in self.mpis)}:
                raise ValueError(f"{name} names an MPI without a folder; say where it is (--mpi)")
        if max(self.threads, default=1) > MOST:
            raise ValueError(f"a rank has at most {MOST} threads, not {max(self.threads)}")
        check_known("operation", self.operations, OPERATIONS)
        for size in self.sizes:
            if size % self.item_bytes:
                raise ValueError(
                    f"size {size} is no multiple of the {self.item_bytes} bytes of a {self.dtype} element; "
                    f"begin the sizes at {self.item_bytes} or more"
                )
        for ranks in self.ranks:
            needed, available = self._memory_bytes(ranks), DEVICES[self.device].memory_per_rank_bytes(ranks)
            if needed > available:
                raise ValueError(
                    f"{ranks} ranks with tensors of {format_bytes(max(self.sizes))} need "
                    f"{ranks * needed / 2**30:.1f} GiB of memory, but {ranks * available / 2**30:.1f} GiB "
                    "are available"
                )

    def peers(self) -> tuple[str, ...] | None:
        """Returns the names of the peers; ``None`` for the usual ones."""
        threaded = tuple(f"host:{threads}" for threads in self.threads)
        return self.backends if not threaded else (*(self.backends or ()), *threaded)

    def cores_to_bind(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the cores of each rank: one, or with several threads all that there are for it.

        Args:
            ranks: number of ranks.

        Raises:
            ValueError: there are fewer cores than ranks.
        """
        one_each = tuple((core,) for core in cores_of_ranks(ranks))
        return tuple(tuple(sorted(one)) for one in shares(ranks)) if self.threads else one_each

    @property
    def item_bytes(self) -> int:
        """The size of an element."""
        size: int = getattr(torch, self.dtype).itemsize
        return size

    def largest_bytes(self, ranks: int) -> int:
        """Returns the size of the largest array of so many ranks, whole parts included.

        Args:
            ranks: number of ranks.
        """
        counts = (
            rounded_count(OPERATIONS[name], max(self.sizes), self.item_bytes, ranks)
            for name in self.operations
        )
        return self.item_bytes * max(counts)

    def buffers(self) -> int:
        """Returns the buffers that a call needs: one where all operations work in place."""
        return 1 if self.in_place and all(OPERATIONS[name].in_place for name in self.operations) else 2

    def arena_bytes(self, ranks: int) -> int:
        """Returns the memory that buffers rotate through; two calls of the largest always fit.

        Args:
            ranks: number of ranks.
        """
        return max(2 * self.buffers() * stride(self.largest_bytes(ranks)), ARENA_MIN_BYTES)

    def _memory_bytes(self, ranks: int) -> int:
        """Returns the memory of each rank's tensors."""
        parts = any(OPERATIONS[name].parts for name in self.operations)  # put together from parts
        return (2 + self.buffers() + parts) * self.largest_bytes(ranks) + self.arena_bytes(ranks)


KINDS = ("cold", "hot", "loop")
"""Names of a record's times."""


@dataclass(frozen=True, slots=True)
class Record:
    """One peer at one size.

    Attributes:
        operation: name of the operation.
        peer: name of the backend, or of what else was measured.
        ranks: number of ranks.
        size_bytes: size of the whole array (:mod:`collectives.bench.operations`); 0 of a barrier.
        count_elements: number of its elements.
        dtype: its data type.
        redop: reduction.
        in_place: whether the user's tensor was reduced itself, else a copy of it, with the copy in the time.
        cold: calls on rewritten buffers in rotation.
        cold_wrong_elements: elements that were not as the formula says, over all cold calls and ranks.
        hot: calls on one buffer, again and again.
        hot_wrong_elements: the same for the hot calls' buffer.
        loop: calls without a barrier between, of which many went into one measurement; ``None`` for larger
            sizes.
        root: the rank that is special; -1 where none is.
        device: type of the device that the tensors were on.
        host: of the hot calls, until each returned; ``None`` where the device is done by then.
    """

    operation: str
    peer: str
    ranks: int
    size_bytes: int
    count_elements: int
    dtype: str
    redop: str
    in_place: bool
    cold: Timing
    cold_wrong_elements: int
    hot: Timing
    hot_wrong_elements: int
    loop: Timing | None = None
    root: int = -1
    device: str = "cpu"
    host: Timing | None = None

    def algbw_gb_per_s(self, timing: Timing) -> float:
        """Returns size over the median time, in 1e9 bytes a second."""
        return self.size_bytes / timing.median_us / 1e3

    def busbw_gb_per_s(self, timing: Timing) -> float | None:
        """Returns algorithm bandwidth times :func:`bus_factor`; ``None`` where nothing is communicated."""
        factor = bus_factor(self.operation, self.ranks)
        return None if factor is None else self.algbw_gb_per_s(timing) * factor

    @property
    def wrong_elements(self) -> int:
        """Wrong elements of all calls."""
        return self.cold_wrong_elements + self.hot_wrong_elements

    def as_json(self) -> dict[str, Any]:
        """Returns the fields and the bandwidths as plain values."""
        plain = asdict(self)
        for name, timing in (("cold", self.cold), ("hot", self.hot)):
            plain[name]["algbw_gb_per_s"] = self.algbw_gb_per_s(timing)
            plain[name]["busbw_gb_per_s"] = self.busbw_gb_per_s(timing)
        return plain


class Report(BaseReport[Record]):
    """All that a comparison of peers found out."""

    SCHEMA = 2

    def record_as_json(self, record: Record) -> dict[str, Any]:
        """Returns a record as plain values, with its bandwidths."""
        return record.as_json()

    def tables(self) -> Sequence[Table]:
        """Returns a table of each peer, then the peers side by side, by number of ranks and operation."""
        ascending = sorted(self.records, key=lambda record: record.ranks)
        versions = self.environment.get("peers", {})
        tables = []
        for run in grouped(ascending, lambda record: (record.ranks, record.operation)).values():
            peers = grouped(run, lambda record: record.peer)
            tables += [_peer_table(records, versions.get(peer, "")) for peer, records in peers.items()]
            tables += [_comparison(peers, kind) for kind in KINDS if len(peers) > 1]
        return [table for table in tables if table.rows]

    def reading(self) -> Sequence[str]:
        """Returns what the groups of columns are."""
        return ("cold: rewritten, rotated buffers; hot: same buffer.",)

    def charts(self) -> Sequence[Chart]:
        """Returns cold times and bus bandwidths over size, for each operation; a barrier has no size."""
        charts = []
        sized = [record for record in self.records if record.size_bytes]
        for operation, chosen in grouped(sized, lambda record: record.operation).items():
            runs = list(dict.fromkeys(record.ranks for record in chosen))
            ascending = sorted({record.size_bytes for record in chosen})
            names = {size: format_bytes(size) for size in ascending[:: -(-len(ascending) // MOST_NAMES)]}
            times, rates = [], []
            for color, peer in enumerate(dict.fromkeys(record.peer for record in chosen)):
                for ranks, look in zip(runs, cycle(_LOOKS)):
                    line = [one for one in chosen if (one.peer, one.ranks) == (peer, ranks)]
                    if not line:
                        continue
                    name = peer if len(runs) == 1 else f"{peer}, {number_of_ranks(ranks)}"
                    time = curve_of(name, ((one.size_bytes, one.cold) for one in line))
                    times.append(replace(time, look=look, color=color))
                    if ranks > 1:  # a single rank has no bandwidth
                        values = [one.busbw_gb_per_s(one.cold) or 0.0 for one in line]
                        rates.append(Curve(name, time.at, values, look=look, color=color))
            where = ", ".join([operation, *(map(number_of_ranks, runs) if len(runs) == 1 else ())])
            said = "time (us), slowest rank, median and p10 to p90"
            for y, curves in ((said, times), ("bus bandwidth (GB/s)", rates)):
                if curves:
                    charts.append(Chart(where, "size of each rank's tensor", y, curves, x_names=names))
        return charts


_LOOKS: tuple[Literal["solid", "dash", "dot"], ...] = ("solid", "dash", "dot")
"""Of curves by number of ranks."""

MOST_NAMES = 12
"""At most so many sizes are named on an axis."""


_COLUMNS: dict[str, Callable[[Record], str]] = {
    "size\n(B)": lambda record: str(record.size_bytes),
    "count\n(elements)": lambda record: str(record.count_elements),
    "type": lambda record: record.dtype,
    "redop": lambda record: record.redop,
    "root": lambda record: str(record.root),
    "cold\ntime\n(us)": lambda record: _time(record.cold),
    "cold\np10\n(us)": lambda record: _us(record.cold.p10_us),
    "cold\np90\n(us)": lambda record: _us(record.cold.p90_us),
    "cold\nmin\n(us)": lambda record: _us(record.cold.min_us),
    "cold\nalgbw\n(GB/s)": lambda record: or_dash(record.algbw_gb_per_s(record.cold), ".2f"),
    "cold\nbusbw\n(GB/s)": lambda record: or_dash(record.busbw_gb_per_s(record.cold), ".2f"),
    "cold\n#wrong": lambda record: str(record.cold_wrong_elements),
    "hot\ntime\n(us)": lambda record: _time(record.hot),
    "hot\nalgbw\n(GB/s)": lambda record: or_dash(record.algbw_gb_per_s(record.hot), ".2f"),
    "hot\nbusbw\n(GB/s)": lambda record: or_dash(record.busbw_gb_per_s(record.hot), ".2f"),
    "hot\n#wrong": lambda record: str(record.hot_wrong_elements),
    "loop\n(us)": lambda record: _time(record.loop),
}
"""The columns of a peer's table, and the cell of a record in each."""


def _peer_table(records: Sequence[Record], version: str) -> Table:
    """Returns the table of one peer with one number of ranks, in the columns of nccl-tests."""
    first = records[0]
    run = number_of_ranks(first.ranks)
    if first.operation == "all_reduce":
        run += ", in-place" if first.in_place else ", out-of-place (with the copy)"
    name = f"{first.peer} ({version})" if version else first.peer
    wrong = sum(record.wrong_elements for record in records)
    notes = [f"Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"]
    rates = [rate for record in records if (rate := record.busbw_gb_per_s(record.cold)) is not None]
    if rates:
        notes.append(f"Avg bus bandwidth    : {sum(rates) / len(rates):.4g}")
    return Table(
        f"{first.operation} by {name}, {run}; slowest rank, median over calls",
        list(_COLUMNS),
        [[cell(record) for cell in _COLUMNS.values()] for record in records],
        notes,
    )


def _comparison(peers: dict[str, list[Record]], kind: str) -> Table:
    """Returns the medians of all peers side by side, and over the first peer's; no rows without times."""
    first, *others = peers
    times: dict[int, dict[str, Timing]] = {}
    for name, records in peers.items():
        for record in records:
            timing: Timing | None = getattr(record, kind)
            if timing is not None:
                times.setdefault(record.size_bytes, {})[name] = timing
    rows = [
        [
            str(size),
            *(_time(found.get(name)) for name in peers),
            *(
                f"{found[name].median_us / max(found[first].median_us, 1e-3):.3g}x" if name in found else "-"
                for name in others
            ),
        ]
        for size, found in times.items()
        if first in found
    ]
    some = peers[first][0]
    return Table(
        f"{kind} time (us) of {some.operation}, each peer with {number_of_ranks(some.ranks)}, "
        f"then relative to {first}",
        ["size (B)", *peers, *(f"{name}/{first}" for name in others)],
        rows,
    )


def _time(timing: Timing | None) -> str:
    return "-" if timing is None else _us(timing.median_us)


def _us(us: float) -> str:
    """Returns a duration with at least three digits and no more than two decimals."""
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


@dataclass(frozen=True, slots=True)
class Ready:
    """What every rank tells the parent first, when its peers and tensors are there.

    Attributes:
        refused: reasons of what cannot be measured, by peer and operation.
        versions: of the software behind peers, by peer.
    """

    refused: dict[tuple[str, str], str]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Batch:
    """A command: a few calls of one peer at one operation and size.

    Attributes:
        peer: its name.
        operation: name of the operation.
        count: elements of the array.
        cold_calls: calls on rewritten buffers in rotation, timed one by one.
        hot_calls: calls on one buffer, timed one by one.
        loop_calls: calls on that buffer that are timed together; none where it is 0.
    """

    peer: str
    operation: str
    count: int
    cold_calls: int
    hot_calls: int
    loop_calls: int = 0


TIMES = (*KINDS, "host")
"""Names of the durations, in nanoseconds, that a rank answers to a batch with.

``cold`` and ``hot`` are of each such call, ``loop`` of the loop divided by its calls, ``host`` of each hot
call until it returned, where the device is not done by then.
"""


class Worker:
    """Times batches on one rank.

    Args:
        rank: the rank that this process is.
        size: number of ranks.
        options: what is measured.
        barrier: lets all ranks go at the same time.
        peers: the peers by name.
    """

    def __init__(
        self, rank: int, size: int, options: Options, barrier: Callable[[], None], peers: Mapping[str, Bind]
    ) -> None:
        self._rank, self._size = rank, size
        self._options = options
        device = DEVICES[options.device]
        self._barrier = device.starting(barrier)
        self._finish = device.finish if device.runs_behind else None
        self._peers = peers
        self._dtype = getattr(torch, options.dtype)
        self._prepared: tuple[str, int] | None = None
        self._given = torch.empty(0, dtype=self._dtype, device=device.kind)
        self._wanted: torch.Tensor | None = None  # the operation may not say
        largest = options.largest_bytes(size) // options.item_bytes
        self._hot = [self._given.new_empty(largest) for _ in range(options.buffers())]
        self._arena = torch.zeros(options.arena_bytes(size), dtype=torch.uint8, device=device.kind)
        self._offset = 0  # where the next buffer of the rotation begins

    def run(self, batch: Batch) -> Samples:
        """Runs a batch, the same on all ranks, and returns its times and counts of wrong elements."""
        operation = OPERATIONS[batch.operation]
        self._prepare(operation, batch.count)
        result: Samples = {name: [] for name in (*TIMES, "cold_wrong", "hot_wrong")}
        with without_collection():
            self._run_cold(operation, batch, result)
            self._run_hot(operation, batch, result)
        return result

    def _prepare(self, operation: Operation, count: int) -> None:
        """Computes this rank's input and what its output must be, unless the last batch had the same."""
        if self._prepared == (operation.name, count):
            return
        place = self._given.device
        self._given, self._wanted = self._given.new_empty(0), None  # old and new at once would be twice
        what = (operation, self._options.redop, self._dtype, count, self._rank, self._size)
        self._given = input_values(*what).to(place)
        wanted = wanted_values(*what)
        self._wanted = None if wanted is None else wanted.to(place)
        self._prepared = (operation.name, count)

    def _run_cold(self, operation: Operation, batch: Batch, found: Samples) -> None:
        tolerance = inexactness(batch.peer)
        if tolerance and batch.count:
            largest = float(self._given.abs().max())
            tolerance *= largest * (1 if self._options.redop == "avg" else self._size)
        while len(found["cold"]) < batch.cold_calls:
            buffers = self._rotate(batch.count, batch.cold_calls - len(found["cold"]))
            pairs = [self._pair(operation, batch.count, buffer) for buffer in buffers]
            for given, result in pairs:
                if given is not result:
                    result.zero_()
                given.copy_(self._given)
            calls = [self._bind(operation, batch, given, result) for given, result in pairs]
            found["cold"] += [self._timed(operation, call)[1] for call in calls]
            for given, result in pairs:
                if self._wanted is not None:
                    found["cold_wrong"].append(operations.count_wrong(result, self._wanted, tolerance))
                if given is not result:
                    found["cold_wrong"].append(operations.count_wrong(given, self._given))

    def _run_hot(self, operation: Operation, batch: Batch, found: Samples) -> None:
        given, result = self._pair(operation, batch.count, self._hot)
        wanted = self._wanted
        given.copy_(self._given)
        if operation.reduces and operation.in_place:  # a value that stays as it is over any number of calls
            rest = torch.full_like(self._given, operations.resting(self._options.redop))
            given.copy_(rest)
            wanted = None if wanted is None else rest
        call = self._bind(operation, batch, given, result)
        times = [self._timed(operation, call) for _ in range(batch.hot_calls)]
        found["hot"] += [whole for _, whole in times]
        if self._finish is not None:
            found["host"] += [returned for returned, _ in times]
        if batch.loop_calls:
            self._barrier()
            begin = time.perf_counter_ns()
            for _ in range(batch.loop_calls):
                call()
            if self._finish is not None:
                self._finish()
            took = time.perf_counter_ns() - begin
            found["loop"].append(took // batch.loop_calls // (2 if operation.halved else 1))
        if wanted is not None and (times or batch.loop_calls):
            found["hot_wrong"].append(operations.count_wrong(result, wanted))

    def _timed(self, operation: Operation, call: Callable[[], object]) -> tuple[int, int]:
        """Returns how long a call took until it returned, and until the device was done with it."""
        finish = self._finish
        self._barrier()
        begin = time.perf_counter_ns()
        call()
        returned = done = time.perf_counter_ns()
        if finish is not None:
            finish()
            done = time.perf_counter_ns()
        halves = 2 if operation.halved else 1
        return (returned - begin) // halves, (done - begin) // halves

    def _bind(
        self, operation: Operation, batch: Batch, given: torch.Tensor, result: torch.Tensor
    ) -> Callable[[], object]:
        if operation.in_place and given is not result:  # out of place: the copy is part of the call
            call = self._peers[batch.peer](operation, result, result)

            def copy_and_call() -> None:
                result.copy_(given)
                call()

            return copy_and_call
        return self._peers[batch.peer](operation, given, result)

    def _pair(
        self, operation: Operation, count: int, buffers: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a call's input and output, the same where it works in place."""
        if operation.in_place and (self._options.in_place or not operation.reduces):
            return (buffers[0][:count],) * 2
        what = (count, self._rank, self._size)
        return buffers[0][: operation.input_count(*what)], buffers[1][: operation.output_count(*what)]

    def _rotate(self, count: int, calls: int) -> list[list[torch.Tensor]]:
        """Returns the buffers of so many calls, or of fewer where memory ends."""
        size_bytes = count * self._dtype.itemsize
        gap = stride(size_bytes)
        each = self._options.buffers()
        number = min(calls, self._arena.numel() // gap // each) * each
        if self._offset + number * gap > self._arena.numel():
            self._offset = 0
        begin = self._offset
        self._offset += number * gap
        buffers = [
            self._arena[begin + i * gap : begin + i * gap + size_bytes].view(self._dtype)
            for i in range(number)
        ]
        return [buffers[i : i + each] for i in range(0, number, each)]


def run_worker(rank: int, connection: Connection, placement: Placement, options: Options) -> None:
    """Body of a rank: sends what it cannot measure and why, then the result of every batch it is told to run.

    Args:
        rank: the rank that this process is.
        connection: to the parent.
        placement: where it is.
        options: what is measured, with the peers to open.
    """
    placement.take(rank)
    names = options.backends or ()
    ours = [name for name in names if not name.startswith(TORCH)]
    if ours:
        placement.initialize(rank, split_name(ours[0])[0])
    if len(ours) < len(names):
        placement.initialize_torch(rank, "gloo")  # it only makes others
    _serve(rank, connection, placement, options, *_peers(options))
    if ours:
        collectives.destroy_process_group()
    if len(ours) < len(names):
        torch_dist.destroy_process_group()


def run_mpi4py(rank: int, connection: Connection, placement: Placement, options: Options) -> None:
    """Body of a rank of plain mpi4py under ``mpirun``; arguments as for :func:`run_worker`.

    Raises:
        RuntimeError: ``mpirun`` and mpi4py are not of one MPI.
    """
    import mpi4py

    mpi4py.rc.threads = False  # MPI's fastest mode
    from mpi4py import MPI

    placement.take(rank)
    world = MPI.COMM_WORLD
    if world.Get_size() != placement.size:
        raise RuntimeError(
            f"mpirun was to start {placement.size} ranks, but mpi4py sees {world.Get_size()}; not of one MPI"
        )
    (peer,) = options.backends or ()
    dtype = getattr(torch, options.dtype)
    refused = {
        (peer, name): reason
        for name in options.operations
        if (reason := why_mpi_refuses(MPI, OPERATIONS[name], dtype, options.redop)) is not None
    }
    all_refused = len(refused) == len(options.operations)
    peers = {} if all_refused else {peer: mpi_peer(MPI, world, options.redop)}
    _serve(rank, connection, placement, options, peers, Ready(refused, {peer: mpi_version()}))


def _serve(
    rank: int,
    connection: Connection,
    placement: Placement,
    options: Options,
    peers: Mapping[str, Bind],
    ready: Ready,
) -> None:
    """Sends the ready once all is ready, and then runs batches until the parent closes."""
    if not peers:
        connection.send(ready)
        return
    barrier = SpinBarrier(placement.memory, rank, placement.size)
    worker = Worker(rank, placement.size, options, barrier, peers)
    gc.collect()
    connection.send(ready)  # from now on nothing here disturbs other peers
    for batch in commands(connection):
        connection.send(worker.run(batch))
    barrier.close()


def _peers(options: Options) -> tuple[dict[str, Bind], Ready]:
    """Returns the peers that can do at least one operation, and what is to be said of all."""
    op = getattr(collectives.ReduceOp, options.redop.upper())
    dtype, device = getattr(torch, options.dtype), options.device
    peers: dict[str, Bind] = {}
    ready = Ready({}, {})
    for name in options.backends or ():
        if name.startswith(TORCH):
            peer = open_torch(name, options.redop)
            ask = partial(why_torch_refuses, peer, dtype=dtype, device=device)
            if name == TORCH_NCCL:
                ready.versions[name] = nccl_version()
        else:
            backend, algorithm = split_name(name)
            group = open_group(backend, algorithm)
            peer = group_peer(group, op, algorithm)
            ask = partial(why_not, group, dtype=dtype, op=op, device=device, algorithm=algorithm)
            if backend in {"nccl", "mpi"}:
                ready.versions[name] = providers.describe() if backend == "nccl" else mpi_version()
        reasons = {word: ask(OPERATIONS[word]) for word in options.operations}
        ready.refused.update({(name, word): why for word, why in reasons.items() if why is not None})
        if None in reasons.values():
            peers[name] = peer
    return peers, ready


__all__ = ["Options", "add_arguments", "measure", "run"]

ROUNDS = 10
"""Batches of each peer at each size."""

MIN_CALLS = 5
MAX_CALLS = 200
"""Calls of each peer at each size where the user names no number; the budget decides between the two."""

WARMUP = 5
"""Calls before those that count, where the budget allows so many."""

WARMUP_SHARE = 0.15
"""Part of the budget that may go into them."""

LOOP_MAX_BYTES = 32 << 10
"""Largest size that is also measured by a loop."""

LOOP_NS = 5_000_000
"""Time that one loop should take, with at least and at most so many calls:"""
LOOP_MIN_CALLS = 10
LOOP_MAX_CALLS = 500


@dataclass(frozen=True, slots=True)
class Point:
    """An operation at a size.

    Attributes:
        operation: its name.
        count: elements of the array.
        size_bytes: its bytes.
    """

    operation: str
    count: int
    size_bytes: int


class _Peer:
    """What is known of a peer at one point.

    Args:
        name: its name.
        processes: the ranks that measure it.
        point: the operation and its size.
    """

    def __init__(self, name: str, processes: RankProcesses, point: Point) -> None:
        self.name = name
        self.processes = processes
        self.point = point
        self.calls = 0
        self.loop_calls = 0
        self.samples: list[Samples] = [{name: [] for name in TIMES} for _ in range(processes.size)]

    def run(self, calls: int, loop_calls: int = 0, *, timed: bool = True) -> list[Samples]:
        """Has the ranks run a batch and takes their results, the durations only where ``timed``."""
        batch = Batch(self.name, self.point.operation, self.point.count, calls, calls, loop_calls)
        results: list[Samples] = self.processes.ask(batch)
        add_samples(self.samples, results, () if timed else TIMES)
        return results

    def prepare(self, options: Options, budget_s: float) -> None:
        """Warms the peer up, and decides how often it is called."""
        self.run(1, timed=False)
        begin = time.monotonic()
        self.run(1, timed=False)
        both_s = time.monotonic() - begin  # a cold and a hot call, with all that is done around them
        warmup = options.warmup
        if warmup is None:
            warmup = min(WARMUP, int(WARMUP_SHARE * budget_s / both_s))
        if warmup > 2:
            begin = time.monotonic()
            self.run(warmup - 2, timed=False)
            both_s = (time.monotonic() - begin) / (warmup - 2)
        possible = int((1 - WARMUP_SHARE) * budget_s / both_s)
        self.calls = options.calls or max(MIN_CALLS, min(MAX_CALLS, possible))
        if self.point.size_bytes <= LOOP_MAX_BYTES:
            self.loop_calls = LOOP_MIN_CALLS
            # In a short loop the wait for ranks that start late weighs much: its length takes two steps.
            for _ in range(2):
                results = self.run(0, self.loop_calls, timed=False)
                loop_ns = max(result["loop"][0] for result in results)
                self.loop_calls = max(LOOP_MIN_CALLS, min(LOOP_MAX_CALLS, LOOP_NS // max(loop_ns, 1)))

    def record(self, options: Options) -> Record:
        """Returns what was found."""
        operation = OPERATIONS[self.point.operation]
        samples = self.samples
        times = {
            name: Timing.of([one[name] for one in samples]) if samples[0][name] else None for name in TIMES
        }
        return Record(
            operation=operation.name,
            peer=self.name,
            ranks=self.processes.size,
            size_bytes=self.point.size_bytes,
            count_elements=self.point.count,
            dtype=options.dtype,
            redop=options.redop if operation.reduces else "none",
            in_place=operation.in_place and (options.in_place or operation.name != "all_reduce"),
            cold_wrong_elements=sum(sum(one["cold_wrong"]) for one in samples),
            hot_wrong_elements=sum(sum(one["hot_wrong"]) for one in samples),
            root=ROOT if operation.rooted else -1,
            device=options.device,
            **times,  # type: ignore[arg-type]
        )


def measure(options: Options, progress: Progress = silent, program: str = "allreduce") -> Report:
    """Returns the report of a measurement that it runs; peers that cannot run here are in it as skipped.

    Args:
        options: what is measured.
        progress: called with a short line from time to time.
        program: name of the program that asks.

    Raises:
        RankFailedError: a rank failed.
        NamespacesUnavailableError: there can be no network namespaces here.
    """
    backends, skipped = available_backends(options.peers(), options.device, dict(options.mpis))
    environment = {**options.environment(options.ranks), "peers": {}}
    report = Report(program, environment, asdict(options), skipped=skipped)
    for ranks in options.ranks if backends else ():
        lacking: list[Skipped] = []
        fitting = usable(backends, partial(_why_no_cores, ranks, options), lacking)
        report.skipped += [replace(one, ranks=ranks) for one in lacking]
        with ExitStack() as stack:
            _measure_points(report, ranks, _start(stack, ranks, fitting, options), options, progress)
    return report


def _why_no_cores(ranks: int, options: Options, name: str) -> tuple[str | None, str]:
    """Returns why bound ranks cannot have the threads of a peer, ``None`` where they can; and no command."""
    threads = threads_of(*split_name(name)) if is_own_backend(name) else None
    cores = min(map(len, options.cores_to_bind(ranks))) if options.bind else MOST
    if threads is None or threads <= cores:
        return None, ""
    return f"needs {threads} cores for each rank, and there are {cores}", ""


def _start(
    stack: ExitStack, ranks: int, backends: Sequence[str], options: Options
) -> dict[str, RankProcesses]:
    """Returns the ranks that measure, by peer; the stack ends them."""
    machines = stack.enter_context(options.make_machines())
    between: Callable[[Mpirun], Mpirun] | None = None
    if machines is not None:
        agent = machines.write_agent(stack.enter_context(TemporaryDirectory(prefix="collectives-")))
        addresses = [machines.address(machine) for machine in range(len(machines))]
        between = partial(Mpirun.between, machines=addresses, own=machines.host, agent=agent, ranks=ranks)

    def mpirun_of(prefix: str | None) -> Mpirun:
        mpirun = find_mpirun(prefix)
        if mpirun is None:
            raise FileNotFoundError(f"there is no mpirun in {prefix or 'PATH'} any more")
        return mpirun if between is None else between(mpirun)

    own = tuple(name for name in backends if not is_mpi4py(name))
    teams: dict[str, RankProcesses] = {}
    if own:
        mpirun = mpirun_of(None) if any(map(needs_mpirun, own)) else None
        told = replace(options, backends=own)
        processes = stack.enter_context(
            told.start(run_worker, ranks, told, backends=own, machines=machines, mpirun=mpirun)
        )
        teams |= dict.fromkeys(own, processes)
    for name in filter(is_mpi4py, backends):
        mpirun = mpirun_of(dict(options.mpis).get(name.partition(":")[2]))
        told = replace(options, backends=(name,), imports=())
        teams[name] = stack.enter_context(
            told.start(run_mpi4py, ranks, told, backends=["mpi"], mpirun=mpirun)
        )
    return {name: teams[name] for name in backends}


def _measure_points(
    report: Report, ranks: int, teams: Mapping[str, RankProcesses], options: Options, progress: Progress
) -> None:
    """Measures all peers at all operations and sizes, and adds what it finds to the report."""
    answers: list[Ready] = [processes.gather()[0] for processes in dict.fromkeys(teams.values())]
    refused = {what: why for ready in answers for what, why in ready.refused.items()}
    report.skipped += _skipped(refused, options.operations, ranks)
    for ready in answers:
        report.environment["peers"].update(ready.versions)
    points = [
        point
        for name in options.operations
        for point in points_of(name, options.sizes, options.item_bytes, ranks)
    ]
    end = time.monotonic() + options.budget_s
    for i, point in enumerate(points):
        what = f"{point.operation}, {ranks} ranks, {point.size_bytes} B"
        progress(f"{what} ({i + 1} of {len(points)} measurements)")
        peers = [
            _Peer(name, processes, point)
            for name, processes in teams.items()
            if (name, point.operation) not in refused
        ]
        _measure(peers, options, max(0.0, end - time.monotonic()) / (len(points) - i))
        report.records += [peer.record(options) for peer in peers]


def _skipped(refused: Mapping[tuple[str, str], str], operations: Sequence[str], ranks: int) -> list[Skipped]:
    """Returns the entries of a report, one for a peer whose reason is the same at all operations."""
    skipped: list[Skipped] = []
    for peer in dict.fromkeys(peer for peer, _ in refused):
        reasons = {name: refused.get((peer, name)) for name in operations}
        if len(set(reasons.values())) == 1:
            reasons = {"": reasons[operations[0]]}
        skipped += [
            Skipped(peer, reason, ranks=ranks, operation=name)
            for name, reason in reasons.items()
            if reason is not None
        ]
    return skipped


def points_of(name: str, sizes: Sequence[int], item_bytes: int, ranks: int) -> list[Point]:
    """Returns what is measured of an operation: each size rounded up to whole parts, each once."""
    counts = dict.fromkeys(rounded_count(OPERATIONS[name], size, item_bytes, ranks) for size in sizes)
    return [Point(name, count, count * item_bytes) for count in counts]


def _measure(peers: Sequence[_Peer], options: Options, budget_s: float) -> None:
    """Measures peers at one point, batch by batch; each round begins with another peer.

    Where a noisy machine makes the plan too long, later rounds are left out.
    """
    end = time.monotonic() + budget_s
    for peer in peers:
        peer.prepare(options, budget_s / len(peers))
    for this, order in rounds_of(peers, ROUNDS):
        for peer in order:
            calls = share_of(peer.calls, this, ROUNDS)
            if calls or peer.loop_calls:
                peer.run(calls, peer.loop_calls)
        enough = options.calls is None and all(len(peer.samples[0]["cold"]) >= MIN_CALLS for peer in peers)
        if enough and time.monotonic() > end:
            break


def available_backends(
    names: Sequence[str] | None, device: str = "cpu", mpis: Mapping[str, str] | None = None
) -> tuple[list[str], list[Skipped]]:
    """Returns the backends that this machine can run, and the others with reasons.

    Args:
        names: backends and other peers to look at, in order; ``None`` for all backends, and plain mpi4py or
            torch's NCCL.
        device: type of the tensors' device, which must be there.
        mpis: folders of further installations of MPI, by name.

    Raises:
        ValueError: a name is not known.
    """
    mpis = mpis or {}
    if names is None:
        first, other = {"cpu": ("host", MPI4PY), "cuda": ("nccl", TORCH_NCCL)}[device]
        names = [*sorted(backend_names(), key=lambda name: (name != first, name)), other]
        names += [f"{MPI4PY}:{name}" for name in mpis] if device == "cpu" else []
    skipped: list[Skipped] = []
    full = dict.fromkeys(_full_name(name) if is_own_backend(name) else name for name in names)
    return usable(full, lambda name: _why_not_here(name, device, mpis), skipped), skipped


def _full_name(name: str) -> str:
    backend, algorithm = split_name(name)
    return ":".join(filter(None, (backend_spec(backend).name, algorithm)))


def _why_not_here(name: str, device: str, mpis: Mapping[str, str]) -> tuple[str | None, str]:
    """Returns why a peer cannot be measured, ``None`` where it can, and the command that would add it."""
    if name.startswith(TORCH):
        return why_no_torch(name, device), ""
    if is_mpi4py(name):
        if device != "cpu":
            return f"serves tensors on cpu, and this measures tensors on {device}", ""
        return why_no_mpi4py(mpis.get(name.partition(":")[2])), INSTALL_MPI4PY
    backend, algorithm = split_name(name)
    spec = backend_spec(backend)
    reason = why_unavailable(spec.name) or why_not_on(device, spec)
    if reason is None and algorithm is not None and device != "cpu":
        reason = f"reduces tensors on the CPU, and this measures tensors on {device}"
    if reason is None and needs_mpirun(name):
        reason = why_no_mpi4py()
    return reason, spec.install


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser.

    Args:
        parser: of the command ``collectives bench allreduce``.
    """
    add_options(parser, Options, sizes=SIZES)
    add_files(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program as the command line asks; blocks until it has printed its tables.

    Args:
        arguments: as :func:`add_arguments` describes them.

    Returns:
        The exit status: 1 where a result is wrong, else 0.

    Raises:
        CommandError: the arguments do not fit together, or a rank failed.
    """
    return run_measurement(Options, measure, lambda record: not record.wrong_elements, arguments)
