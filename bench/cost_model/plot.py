"""What the model predicts over ranks: as charts, and as an image of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from collectives.bench.core.charts import Chart, Curve
from collectives.bench.core.image import draw, image
from collectives.bench.core.sizes import format_bytes
from collectives.bench.cost_model.algorithms import ALL_REDUCES, HOST_ALL_REDUCES, is_possible
from collectives.bench.cost_model.parameters import Parameters, Scale
from collectives.bench.cost_model.predictions import lower_bound_us, predict_host, scaling_end, time_us

__all__ = ["plot_scaling", "scaling_charts"]


def scaling_charts(sizes: Sequence[int], scales: Sequence[Scale], parameters: Parameters) -> list[Chart]:
    """Returns, for each size, time over ranks by all algorithms, and what none can beat.

    A point is where an algorithm begins to be less than half as fast as that for good.

    Args:
        sizes: sizes of the all-reduce.
        scales: where the ranks are, ascending.
        parameters: of machines and network.
    """
    several = [scale for scale in scales if scale.ranks > 1]
    return [
        Chart(f"all_reduce of {format_bytes(size)}", "ranks", "time (us)", _curves(size, several, parameters))
        for size in sizes
    ]


def _curves(size: int, scales: Sequence[Scale], parameters: Parameters) -> list[Curve]:
    curves = []
    for i, name in enumerate(ALL_REDUCES):
        there = [scale for scale in scales if is_possible(name, scale)]
        if not there:
            continue
        times = [time_us(name, size, scale, parameters) for scale in there]
        look: Literal["line", "dashed"] = "line" if name in HOST_ALL_REDUCES else "dashed"
        curves.append(Curve(name, [scale.ranks for scale in there], times, look=look, color=i))
        if there[-1].machines > 1:
            end = scaling_end(name, size, there, parameters).inefficient
            if end is not None:
                at = time_us(name, size, end, parameters)
                curves.append(Curve("", [end.ranks], [at], look="points", color=i))
    ranks = [scale.ranks for scale in scales]
    chosen = [predict_host(size, scale, parameters).time_us for scale in scales]
    bound = [lower_bound_us(size, scale, parameters) for scale in scales]
    last = len(ALL_REDUCES)
    return [
        *curves,
        Curve("ours, as chosen", ranks, chosen, look="wide", color=last),
        Curve("bound", ranks, bound, look="dotted", color=last + 1),
    ]


def plot_scaling(
    path: Path, charts: Sequence[Chart], scales: Sequence[Scale], parameters: Parameters
) -> None:
    """Writes charts as a PNG image.

    Args:
        path: of the image; its directory is made.
        charts: those of :func:`scaling_charts`.
        scales: where the ranks are, ascending.
        parameters: of machines and network.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    columns = min(3, len(charts))
    rows = -(-len(charts) // columns)
    title = (
        f"predicted all_reduce, {scales[0].ranks_per_machine} ranks a machine, links of "
        f"{8e-3 / parameters.link_us_per_byte:.3g} Gb/s, {parameters.latency_us:.3g} us; "
        "x: from here on less than half as fast as the bound"
    )
    with image(path, rows, columns, (6, 4.6), title) as grid:
        for axes in grid.flat[len(charts) :]:
            axes.set_axis_off()
        for chart, axes in zip(charts, grid.flat, strict=False):
            draw(axes, chart)
            axes.set_title(chart.title)
        grid.flat[0].legend(fontsize=7)
