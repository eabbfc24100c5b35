"""``collectives bench store`` as users run it."""

from __future__ import annotations

import importlib.util
import json

import pytest

from collectives.bench import store
from collectives.cli import main

pytestmark = pytest.mark.usefixtures("preloaded_python")


def test_the_command_measures_both_stores_at_both_places(tmp_path, capsys):
    path = tmp_path / "out.json"
    words = ["--rounds", "2", "--seconds", "0.001", "--json", str(path)]
    assert main(["bench", "store", *words]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(" ")]
    asked = [(server, operation) for server in ("here", "process") for operation in store.OPERATIONS]
    assert [(row[0], row[1]) for row in table] == asked
    assert all(row[-1] == "yes" for row in table)
    plain = json.loads(path.read_text())
    assert plain["program"] == "store"
    for record, row in zip(plain["records"], table, strict=True):
        assert set(record["rounds"]) == {"collectives", "torch"}
        assert all(len(rates) == 2 and min(rates) > 0 for rates in record["rounds"].values())
        medians = record["calls_per_s"]
        assert row[2:5] == [
            f"{medians['collectives']:.0f}", f"{medians['torch']:.0f}", f"{record['over_torch']:.2f}",
        ]  # fmt: skip
        assert record["over_torch"] == medians["collectives"] / medians["torch"]


ONE_TURN = ["--operations", "check", "--servers", "here", "--rounds", "1", "--seconds", "0.001"]


def test_the_report_becomes_a_page(tmp_path):
    pytest.importorskip("plotly")
    path = tmp_path / "page.html"
    assert main(["bench", "store", *ONE_TURN, "--html", str(path)]) == 0
    text = path.read_text("utf-8")
    assert text.count("Plotly.newPlot(") == 1
    assert "<td>check</td>" in text


def test_a_page_without_plotly_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "page.html"
    with pytest.raises(SystemExit):
        main(["bench", "store", *ONE_TURN, "--html", str(path)])
    assert "--html: needs Plotly; install it with: python -m pip install plotly" in capsys.readouterr().err
    assert not path.exists()


def test_a_store_that_loses_a_call_is_found(monkeypatch, capsys):
    class Forgetful(store.TCPStore):
        def add(self, key, amount):
            return super().add(key, 0)

    monkeypatch.setitem(store._KINDS, "collectives", Forgetful)
    words = ["--operations", "add", "--servers", "here", "--rounds", "1", "--seconds", "0.001"]
    assert main(["bench", "store", *words]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == "no"
