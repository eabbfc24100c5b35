"""``collectives bench paper`` as users run it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_team import find_installations
from ports import free_port

from collectives.bench.core.devices import describe_machine
from collectives.bench.paper import command
from collectives.bench.paper.cells import PHASES
from collectives.bench.paper.command import cells_of
from collectives.bench.paper.figures import FIGURES, INTERVALS, LANES, Options, Report
from collectives.cli import CommandError, main

SMALL = ["--quick", "--models", "small", "--batch", "1", "--backends", "host", "--budget", "0.1"]


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def figure(name, folder, *words):
    pytest.importorskip("plotly")
    page = folder / f"{name}.html"
    files = ["--json", str(folder), "--html", str(page)]
    assert main(["bench", "paper", name, *SMALL, *files, *words]) == 0
    text = page.read_text("utf-8")
    assert "Plotly.newPlot(" in text
    assert f"<h2>{name}: " in text
    return json.loads((folder / f"{name}.json").read_text())


def check_iterations(record):
    """The kept samples are whole: as many of each phase, which add up, and of each series."""
    lengths = {len(times["iteration"]) for times in record["samples"]["series"]}
    assert len(lengths) == 1
    assert not lengths.pop() % max(series["interval"] for series in record["cell"]["series"])
    for series, times in zip(record["cell"]["series"], record["samples"]["series"], strict=True):
        whole = times["iteration"]
        assert len(whole) >= 6
        assert times["rebuilt"][0] == 0
        assert len(times["rebuilt"]) >= 2
        for i, ns in enumerate(whole):
            assert sum(times[phase][i] for phase in PHASES) == pytest.approx(ns, rel=1e-6), series


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.timeout(300)  # each cell starts ranks, on however busy a machine
class TestFigures:
    @pytest.mark.full
    def test_fig2_and_what_fig7_takes_from_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr("collectives.bench.paper.figures.QUICK_COUNTS", (10_000, 100_000))
        monkeypatch.setattr("collectives.bench.paper.figures.QUICK_PARAMETERS", 250_000)
        plain = figure("fig2", tmp_path, "--backends", "host,torch:gloo")
        *sweeps, ready = plain["records"]
        assert [record["cell"]["backend"] for record in sweeps] == ["host", "torch:gloo"]
        for record in sweeps:
            assert record["samples"]["wrong"] == 0
            assert [len(calls) for calls in record["samples"]["total_ns"]] == [
                len(record["samples"]["total_ns"][0])
            ] * len(record["cell"]["counts"])
        passes = ready["samples"]["ready_ns"]
        assert {len(times) for times in passes} == {len(ready["samples"]["sizes"])}
        assert all(times == sorted(times) for times in passes)

        sweeps[0]["cell"] |= {"counts": [10_000, 262_144 * 3]}
        sweeps[0]["samples"]["total_ns"] = [[30, 30, 30], [10, 10, 10]]
        (tmp_path / "fig2.json").write_text(json.dumps(plain))
        plain = figure("fig7", tmp_path)
        (record,) = plain["records"]
        assert [series["bucket_mb"] for series in record["cell"]["series"]] == [0, 3, 5, 10, 25, 50]
        check_iterations(record)

    @pytest.mark.full
    @pytest.mark.parametrize(
        ("name", "ranks", "what", "series"),
        [
            ("fig6", [2], "name", ["no overlap", "overlap", "all-reduce a parameter", "parameter averaging"]),
            ("fig9", [1, 2], "name", ["host"]),
            ("fig10", [2], "interval", list(INTERVALS)),
            ("fig12", [2], "group", [f"round_robin:{lanes}:host" for lanes in LANES]),
        ],
    )
    def test_figures_of_iterations(self, name, ranks, what, series, tmp_path):
        records = figure(name, tmp_path)["records"]
        assert [record["cell"]["ranks"] for record in records] == ranks
        assert [one[what] for one in records[-1]["cell"]["series"]] == series
        for record in records:
            check_iterations(record)

    @pytest.mark.full
    def test_fig11_keeps_every_loss_and_goes_on_after_an_interrupt(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("collectives.bench.paper.figures.RATES", {"a": (0.02, 4)})
        keep = command._keep
        kept = []

        def keep_two(file, report):
            keep(file, report)
            kept.append(len(report.records))
            if len(kept) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(command, "_keep", keep_two)
        words = ["bench", "paper", "fig11", *SMALL, "--json", str(tmp_path)]
        assert main(words) == 130
        first = json.loads((tmp_path / "fig11.json").read_text())["records"]
        assert [record["cell"]["interval"] for record in first] == [1, 2]

        records = figure("fig11", tmp_path)["records"]
        assert kept == [1, 2, 3, 4]
        assert records[:2] == first
        for record, interval in zip(records, INTERVALS, strict=True):
            assert record["cell"]["interval"] == interval
            assert len(record["samples"]["losses"]) == record["cell"]["iterations"]
        # Only the step at the end of an interval changes what the first loss of all is.
        assert len({record["samples"]["losses"][0] for record in records}) == 1
        assert records[0]["samples"]["losses"][1] != records[1]["samples"]["losses"][1]

        capsys.readouterr()
        figure("fig11", tmp_path)  # nothing is left to measure
        assert "starting ranks" not in capsys.readouterr().err
        assert kept == [1, 2, 3, 4]

        plain = json.loads((tmp_path / "fig11.json").read_text())
        plain["environment"]["cpu"] = "another"
        (tmp_path / "fig11.json").write_text(json.dumps(plain))
        assert main(words) == 1
        assert "was measured with cpu another" in capsys.readouterr().err


def test_kept_figures_become_one_page(tmp_path, capsys):
    pytest.importorskip("plotly")
    pytest.importorskip("scipy")
    page = tmp_path / "page.html"
    kept = Path(__file__).parents[3] / "docs" / "paper"
    assert main(["bench", "paper", "report", "--json", str(kept), "--html", str(page)]) == 0
    text = page.read_text("utf-8")
    for name in ("fig2", "fig6", "fig7", "fig9", "fig10", "fig11", "fig12"):
        assert f"<h2>{name}: " in text
        assert f'"text":"{name}: ' in text
        assert f"<td>collectives bench paper {name} " in text


def test_figures_that_cannot_be_drawn_are_told_in_a_line(tmp_path, capsys, monkeypatch):
    def fail(report, arguments):
        raise KeyError("rebuilt")

    monkeypatch.setattr(command, "write_html", fail)
    kept = Path(__file__).parents[3] / "docs" / "paper"
    assert main(["bench", "paper", "report", "--json", str(kept)]) == 1
    assert capsys.readouterr().err == "collectives: 'rebuilt'\n"


def test_samples_of_a_quick_run_are_not_mixed_with_others(tmp_path, capsys):
    kept = {
        "schema": 1, "program": "paper fig6", "environment": describe_machine(),
        "options": {"machines": 1, "link": None, "quick": True}, "records": [],
    }  # fmt: skip
    (tmp_path / "fig6.json").write_text(json.dumps(kept))
    assert main(["bench", "paper", "fig6", "--models", "small", "--json", str(tmp_path)]) == 1
    assert "was measured with quick True, but here it is False" in capsys.readouterr().err


def test_the_report_needs_figures(tmp_path, capsys):
    assert main(["bench", "paper", "report", "--json", str(tmp_path)]) == 1
    assert "keeps no figure" in capsys.readouterr().err
    for name, cpu in (("fig6", "one"), ("fig7", "another")):
        kept = {"records": [], "environment": {"cpu": cpu}, "options": {}}
        (tmp_path / f"{name}.json").write_text(json.dumps(kept))
    assert main(["bench", "paper", "report", "--json", str(tmp_path)]) == 1
    assert "differ in cpu: another, one" in capsys.readouterr().err


def test_missing_packages_are_named_with_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    arguments = argparse.Namespace(figure="fig11", html=tmp_path / "page.html", images="")
    with pytest.raises(CommandError, match=r"scipy, sklearn, not installed.*torch-collectives\[paper\]"):
        command._check_packages(["fig11"], arguments)
    assert main(["bench", "paper", "fig6"]) == 1
    err = capsys.readouterr().err
    assert "resnet50: needs transformers" in err
    assert "torch-collectives[paper]" in err


def test_every_figure_has_cells_for_the_papers_models():
    options = Options(
        backends=("host", "torch:gloo"), ranks=(2, 4), lengths=(("resnet152", 96),), iterations=80
    )
    assert cells_of("fig2", options)[-1].as_json()["length"] == 96
    assert cells_of("fig6", options)[0].as_json()["length"] == 64
    on_gpus = dataclasses.replace(options, device="cuda")
    assert cells_of("fig6", on_gpus)[0].as_json()["length"] == 224
    assert {cell.as_json()["iterations"] for cell in cells_of("fig11", options)} == {80}
    for name in FIGURES:
        cells = cells_of(name, options)
        assert cells, name
        keys = [json.dumps(cell.as_json(), sort_keys=True) for cell in cells]
        assert len(set(keys)) == len(keys), f"two cells of {name} are the same"
        assert {cell.ranks for cell in cells} <= {1, 2, 4}


@pytest.mark.parametrize(
    ("models", "ready", "words"),
    [((), "resnet152", ""), (("resnet50", "bert-base"), "resnet50", " --models resnet50,bert-base")],
)
def test_a_report_names_the_command_that_measures_the_same(models, ready, words):
    """Without --models, figure 2 looks at another model than the first one of the others."""
    options = Options(backends=("host",), models=models, ranks=(2, 4), lengths=(("small", 8),), budget_s=60.0)
    assert options.ready_model == ready
    kept = Report("paper fig2", {}, json.loads(json.dumps(options.asked())))
    assert kept.command() == (
        f"collectives bench paper fig2 --device cpu --backends host{words} --nproc 2,4 --lengths small=8 "
        "--budget 60 --json DIR"
    )


WORDS = ["bench", "paper", "fig12", *SMALL]


def check_launched(done, folder):
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = json.loads((folder / "fig12.json").read_text())["records"]
    assert record["cell"]["ranks"] == 2
    check_iterations(record)
    assert done.stdout.count("# paper fig12") == 1, "more than one process printed"


@pytest.mark.full
def test_under_torchrun(tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "collectives"]
    done = subprocess.run(
        [sys.executable, *words, *WORDS, "--json", str(tmp_path)], capture_output=True, text=True, check=False
    )
    check_launched(done, tmp_path)


@pytest.mark.full
def test_under_mpirun(tmp_path):
    found = find_installations()
    if not found or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs an MPI and mpi4py")
    environment = {**os.environ, **found[0].environment(str(tmp_path))}
    words = [*found[0].command(2), sys.executable, "-m", "collectives", *WORDS, "--json", str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    check_launched(done, tmp_path)


@pytest.mark.full
def test_mpi_begins_on_ranks_that_a_cell_leaves_out_too(tmp_path):
    """MPI_Init returns on no process before all of mpirun's have called it."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs an MPI and mpi4py")
    words = ["bench", "paper", "fig9", *SMALL, "--backends", "mpi", "--nproc", "2,3", "--json", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "collectives", *words], capture_output=True, text=True, check=False, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "fig9.json").read_text())["records"]
    assert [record["cell"]["ranks"] for record in records] == [1, 2, 3]


