"""The report, of samples that are given."""

from __future__ import annotations

import pytest

from collectives.bench.core.page import write_page
from collectives.bench.paper.cells import PHASES, Measured
from collectives.bench.paper.figures import FiguresReport, Report
from collectives.bench.paper.report import report_text

ENVIRONMENT = {
    "cpu": "a processor", "cores_usable": 2, "collectives": "0", "torch": "1", "python": "2",
    "system": "a system", "memory_bytes": 2**30, "load_average_1min": 0.25, "host": "a host",
    "cores_online": 2, "cache_last_level_bytes": None, "architecture": "one",
}  # fmt: skip
OPTIONS = {
    "device": "cpu", "backends": ["host", "gloo"], "batch": None, "lengths": [], "budget": 60.0,
    "machines": 1, "link": None, "quick": False,
}  # fmt: skip


def iterations(panel, ranks, times, communication=0.4, *, parameters=10, device="cpu"):
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
        "device": device, "series": [{"name": name, "group": "host", "bucket_mb": 0} for name in times],
    }  # fmt: skip
    return Measured(cell, {"sizes": [parameters], "series": series})


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
    {"kind": "ReadyGradients", "panel": "(d) net", "ranks": 1, "model": "net"},
    {"ready_ns": [[10**6, 10**8]] * 3, "parameters": 6_000_000, "sizes": [3_000_000] * 2},
)
SIZES = {"0 MB": 100, "5 MB": 60, "10 MB": 50, "25 MB": 40, "50 MB": 45}
FIGURES = {
    "fig2": [sweep("host", (10.1, 10, 10)), sweep("gloo", (90, 31, 30)), READY],
    "fig6": [
        iterations("net, host", 2, {"no overlap": 100, "overlap": 100}, communication=0.1),
        iterations("net, gloo", 2, {"no overlap": 100, "overlap": 70}),
    ],
    "fig7": [iterations("net, host", 2, SIZES)],
    "fig8": [iterations("net, host", 4, {"0 MB": 121, "25 MB": 41})],
    "fig9": [iterations("net", 1, {"local": 50}), iterations("net, host", 2, {"host": 100})],
    "fig10": [iterations("net, host", 2, {"every 1": 100, "every 8": 60})],
    "fig11": [losses("(a)", 1, 0.5), losses("(a)", 8, 0.5), losses("(b)", 1, 0.5), losses("(b)", 8, 0.5)],
    "fig12": [iterations("net, host", 2, {"rr1": 100, "rr3": 67, "rr5": 70})],
}


def kept_figures(figures, **options):
    made = {**OPTIONS, **options}
    return {name: Report(f"paper {name}", ENVIRONMENT, made, records) for name, records in figures.items()}


def report(figures, **options):
    """The lines of the report on such figures."""
    return report_text(kept_figures(figures, **options)).splitlines()


def statement(number, figures):
    """What the report says to one of the statements: the rows of its table, and the lines below."""
    lines = report(figures)
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"### {number}. "))
    part = lines[begin : next(i for i in range(begin + 1, len(lines)) if lines[i].startswith("##"))]
    rows = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in part if "| " in line]
    return [row for row in rows if row[0].strip() != "where"], [line for line in part if line][-1].strip()


def gpus(model, backend, ranks, times, **named):
    return iterations(f"{model}, {backend}", ranks, times, device="cuda", **named)


def test_the_rules_stand_before_the_data():
    lines = report(FIGURES)
    assert lines.index("## How a statement is judged") < lines.index("## The statements")
    command = "collectives bench paper fig2 --device cpu --backends host,gloo --budget 60 --json DIR"
    assert f"| fig2 | 0.2 | `{command}` |" in lines
    assert len([line for line in lines if line.startswith("### ")]) == 22
    assert not any("--quick" in line for line in lines)
    assert any("--quick" in line for line in report(FIGURES, quick=True))


