"""``collectives demo`` as users run it, and how it fails."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from bench_reports import read_report

from collectives.bench import allreduce, demo
from collectives.bench.allreduce import Record, Report
from collectives.bench.core.devices import describe_machine
from collectives.bench.core.records import Skipped, Timing
from collectives.bench.models import (
    batches,
    build_model,
    digits_optimizer,
    flat_parameters,
    load_digits,
    train_digits,
)
from collectives.cli import main

pytestmark = pytest.mark.usefixtures("preloaded_python")

OUTCOME = demo.Outcome(
    ranks=2,
    lanes=3,
    steps=300,
    train_images=1437,
    test_images=360,
    test_accuracy=0.98,
    compared_steps=50,
    max_abs_difference=1e-7,
    ranks_identical=True,
    train_s=1.0,
)


@pytest.fixture(scope="module")
def digits():
    return load_digits()


def descendants(pid):
    """Returns the processes below one, from /proc."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if stat[0] != "Z":
            parents[int(folder.name)] = int(stat[1])
    found = [pid]
    for parent in found:
        found += [child for child, above in parents.items() if above == parent]
    return set(found[1:])


def test_a_fifth_of_every_digit_is_held_out(digits):
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.train.tensors[0].shape[1:] == (1, 8, 8)
    whole = torch.bincount(torch.cat([digits.train.tensors[1], digits.test.tensors[1]]))
    assert (torch.bincount(digits.test.tensors[1]) - whole / 5).abs().max() <= 1
    assert torch.equal(load_digits().test.tensors[0], digits.test.tensors[0])
    assert float(digits.train.tensors[0].max()) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_of_a_step_are_equal_and_cover_an_epoch(digits, size):
    def first_steps():
        shares = (islice(batches(digits.train, 20, rank, size), 30) for rank in range(size))
        return list(zip(*shares, strict=True))

    steps = first_steps()
    assert len(steps) == 30
    assert all(len({len(share) for share in step}) == 1 for step in steps)
    epoch = math.ceil(math.ceil(1437 / size) / 20)
    if epoch <= 30:
        seen = {place for step in steps[:epoch] for share in step for place in share}
        assert seen == set(range(1437))
    assert steps == first_steps()


def test_training_in_one_process_is_the_mean_over_shares(digits):
    shares = [islice(batches(digits.train, 16, rank, 2), 8) for rank in range(2)]
    alone = demo.train_alone(2, 16, 8)

    model = build_model(seed=0)
    optimizer = digits_optimizer(model.parameters())
    images, labels = digits.train.tensors
    for step in zip(*shares, strict=True):
        optimizer.zero_grad()
        for share in step:
            (torch.nn.functional.cross_entropy(model(images[share]), labels[share]) / 2).backward()
        optimizer.step()
    assert (flat_parameters(model) - alone).abs().max() < 1e-6


@pytest.mark.full
def test_training_lowers_the_loss(digits):
    losses = []
    train_digits(
        build_model(0),
        digits.train,
        islice(batches(digits.train, 64, 0, 1), 120),
        lambda step, loss: losses.append(loss),
    )
    assert len(losses) == 120
    assert sum(losses[-5:]) < sum(losses[:5]) / 2


