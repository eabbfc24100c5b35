"""Comparisons between machines, which network namespaces play."""

from __future__ import annotations

import pytest
from machines import make_machines  # noqa: F401 - a fixture
from mpi_team import find_installations

from collectives.bench.comparison.measurement import measure
from collectives.bench.comparison.options import Options
from collectives.cli import main

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machines": 2, "ranks": (3,)}, "3 ranks cannot be shared equally among 2 machines"),
        ({"link": "1gbit"}, "a link joins machines"),
        ({"machines": 2, "link": "fast"}, "'fast' is no rate of a link"),
    ],
)
def test_machines_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Options(**options)


@pytest.mark.full
@pytest.mark.timeout(300)  # each MPI starts daemons and ranks, on however busy a machine
def test_a_shaped_link_bounds_the_bandwidth(make_machines, monkeypatch):  # noqa: F811
    make_machines(1)  # skips where there can be none
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mpis = tuple((one.name, str(one.prefix)) for one in find_installations())
    peers = ("gloo", *(f"mpi4py:{name}" for name, _ in mpis))
    options = Options(
        backends=peers, sizes=(1 << 20,), machines=2, link="200mbit", calls=2, warmup=2, budget_s=2, mpis=mpis
    )
    report = measure(options)
    assert [record.peer for record in report.records] == list(peers), report.skipped
    assert report.options["machines"] == 2
    assert report.options["link"] == "200mbit"
    for record in report.records:
        assert record.wrong_elements == 0
        # An all-reduce between two sends every byte once in either direction.
        assert record.cold.median_us > (1 << 20) * 8 / 200e6 * 1e6 * 0.8, record.peer


def test_a_link_that_cannot_be_made_is_a_clear_error(monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["bench", "allreduce", "--backends", "gloo", "--sizes", "1K", "--machines", "2", "--link", "fast"]
    assert main(words) == 1
    error = capfd.readouterr().err
    assert "tc" in error
    assert "'fast' is no rate of a link" in error
    assert "Traceback" not in error


def test_the_command_line_refuses_what_the_options_refuse():
    with pytest.raises(SystemExit):
        main(["bench", "allreduce", "--machines", "0"])