def run_steps(command, folder):
    """Runs a command as two processes of ``srun``; returns what they print, and their statuses.

    Of Slurm there is only what ``srun`` tells its processes, and ``scontrol`` which nodes there are.
    """
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    scontrol = bin_folder / "scontrol"
    scontrol.write_text("#!/bin/sh\necho localhost\n")
    scontrol.chmod(0o755)
    slurm = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": "7",
        "MASTER_PORT": str(free_port()),
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
    }
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate()[0] for process in started]
    return outputs, [process.returncode for process in started]


@pytest.mark.full
def test_under_srun(tmp_path):
    command = [sys.executable, "-m", "collectives", *WORDS, "--json", str(tmp_path)]
    outputs, statuses = run_steps(command, tmp_path)
    assert statuses[1] == 0, outputs
    check_launched(subprocess.CompletedProcess(command, statuses[0], "".join(outputs), ""), tmp_path)


FAILING = """
import sys

from collectives.bench.paper.cells import Iterations
from collectives.bench.paper.command import cells_of
from collectives.cli import CommandError, main

measure = Iterations.measure


def failing(cell, place, budget_s):
    if place.rank == int(sys.argv[1]):
        raise ValueError("no samples today")
    return measure(cell, place, budget_s)


Iterations.measure = failing
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.full
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_ends_the_others(failing, tmp_path):
    """The others hear of it; they do not wait until the time limit of an operation is over."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    command = [sys.executable, str(script), str(failing), *WORDS]
    outputs, statuses = run_steps(command, tmp_path)
    assert statuses == [1, 1], outputs
    assert "ValueError: no samples today" in outputs[failing]
    assert f"rank {1 - failing} ended with another" in outputs[1 - failing]
    assert "CollectiveTimeoutError" not in "".join(outputs)
