"""Comparisons between machines, which network namespaces play."""

from __future__ import annotations

import pytest
from machines import make_machines  # noqa: F401 - a fixture
from mpi_team import find_installations

from collectives.bench.allreduce import Options, measure

pytestmark = pytest.mark.usefixtures("preloaded_python")


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