@pytest.mark.full
def test_the_demo(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(demo, "SWEEP_BUDGET_S", 0.5)
    names = ("gloo", "host", "round_robin")  # not those that other tests register in this process alone
    monkeypatch.setattr(allreduce, "backend_names", lambda: names)
    threads = torch.get_num_threads()
    try:
        status = main(["demo", "--sizes", "8,64K", "--out", str(tmp_path / "new")])
    finally:
        torch.set_num_threads(threads)
    out, err = capfd.readouterr()
    assert status == 0, out + err
    assert "test accuracy" in out
    assert "bitwise the same" in out
    assert "all_reduce by host, 2 ranks" in out
    assert "all_reduce by gloo, 2 ranks" in out

    path = tmp_path / "new" / "collectives-demo.json"
    training = json.loads(path.read_text())["training"]
    assert training["test_accuracy"] >= 0.95
    assert training["max_abs_difference"] <= 1e-5
    assert training["max_abs_difference"] > 0 or training["ranks"] == 1
    assert (training["compared_steps"], training["lanes"], training["ranks_identical"]) == (50, 3, True)
    report = read_report(path)
    assert report.program == "demo"
    assert {record.size_bytes for record in report.records} == {8, 65536}
    assert {"host", "gloo", "round_robin"} <= {record.peer for record in report.records}
    assert all(record.wrong_elements == 0 for record in report.records)
    assert "Plotly.newPlot(" in path.with_suffix(".html").read_text("utf-8")


def test_a_failed_check_fails_the_demo_after_all_is_told(tmp_path, monkeypatch, capsys):
    timing = Timing(1, 1.0, 1.0, 1.0, 1.0, 1.0)
    record = Record("all_reduce", "host", 2, 8, 2, "float32", "sum", True, timing, 5, timing, 0)
    report = Report("demo", describe_machine(), {}, [record], [Skipped("mpi", "not here", "pip install it")])
    monkeypatch.setattr(demo, "train_in_parallel", lambda ranks, steps: replace(OUTCOME, test_accuracy=0.5))
    monkeypatch.setattr(demo, "measure", lambda options, progress, program: report)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "FAILED: test accuracy: 50.00% of 360 images (must be 95% or more)" in printed.err
    assert "FAILED: 5 elements of all-reduce results were wrong" in printed.err
    assert "# skipped mpi: not here" in printed.out
    assert "#   to add it: pip install it" in printed.out
    assert json.loads((tmp_path / "collectives-demo.json").read_text())["training"]["test_accuracy"] == 0.5
    assert (tmp_path / "collectives-demo.html").exists()


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("test_accuracy", 0.9499, "must be 95% or more"),
        ("test_accuracy", math.nan, "must be 95% or more"),
        ("max_abs_difference", 1.1e-5, "at most 1e-05 is rounding"),
        ("max_abs_difference", math.nan, "at most 1e-05 is rounding"),
        ("ranks_identical", False, "DIFFERENT"),
    ],
)
def test_what_the_checks_refuse(field, value, complaint):
    assert all(holds for _, _, holds in demo.checks(OUTCOME))
    (told,) = [found for _, found, holds in demo.checks(replace(OUTCOME, **{field: value})) if not holds]
    assert complaint in told


@pytest.mark.full
def test_ctrl_c_ends_the_demo_and_its_ranks(tmp_path, fresh_python):
    command = [
        sys.executable,
        "-m",
        "collectives",
        "demo",
        "--steps",
        "100000",
        "--out",
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True
    ) as process:
        assert process.stderr is not None
        seen = b""
        while b"loss=" not in seen:  # the training is under way
            chunk = process.stderr.read1()
            assert chunk, seen.decode()
            seen += chunk
        ranks = descendants(process.pid)
        assert len(ranks) >= 2
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        rest = process.stderr.read().decode()
        assert process.wait(timeout=30) == 130
    assert b"# training: step " in seen
    assert rest.endswith("collectives: interrupted\n")
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/exe").exists() for pid in ranks):
        assert time.monotonic() < deadline, "ranks outlive the demo"
        time.sleep(0.05)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_sizes_that_cannot_be_measured_are_told_before_the_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "train_in_parallel", lambda ranks, steps: pytest.fail("trained"))
    assert main(["demo", "--sizes", "6", "--out", str(tmp_path / "out")]) == 1
    assert "size 6 is no multiple of the 4 bytes of a float32 element" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_missing_packages_are_named_with_the_command(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name in {"sklearn", "plotly"} else find(name, package),
    )
    assert main(["demo", "--out", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("collectives: the demo needs scikit-learn, plotly, not installed; install with: ")
    assert "python -m pip install 'scikit-learn>=1.4' 'plotly>=6.0'" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