def test_the_figures_become_one_page(tmp_path):
    pytest.importorskip("plotly")
    pytest.importorskip("scipy")
    kept = kept_figures(FIGURES)
    about = {name: figure.command() for name, figure in kept.items()}
    made = FiguresReport("paper", ENVIRONMENT, about, figures=kept)
    page = tmp_path / "page.html"
    write_page(page, made, "collectives bench paper all --html page.html")
    text = page.read_text("utf-8")
    charts = {chart.title: chart for chart in made.charts()}
    assert text.count("Plotly.newPlot(") == len(charts) == 11
    for part in ("fig2: all-reduces", "fig2: ready gradients", "fig7: iterations", "fig11: losses"):
        assert f"<h2>{part}</h2>" in text
    assert [curve.name for curve in charts["fig6: net, gloo, 2 ranks"].curves][:2] == ["forward", "backward"]
    (measured,) = charts["fig9: net, host"].curves
    assert (measured.at, measured.values) == ((1, 2), [0.05, 0.1])
    boxes, rebuilt = charts["fig7: net, host, 2 ranks"].curves
    assert list(boxes.at) == ["0"] * 25
    assert rebuilt.values == [1000.0] * 5


def test_what_was_not_measured_is_said():
    lines = report({"fig6": FIGURES["fig6"]})
    assert "Cannot be tried on these ranks: no samples of fig2. There:" in lines
    rows, command = statement(14, FIGURES)
    assert rows == []
    assert command == "srun -n 256 collectives bench paper fig9 --device cuda --json DIR"


def test_all_reduces_by_size():
    assert statement(4, FIGURES)[0] == [
        (
            "(b) host, 2 ranks",
            "within 10% of the best from 1,000 parameters on; 1,000 at a time take 1.0 times as long",
            "",
        ),
        (
            "(b) gloo, 2 ranks",
            "within 10% of the best from 262,144 parameters on; 1,000 at a time take 3.0 times as long",
            "holds",
        ),
    ]
    assert statement(4, {"fig2": [sweep("gloo", (31, 30, 30))]})[0][0][2] == (
        "does not, because each all-reduce of 1,000 takes 5 us, many under way at once"
    )
    assert [
        statement(4, {"fig2": [sweep("nccl", totals)]})[0][0][2] for totals in ((9, 8, 7), (9, 7, 8))
    ] == ["holds", "does not, because 262,144 are faster than 2,000,000"]
    assert [row[1:] for row in statement(5, FIGURES)[0]] == [
        ("backward 100 ms, its all-reduces 10 ms", "does not, because one is 10 times the other"),
        ("backward 100 ms, its all-reduces 30 ms", "holds"),
    ]
    assert statement(11, FIGURES)[0] == [
        ("(b) host, 2 ranks", "totals beyond 512 KB differ by 0%", ""),
        ("(b) gloo, 2 ranks", "totals beyond 512 KB differ by 3%", "holds"),
        ("net", "spread of an iteration: host 0%", ""),
    ]
    uneven = {**FIGURES, "fig2": [sweep("gloo", (90, 50, 30))]}
    assert statement(11, uneven)[0][0][2] == "does not, because 262,144 parameters at a time take longest"


def test_overlap():
    assert statement(7, FIGURES)[0] == []
    on_gpus = {"fig6": [gpus("net", "nccl", 2, {"no overlap": 100, "overlap": 88})]}
    assert statement(7, on_gpus)[0] == [("net, nccl, 2 ranks", "12.0% less time", "holds")]
    assert statement(8, FIGURES)[0] == [
        (
            "net, host, 2 ranks",
            "0.0% less time",
            (
                "does not, because waiting for communication takes 10 ms without overlap and 10 ms with it, "
                "backward beside it takes 60 ms without overlap and 60 ms with it"
            ),
        ),
        ("net, gloo, 2 ranks", "30.0% less time", "holds"),
    ]
    assert [row[1:] for row in statement(9, FIGURES)[0]] == [
        ("backward with communication is 70% of an iteration", "holds"),
        ("communication is 14% of it", "does not, because the ranks compute for 60 ms of 70 ms"),
        ("backward with communication is 70% of an iteration", "holds"),
        ("communication is 57% of it", "holds"),
    ]


