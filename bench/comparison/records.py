"""The record of one peer at one operation and size, and the report of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from typing import Any, Literal

from collectives.bench.comparison.operations import bus_factor
from collectives.bench.core.records import BaseReport, Chart, Curve, Table, Timing, curve_of, grouped
from collectives.bench.core.text import format_bytes, number_of_ranks, or_dash

KINDS = ("cold", "hot", "loop")
"""Names of a record's times."""


@dataclass(frozen=True, slots=True)
class Record:
    """One peer at one size.

    Attributes:
        operation: name of the operation.
        peer: name of the backend, or of what else was measured.
        ranks: number of ranks.
        size_bytes: size of the whole array (:mod:`collectives.bench.comparison.operations`); 0 of a barrier.
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

    __slots__ = ()
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
