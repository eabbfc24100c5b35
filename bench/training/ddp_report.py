"""The records of ``bench ddp`` and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from collectives.bench.core.records import BaseReport, Chart, Column, Table, Timing, curve_of
from collectives.bench.core.text import number_of_ranks, or_dash
from collectives.bench.training.ddp_peers import BASELINE, Peer
from collectives.bench.training.hooks import NOOP

__all__ = ["TrainingRecord", "TrainingReport"]


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """One peer with one model.

    Attributes:
        peer: its name.
        model: name of the model.
        ranks: number of ranks.
        batch: samples of each rank in an iteration.
        length: of a sample: width and height of an image, tokens of a text, rows of a table.
        parameters: number of trained parameters.
        parameter_tensors: number of tensors they lie in.
        iteration: whole iterations.
        forward: clearing gradients, forward and loss.
        backward: backward, communication included.
        step: the optimizer's step.
        peak_memory_bytes: most memory of the device that any rank held at any time; on the CPU what was
            resident, shared memory included.
        start_memory_bytes: what that rank held before it built the model.
        communicates: whether the ranks' gradients are averaged.
        ranks_identical: whether all ranks ended with bitwise the same parameters; expected of a peer that
            communicates.
        grad_norm: norm of all gradients after the first iteration on rank 0; the same, but for rounding, for
            all peers that communicate the same.
        agrees: whether results are as they must be: see :attr:`ranks_identical` and :attr:`grad_norm`.
        sent_bytes: what a rank sends in an iteration, counted from what its group does as the best algorithms
            do it; ``None`` where the group does not count.
        link_bytes: what a machine's interface sends in one, headers included; ``None`` without machines.
        first_loss: mean over the ranks in the first step; ``None`` where the model learns nothing.
        final_loss: mean over the ranks in the last tenth of the steps, likewise.
        accuracy: part of the held-out samples that the model reads right in the end; ``None`` where there are
            none.
    """

    peer: str
    model: str
    ranks: int
    batch: int
    length: int
    parameters: int
    parameter_tensors: int
    iteration: Timing
    forward: Timing
    backward: Timing
    step: Timing
    peak_memory_bytes: int
    start_memory_bytes: int
    communicates: bool
    ranks_identical: bool
    grad_norm: float
    agrees: bool
    sent_bytes: float | None = None
    link_bytes: float | None = None
    first_loss: float | None = None
    final_loss: float | None = None
    accuracy: float | None = None


class TrainingReport(BaseReport[TrainingRecord]):
    """All that the program found out."""

    __slots__ = ()

    def record_as_json(self, record: TrainingRecord) -> dict[str, Any]:
        """Returns a record as plain values, with its ratios."""
        return {**asdict(record), "ratios": self.ratios(record)}

    def ratios(self, record: TrainingRecord) -> dict[str, float | None]:
        """Returns how a record compares with others of the same model; ``None`` where those are missing.

        ``time_over_noop``: its iteration over that of the same peer with a no-op hook, else of another one of
        the same wrapper with that hook, which uses no backend.
        ``time_over_plain``: over that of the same peer without hook and options.
        ``time_over_torch``: over that of torch's wrapper over Gloo with the same hook and options.
        ``memory_over_torch``: its peak of memory over the peak there.
        """
        peer = Peer.parse(record.peer)
        noop = self._without_communication(record, peer)
        plain = self._find(record, peer.plain())
        base = self._find(record, peer.base())
        return {
            "time_over_noop": record.iteration.median_us / noop.iteration.median_us if noop else None,
            "time_over_plain": record.iteration.median_us / plain.iteration.median_us if plain else None,
            "time_over_torch": record.iteration.median_us / base.iteration.median_us if base else None,
            "memory_over_torch": record.peak_memory_bytes / base.peak_memory_bytes if base else None,
        }

    def charts(self) -> Sequence[Chart]:
        """Returns the iterations of all peers, for each model and number of ranks."""
        return [
            Chart(
                f"{model}, {number_of_ranks(ranks)}",
                "",
                "iteration (ms), slowest rank, median and p10 to p90",
                [
                    curve_of("", [(record.peer, record.iteration)], 1e3)
                    for record in self.records
                    if (record.model, record.ranks) == (model, ranks)
                ],
            )
            for model, ranks in dict.fromkeys((record.model, record.ranks) for record in self.records)
        ]

    def tables(self) -> Sequence[Table]:
        """Returns a table for each model and number of ranks, and one of what they send and learn."""
        tables = []
        for model, ranks in dict.fromkeys((record.model, record.ranks) for record in self.records):
            records = [record for record in self.records if (record.model, record.ranks) == (model, ranks)]
            first = records[0]
            longest = max(len("peer"), *(len(record.peer) for record in records))
            peer = Column("peer", "", -longest - 1)
            heading = (
                f"{model}: {first.parameters / 1e6:.1f} M parameters in {first.parameter_tensors} tensors, "
                f"batch {first.batch} (length {first.length}) on each of {number_of_ranks(ranks)}, "
                f"{first.iteration.calls} iterations; slowest rank, medians"
            )
            rows = [[record.peer, *_cells(self, record)] for record in records]
            tables.append(Table(heading, [peer, *_COLUMNS], rows))
            if any(
                record.final_loss is not None or Peer.parse(record.peer).hook not in {"", NOOP}
                for record in records
            ):
                heading = f"{model}, {number_of_ranks(ranks)}: sent by a rank in an iteration, and learned"
                tables.append(Table(heading, [peer, *_LEARNED], [_learned(record) for record in records]))
        return tables

    def reading(self) -> Sequence[str]:
        """Returns what the ratios are of."""
        return (
            "/no-op: iteration over the same wrapper's with a no-op hook (what communication costs).",
            "/plain: over that of the same peer without hook and options (what these cost, or save).",
            f"/torch: over {BASELINE} with the same options; less than 1 is faster, or smaller.",
            "right: ranks agree bitwise, and gradients with the other peers'; - where none are sent.",
        )

    def _without_communication(self, record: TrainingRecord, peer: Peer) -> TrainingRecord | None:
        """Returns the record of a peer that does the same but for communication."""
        wanted = peer.without_communication()
        if peer == wanted or peer.kind == "alone":
            return None
        others = [wanted, *(Peer.parse(other.peer) for other in self.records)]
        alike = (other for other in others if replace(other, backend=wanted.backend) == wanted)
        return next((found for other in alike if (found := self._find(record, other)) is not None), None)

    def _find(self, like: TrainingRecord, peer: Peer) -> TrainingRecord | None:
        """Returns another record of the same model by its peer."""
        for record in self.records:
            if (record.peer, record.model, record.ranks) == (str(peer), like.model, like.ranks):
                return None if record is like else record
        return None


_COLUMNS = (
    Column("iteration", "(ms)", 11),
    Column("p10", "(ms)", 9),
    Column("p90", "(ms)", 9),
    Column("min", "(ms)", 9),
    Column("forward", "(ms)", 9),
    Column("backward", "(ms)", 10),
    Column("step", "(ms)", 8),
    Column("/no-op", "(time)", 9),
    Column("/plain", "(time)", 9),
    Column("/torch", "(time)", 9),
    Column("peak", "(MiB)", 9),
    Column("/torch", "(memory)", 10),
    Column("right", "", 7),
)

_LEARNED = (
    Column("sent", "(MB)", 11),
    Column("link", "(MB)", 11),
    Column("loss", "(first)", 10),
    Column("loss", "(last)", 10),
    Column("accuracy", "", 10),
)


def _learned(record: TrainingRecord) -> list[str]:
    in_mb = (None if value is None else value / 1e6 for value in (record.sent_bytes, record.link_bytes))
    return [
        record.peer,
        *(or_dash(value, ".3f") for value in in_mb),
        *(or_dash(value, ".4f") for value in (record.first_loss, record.final_loss)),
        or_dash(record.accuracy, ".3f"),
    ]


def _cells(report: TrainingReport, record: TrainingRecord) -> list[str]:
    ratios = report.ratios(record)
    whole = record.iteration
    times = [whole.median_us, whole.p10_us, whole.p90_us, whole.min_us]
    times += [timing.median_us for timing in (record.forward, record.backward, record.step)]
    return [
        *(f"{us / 1e3:.2f}" if us < 1e5 else f"{us / 1e3:.1f}" for us in times),
        *(or_dash(ratios[f"time_over_{other}"], ".3f") for other in ("noop", "plain", "torch")),
        f"{record.peak_memory_bytes / 2**20:.0f}",
        or_dash(ratios["memory_over_torch"], ".3f"),
        ("yes" if record.agrees else "NO") if record.communicates else "-",
    ]