def test_what_grows_with_the_model():
    both = {
        "fig6": [
            iterations("resnet50, gloo", 2, {"no overlap": 100, "overlap": 90}, 0.2, parameters=20),
            iterations("bert-base, gloo", 2, {"no overlap": 100, "overlap": 70}, 0.35, parameters=300),
        ]
    }
    assert statement(9, both)[0][-2:] == [
        ("gloo: grows with the model", "resnet50 20%, bert-base 35%", "holds"),
        (
            "gloo: most where balanced",
            "overlap saves most with bert-base, bert-base is nearest to balance",
            "holds",
        ),
    ]
    assert statement(12, both)[0] == [
        ("bert-base, resnet50", "0.0 M against 0.0 M parameters: 15.0 times", "holds")
    ]
    assert statement(12, FIGURES) == ([], "collectives bench paper all --json DIR")


def test_bucket_sizes():
    assert statement(2, FIGURES)[0] == [
        ("net, host, 2 ranks", "25 MB is 2.50 times as fast as 0 MB", "holds")
    ]
    assert statement(6, FIGURES)[0] == [("net, host, 2 ranks", "0.0% more time than 25 MB", "holds")]
    flat = {"fig7": [iterations("net, host", 2, {**SIZES, "0 MB": 70, "5 MB": 35})]}
    assert statement(2, flat)[0][0][2].startswith(
        "does not, because what overlap leaves of communication is 40%"
    )
    assert statement(6, flat)[0][0][1:] == (
        "14.3% more time than 5 MB",
        "does not, because 5 MB takes that much less",
    )
    for model, backend, sizes, result in (
        ("resnet50", "gloo", {**SIZES, "5 MB": 39}, "holds"),
        ("resnet50", "torch:gloo", SIZES, "does not, because 25 MB is faster than 5 MB"),
        ("bert-base", "gloo", dict.fromkeys(SIZES, 50),
         "does not, because no size from 5 MB on is noticeably faster than another"),
        ("resnet50", "nccl", SIZES, "holds"),
        ("bert-base", "nccl", SIZES, "does not, because 25 MB is faster than 50 MB"),
        ("resnet50", "host", SIZES, ""),
    ):  # fmt: skip
        (row,) = statement(10, {"fig7": [iterations(f"{model}, {backend}", 2, sizes)]})[0]
        assert row[2] == result


def test_the_best_bucket_grows_sublinearly():
    few = iterations("resnet50, gloo", 2, {**SIZES, "5 MB": 30}, parameters=20)
    many = iterations("bert-base, gloo", 2, SIZES, parameters=200)
    figures = {"fig7": [few, many], "fig9": FIGURES["fig9"]}
    assert statement(21, figures)[0][-1] == (
        "gloo",
        "5 MB for resnet50, 25 MB for bert-base of 10.0 times the parameters",
        "holds",
    )
    figures["fig7"] = [iterations("resnet50, gloo", 2, SIZES, parameters=300), many]
    assert statement(21, figures)[0][-1][2] == "holds"
    figures["fig7"] = [iterations("resnet50, gloo", 2, {**SIZES, "5 MB": 30}, parameters=300), many]
    assert statement(21, figures)[0][-1][2] == "does not, because the larger model wants smaller buckets"


