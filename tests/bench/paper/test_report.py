"""The report, of samples that are given."""

from __future__ import annotations

from collectives.bench.paper.cells import Measured
from collectives.bench.paper.iterations import PHASES
from collectives.bench.paper.report import STATEMENTS, report_lines

ENVIRONMENT = {"cpu": "a processor", "cores_usable": 2, "collectives": "0", "torch": "1", "python": "2"}


def iterations(panel, ranks, times, communication=0.4):
    """A cell whose series take so many milliseconds, after a first iteration that must not count."""
    shares = dict(zip(PHASES, (0.2, 0.7 - communication, communication, 0.1), strict=True))
    series = [
        {
            "rebuilt": [0],
            "iteration": [10**12, *[int(ms * 1e6)] * 5],
            **{phase: [10**12, *[int(ms * 1e6 * share)] * 5] for phase, share in shares.items()},
        }
        for ms in times.values()
    ]
    cell = {
        "kind": "Iterations", "panel": panel, "ranks": ranks, "model": panel.split(",")[0],
        "series": [{"name": name, "group": "host", "bucket_mb": 0} for name in times],
    }  # fmt: skip
    return Measured(cell, {"sizes": [10], "series": series})


def losses(panel, interval, final):
    cell = {"kind": "Losses", "panel": panel, "ranks": 2, "interval": interval}
    return Measured(cell, {"losses": [2.0] * 90 + [final] * 10})


def sweep(backend, totals_ms):
    cell = {
        "kind": "AllReduceSweep", "panel": f"(b) {backend}", "ranks": 2, "backend": backend,
        "counts": [1000, 262_144, 2_000_000], "parameters": 6_000_000,
    }  # fmt: skip
    return Measured(cell, {"wrong": 0, "total_ns": [[int(ms * 1e6)] * 3 for ms in totals_ms]})


READY = Measured(
    {"kind": "ReadyGradients", "panel": "(d) net", "ranks": 1},
    {"ready_ns": [[10**6, 10**8]] * 3, "parameters": 6_000_000, "sizes": [3_000_000] * 2},
)
FIGURES = {
    "fig2": [sweep("host", (10.1, 10, 10)), sweep("gloo", (90, 31, 30)), READY],
    "fig6": [
        iterations("net, host", 2, {"no overlap": 100, "overlap": 100}, communication=0.1),
        iterations("net, gloo", 2, {"no overlap": 100, "overlap": 70}),
    ],
    "fig7": [iterations("net, host", 2, {"0 MB": 100, "25 MB": 40})],
    "fig8": [iterations("net, host", 4, {"0 MB": 150, "25 MB": 41})],
    "fig9": [iterations("net", 1, {"local": 50}), iterations("net, host", 2, {"host": 100})],
    "fig10": [iterations("net, host", 2, {"every 1": 100, "every 8": 60})],
    "fig11": [losses("(a)", 1, 0.5), losses("(a)", 8, 0.5), losses("(b)", 1, 0.5), losses("(b)", 8, 0.5)],
    "fig12": [iterations("net, host", 2, {"rr1": 100, "rr3": 67, "rr5": 70})],
}


def test_each_statement_is_judged_by_what_was_measured():
    lines = [line.strip("| ") for line in report_lines(FIGURES, ENVIRONMENT) if line.startswith("| ")]
    assert [tuple(line.split(" | ")) for line in lines if not line.startswith("where")] == [
        (
            "(b) host, 2 ranks",
            "1,000 parameters at a time take 1.0 times as long as the best; 0.0038 MB are enough",
            "does not, because calls are cheap: 2 us each",
        ),
        (
            "(b) gloo, 2 ranks",
            "1,000 parameters at a time take 3.0 times as long as the best; 1 MB are enough",
            "holds",
        ),
        (
            "(b) host, 2 ranks",
            "backward 100 ms, its all-reduces 10 ms",
            "does not, because one is 10 times the other",
        ),
        (
            "(b) gloo, 2 ranks",
            "backward 100 ms, its all-reduces 30 ms",
            "holds",
        ),
        (
            "net, host, 2 ranks",
            "0.0% faster",
            "does not, because communication is 10% of an iteration without overlap: no more can be saved",
        ),
        (
            "net, gloo, 2 ranks",
            "30.0% faster",
            "holds",
        ),
        (
            "net, host, 2 ranks",
            "backward is 70% of an iteration, of that 14% sent",
            "does not, because the ranks compute for 60 ms of 70 ms",
        ),
        (
            "net, gloo, 2 ranks",
            "backward is 70% of an iteration, of that 57% sent",
            "holds",
        ),
        (
            "net, host, 2 ranks",
            "25 MB is 2.50 times as fast as 0 MB",
            "holds",
        ),
        (
            "net, host, 4 ranks",
            "from 2 ranks on: 0 MB +50%, 25 MB +2%",
            "holds",
        ),
        (
            "net, host, 2 ranks",
            "2.00 times local",
        ),
        (
            "net, host, 2 ranks",
            "40.0% faster",
            "holds",
        ),
        (
            "(a)",
            "loss at the end 0.500 every iteration, 0.500 every 8",
            "holds",
        ),
        (
            "(b)",
            "loss at the end 0.500 every iteration, 0.500 every 8",
            "does not",
        ),
        (
            "net, host, 2 ranks",
            "rr3 takes 0.67 times as long as rr1",
            "holds",
        ),
    ]


def test_advice():
    lines = list(report_lines(FIGURES, ENVIRONMENT))
    assert "- net, host, 2 ranks: buckets of 25 MB." in lines
    assert "- net, host, 2 ranks: accumulate gradients; every 8 iterations saves 40%." in lines
    assert "- net, host, 2 ranks: as fast as 1.0 single ranks." in lines


def test_what_was_not_measured_is_said():
    lines = list(report_lines({}, ENVIRONMENT))
    assert len([line for line in lines if line.startswith("Not measured: no fig")]) == len(STATEMENTS)
