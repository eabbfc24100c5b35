"""How long all-reduces and training take beside torch's own NCCL, and what a call costs the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from collectives.bench import ddp
from collectives.bench.acceptance import host_cost
from collectives.bench.acceptance.platform import Platform
from collectives.bench.acceptance.report import CheckFailedError, Found, Row, checked
from collectives.bench.comparison.goals import check, parse_goal
from collectives.bench.comparison.measurement import Options, measure
from collectives.bench.comparison.operations import OPERATIONS
from collectives.bench.comparison.records import Record
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.text import format_bytes, number_of_ranks, parse_sizes

__all__ = ["bandwidth_rows", "host_cost_rows", "models_of", "other_bandwidth_rows", "training_rows"]

GOAL: Final = "{ours} <= {theirs} * 1.1 + 10 us"
"""Python's share of a call, and a tenth, which runs of NCCL with itself differ by."""
LIMITS: Final[Mapping[str, tuple[int, float]]] = {
    "all_reduce, asynchronous": (40, 15.0),
    "all_reduce, synchronous": (41, 15.0),
    "all_reduce of 10, coalesced": (55, 30.0),
}
"""Most frames of Python and microseconds of a call, by the names of ``host_cost``."""

SLOWER: Final = 1.05
"""What an iteration of training may take, of that of torch's wrapper."""

_MODELS: Final = ("resnet50", "bert-base", "gpt2")
_SIZES: Final = "8:4G:8"
_SHORT_SIZES: Final = "8:4K:512"
_SIZES_OF_OTHERS: Final = "64K:64M:32"
_SHORT_SIZES_OF_OTHERS: Final = "4K"
_BUFFERS: Final = 6
"""At most so many tensors of a size are in memory while it is measured."""
_SHORT_BUDGET_S: Final = 0.5
_CALLS: Final = 5000
_SHORT_CALLS: Final = 200


def bandwidth_rows(
    platform: Platform, ranks: int, provider: str, short: bool, budget_s: float = 60.0
) -> Iterator[Row]:
    """Yields a row for each size of an all-reduce of float32, as far as there is memory for it.

    Results must be right. Times are judged by :data:`GOAL` where each rank has a device of its own; what the
    host takes to issue a call stands beside them.

    Args:
        platform: where.
        ranks: how many.
        provider: package by which ours calls NCCL.
        short: few sizes, a moment each.
        budget_s: seconds that all sizes may take together.
    """
    asked = ("all_reduce",), _SHORT_SIZES if short else _SIZES
    yield from _compared(platform, ranks, provider, asked, _SHORT_BUDGET_S if short else budget_s)


def other_bandwidth_rows(
    platform: Platform, ranks: int, provider: str, short: bool, budget_s: float = 60.0
) -> Iterator[Row]:
    """Yields a row for each other operation, at some sizes; else as :func:`bandwidth_rows`."""
    operations = tuple(name for name in OPERATIONS if name != "all_reduce")
    asked = operations, _SHORT_SIZES_OF_OTHERS if short else _SIZES_OF_OTHERS
    yield from _compared(platform, ranks, provider, asked, _SHORT_BUDGET_S if short else budget_s)


def _compared(
    platform: Platform, ranks: int, provider: str, asked: tuple[tuple[str, ...], str], budget_s: float
) -> Iterator[Row]:
    """Yields a row for all operations asked for, and one for each, or for each size of a single one."""
    operations, sizes = asked
    where = f"{provider}, {ranks} ranks"
    records: list[Record] = []

    def run() -> Found:
        room = DEVICES[platform.kind].memory_per_rank_bytes(ranks) // _BUFFERS
        options = Options(
            backends=platform.compared,
            ranks=(ranks,),
            sizes=tuple(size for size in parse_sizes(sizes) if size <= room),
            operations=operations,
            budget_s=budget_s,
            device=platform.kind,
            provider=provider if platform.kind == "cuda" else None,
        )
        report = measure(options)
        if report.skipped:
            raise CheckFailedError("; ".join(f"{one.peer}: {one.reason}" for one in report.skipped))
        records.extend(report.records)
        largest = format_bytes(max(options.sizes))
        smallest = format_bytes(min(options.sizes))
        return f"{smallest} to {largest}", {"records": [record.as_json() for record in records]}

    what = "all_reduce" if len(operations) == 1 else "other operations"
    yield checked("bandwidth", f"{what}, {where}", run)
    judged = platform.times_tell and ranks <= len(platform.gpus())
    points: dict[str, list[Record]] = {}
    for record in records:
        point = record.operation
        if len(operations) == 1:
            point += f" of {format_bytes(record.size_bytes)}"
        points.setdefault(point, []).append(record)
    for point, some in points.items():
        yield checked("bandwidth", f"{point}, {where}", partial(_judged, some, platform.compared, judged))