def test_more_ranks():
    assert statement(13, FIGURES)[0] == [
        ("net, host, 4 ranks", "from 2 ranks on: 0 MB +21%, 25 MB +2%", "holds")
    ]
    shared = {**FIGURES, "fig8": [iterations("net, host", 4, {"0 MB": 160, "25 MB": 80})]}
    assert statement(13, shared)[0] == [
        (
            "net, host, 4 ranks",
            "from 2 ranks on: 0 MB +60%, 25 MB +100%; ranks share cores: forward, which sends nothing, +60%",
            "",
        )
    ]
    alone = [iterations("net", 1, {"local": 50}), iterations("resnet50", 1, {"local": 50})]
    nine = [
        *alone,
        gpus("resnet50", "nccl", 256, {"nccl": 100}),
        gpus("resnet50", "gloo", 256, {"gloo": 300}),
    ]
    assert statement(1, {"fig9": nine})[0] == [
        ("resnet50, nccl, 256 ranks", "worth 128.00 single ranks", "holds"),
        ("resnet50, gloo, 256 ranks", "worth 42.67 single ranks", "does not, because 17% of them"),
    ]
    assert statement(1, FIGURES)[0] == [("net, host, 2 ranks", "worth 1.00 single ranks", "")]
    assert statement(14, {"fig9": nine})[0] == [("resnet50, nccl, 256 ranks", "2.00 times local", "holds")]
    assert statement(15, {"fig9": nine})[0] == [
        (
            "resnet50, gloo, 256 ranks",
            "6.00 times local",
            "does not, because overlap leaves 40% of an iteration to communication",
        )
    ]
    assert statement(21, {"fig9": nine, "fig7": FIGURES["fig7"]})[0] == [
        ("resnet50, 256 ranks", "nccl 100 ms, gloo 300 ms", "holds")
    ]
    links = [gpus("bert-base", "nccl", ranks, {"nccl": ms}) for ranks, ms in ((16, 120), (32, 100))]
    assert statement(16, {"fig9": links})[0] == [
        ("bert-base, nccl", "16 GPUs 120 ms, 32 GPUs 100 ms", "holds")
    ]


def test_skipped_synchronisations():
    assert statement(17, FIGURES)[0] == [("net, host, 2 ranks", "40.0% less time", "holds")]
    slower = {"fig10": [iterations("net, host", 2, {"every 1": 100, "every 8": 105})]}
    assert statement(17, slower)[0][0][1:] == (
        "5.0% more time",
        "does not, because overlap leaves 40% of an iteration to communication and waiting",
    )
    jump = [
        gpus("net", "nccl", ranks, {"every 1": ms, "every 8": 50})
        for ranks, ms in ((128, 100), (256, 140))
    ]  # fmt: skip
    assert statement(18, {"fig10": jump})[0] == [
        (
            "net, nccl",
            "every 1 +40%, every 8 +0%",
            "does not, because iterations grow by less than a jump with some of the intervals",
        )
    ]
    assert statement(19, FIGURES)[0] == [
        ("(a)", "every 1: 0.500; every 8: 0.500", "holds"),
        (
            "(b)",
            "every 1: 0.500; every 8: 0.500",
            "does not, because the loss of every 8 is +0% from that of every 1",
        ),
    ]


def test_groups_in_turn():
    times = {"rr1": 100, "rr3": 67, "rr5": 70}
    for model, backend, result in (
        ("net", "host", ""),
        ("resnet50", "gloo", "holds"),
        ("bert-base", "nccl", "holds"),
        ("resnet50", "nccl", "does not, because the groups' times differ noticeably"),
    ):
        (row,) = statement(20, {"fig12": [iterations(f"{model}, {backend}", 2, times)]})[0]
        assert row[1:] == ("three groups take 33.0% less time than one", result)


def test_advice():
    lines = report(FIGURES)
    slower = "0 MB takes 150% longer; 5 MB takes 50% longer; 10 MB takes 25% longer; 50 MB takes 12% longer"
    default = "buckets of 25 MB, the default, as no size is noticeably faster"
    assert f"- net, host, 2 ranks: {default}; {slower}." in lines
    assert "- net, host, 2 ranks: accumulate gradients; every 8 iterations saves 40%." in lines
    assert "- net, host, 2 ranks: worth 1.00 single ranks." in lines


@pytest.mark.parametrize(
    ("times", "advice"),
    [
        ({"0 MB": 98, "25 MB": 100}, "buckets of 25 MB, the default, as no size is noticeably faster"),
        (
            {"0 MB": 130, "25 MB": 100, "50 MB": 95},
            "buckets of 25 MB, the default, as no size is noticeably faster; 0 MB takes 30% longer",
        ),
        ({"0 MB": 80, "25 MB": 100}, "buckets of 0 MB, which save 20% over 25 MB"),
    ],
)
def test_advice_on_buckets(times, advice):
    """A size that is faster by chance is none to advise, least of all an all-reduce for each gradient."""
    lines = report({**FIGURES, "fig7": [iterations("net, host", 2, times)]})
    assert f"- net, host, 2 ranks: {advice}." in lines
