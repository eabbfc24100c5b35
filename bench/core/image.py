"""Images of reports: a grid of axes in a PNG file, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["image", "made_with"]


@contextmanager
def image(path: Path, rows: int, columns: int, size: tuple[float, float], title: str) -> Iterator[Any]:
    """Context with a grid of axes, which are written to a PNG image at its end.

    Args:
        path: of the image; its directory is made.
        rows: rows of the grid.
        columns: columns of the grid.
        size: width and height of one of its axes in inches.
        title: above all of them.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows + 1), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    yield figure.subplots(rows, columns, squeeze=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)


def made_with(environment: Mapping[str, Any]) -> str:
    """Returns machine and versions of a report in a line."""
    versions = ", ".join(f"{name} {environment[name]}" for name in ("collectives", "torch", "python"))
    return f"{environment['cpu']}, {environment['cores_usable']} cores; {versions}"
