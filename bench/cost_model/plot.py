"""A plot of what the model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from collectives.bench.core.image import image
from collectives.bench.core.sizes import format_bytes
from collectives.bench.cost_model.algorithms import ALL_REDUCES, HOST_ALL_REDUCES, is_possible
from collectives.bench.cost_model.parameters import Parameters, Scale
from collectives.bench.cost_model.predictions import lower_bound_us, predict_host, scaling_end, time_us

__all__ = ["plot_scaling"]


def plot_scaling(path: Path, sizes: Sequence[int], scales: Sequence[Scale], parameters: Parameters) -> None:
    """Writes a PNG image: for each size, time over ranks by all algorithms, and what none can beat.

    Args:
        path: of the image; its directory is made.
        sizes: sizes of the all-reduce.
        scales: where the ranks are, ascending.
        parameters: of machines and network.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    columns = min(3, len(sizes))
    rows = -(-len(sizes) // columns)
    title = (
        f"predicted all_reduce, {scales[0].ranks_per_machine} ranks a machine, links of "
        f"{8e-3 / parameters.link_us_per_byte:.3g} Gb/s, {parameters.latency_us:.3g} us; "
        "x: from here on less than half as fast as the bound"
    )
    several = [scale for scale in scales if scale.ranks > 1]
    ranks = [scale.ranks for scale in several]
    with image(path, rows, columns, (6, 4.6), title) as grid:
        for axes in grid.flat[len(sizes) :]:
            axes.set_axis_off()
        for size, axes in zip(sizes, grid.flat, strict=False):
            for i, name in enumerate(ALL_REDUCES):
                there = [scale for scale in several if is_possible(name, scale)]
                look = {"color": f"C{i % 10}", "linestyle": "-" if name in HOST_ALL_REDUCES else "--"}
                times = [time_us(name, size, scale, parameters) for scale in there]
                axes.plot([scale.ranks for scale in there], times, lw=1, label=name, **look)
                if there[-1].machines > 1:
                    end = scaling_end(name, size, there, parameters).inefficient
                    if end is not None:
                        axes.plot(
                            [end.ranks], [time_us(name, size, end, parameters)], "x", color=look["color"]
                        )
            chosen = [predict_host(size, scale, parameters).time_us for scale in several]
            axes.plot(ranks, chosen, color="black", lw=2.5, alpha=0.5, label="ours, as chosen")
            bound = [lower_bound_us(size, scale, parameters) for scale in several]
            axes.fill_between(
                ranks, bound, [min(bound) / 2] * len(bound), color="grey", alpha=0.2, label="bound"
            )
            axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="time (us)", title=format_bytes(size))
            axes.grid(alpha=0.3)
        grid.flat[0].legend(fontsize=7)