def _judged(records: Sequence[Record], compared: tuple[str, str], times_tell: bool) -> Found:
    sizes = dict.fromkeys(record.size_bytes for record in records)
    said = []
    for record in records:
        rate = record.busbw_gb_per_s(record.cold)
        host = record.host or record.hot  # of a device that is done when the call returns
        size = f" at {format_bytes(record.size_bytes)}" if len(sizes) > 1 else ""
        said.append(
            f"{record.peer}{size} {record.cold.median_us:.1f} us, {rate or 0:.3g} GB/s, "
            f"host {host.median_us:.1f} us"
        )
    found = "; ".join(said)
    wrong = [
        f"{record.peer}: {record.wrong_elements} wrong elements"
        for record in records
        if record.wrong_elements
    ]
    if wrong:
        raise CheckFailedError("; ".join(wrong))
    if not times_tell:
        return f"{found}; no verdict on times here", {}
    goals = check(parse_goal(GOAL.format(ours=compared[0], theirs=compared[1])), records)
    missed = [f"{goal.allowed_us:.1f} us are allowed" for goal in goals if not goal.is_met]
    if missed:
        raise CheckFailedError(f"{found}; {'; '.join(missed)}")
    return found, {"allowed_us": [goal.allowed_us for goal in goals]}


def models_of(platform: Platform, ranks: int, short: bool) -> tuple[str, ...]:
    """Returns the models to train: one where ranks share devices, whose times tell nothing.

    Args:
        platform: where.
        ranks: how many.
        short: a small one stands for all.
    """
    if short:
        return ("small",)
    return _MODELS if ranks <= len(platform.gpus()) else _MODELS[1:2]


def training_rows(
    platform: Platform, ranks: int, provider: str, short: bool, budget_s: float = 60.0
) -> Iterator[Row]:
    """Yields a row for each model that is trained with our wrapper and with torch's.

    Gradients must agree and ranks end with the same parameters. Times are judged by :data:`SLOWER` where each
    rank has a device of its own.

    Args:
        platform: where.
        ranks: how many.
        provider: package by which ours calls NCCL.
        short: a small model, few iterations.
        budget_s: seconds that the iterations of a model may take.
    """
    judged = platform.times_tell and ranks <= len(platform.gpus())
    for model in models_of(platform, ranks, short):
        asked = {
            "models": (model,),
            "peers": platform.trained,
            "ranks": ranks,
            "iterations": 4 if short else None,
            "budget_s": budget_s,
            "device": platform.kind,
        }
        name = f"{model}, {provider}, {number_of_ranks(ranks)}"
        yield checked("training", name, partial(_trained, asked, judged))


def _trained(asked: Mapping[str, Any], times_tell: bool) -> Found:
    report = ddp.measure(ddp.Options(**asked))
    if report.skipped:
        raise CheckFailedError("; ".join(f"{one.peer}: {one.reason}" for one in report.skipped))
    ours, theirs = report.records
    times = [record.iteration.median_us / 1e3 for record in (ours, theirs)]
    found = f"{ours.peer} {times[0]:.1f} ms, {theirs.peer} {times[1]:.1f} ms"
    figures = {"records": [report.record_as_json(record) for record in report.records]}
    if wrong := [record.peer for record in report.records if not record.agrees]:
        raise CheckFailedError(f"{found}; ranks or gradients differ: {', '.join(wrong)}")
    if not times_tell:
        return f"{found}; no verdict on times here", figures
    if times[0] > SLOWER * times[1]:
        raise CheckFailedError(f"{found}; {SLOWER} times torch's are allowed")
    return found, figures


def host_cost_rows(platform: Platform, short: bool) -> Iterator[Row]:
    """Yields a row for each way to call an all-reduce, with CUDA and NCCL stubbed.

    Args:
        platform: says whether times tell.
        short: a few calls.
    """
    costs: dict[str, host_cost.Cost] = {}

    def run() -> Found:
        costs.update((cost.call, cost) for cost in host_cost.measure(_SHORT_CALLS if short else _CALLS))
        return f"{len(costs)} ways to call", {}

    yield checked("host-cost", "all", run)
    for name, cost in costs.items():
        yield checked("host-cost", name, partial(_cost, cost, *LIMITS[name], platform.times_tell))


def _cost(cost: host_cost.Cost, frames: int, limit_us: float, times_tell: bool) -> Found:
    found = f"{cost.microseconds:.1f} us, {cost.frames} frames of Python, {cost.c_calls} calls of C"
    if cost.frames > frames:
        raise CheckFailedError(f"{found}; {frames} frames are allowed")
    if not times_tell:
        return f"{found}; no verdict on times here", asdict(cost)
    if cost.microseconds > limit_us:
        raise CheckFailedError(f"{found}; {limit_us} us are allowed")
    return found, asdict(cost)
