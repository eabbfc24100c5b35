"""Judge of figure 11: what skipped synchronisations do to the loss."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collectives.bench.paper.report.findings import NOTICEABLE, Figures, Finding

__all__ = ["loss_at_the_end"]

LAST = 0.1
"""Part of the iterations whose mean is the loss at the end."""


def loss_at_the_end(figures: Figures) -> Iterator[Finding]:
    """Compares the losses at the end; panel (a) should show no harm, panel (b) should."""
    finals: dict[str, dict[int, float]] = {}
    for record in figures["fig11"]:
        losses = record.samples["losses"]
        last = float(np.mean(losses[-max(1, int(LAST * len(losses))) :]))
        finals.setdefault(record.cell["panel"], {})[record.cell["interval"]] = last
    for panel, by_interval in finals.items():
        first, last = by_interval[min(by_interval)], by_interval[max(by_interval)]
        here = "; ".join(f"every {interval}: {loss:.3f}" for interval, loss in by_interval.items())
        is_worse = last > first * (1 + NOTICEABLE)
        change = f"{last / first - 1:+.0%}"
        because = f"the loss of every {max(by_interval)} is {change} from that of every {min(by_interval)}"
        yield Finding(panel, here, is_worse == panel.startswith("(b)"), because)
