"""What is under way is told on stderr: in place on a terminal, in lines now and then elsewhere."""

from __future__ import annotations

import sys

import pytest

from collectives.bench.core import arguments
from collectives.bench.core.arguments import show_progress
from collectives.cli import main


@pytest.fixture
def clock(monkeypatch):
    """A clock in a list, which the test sets."""
    now = [0.0]
    monkeypatch.setattr(arguments, "_logged_at_s", 0.0)
    monkeypatch.setattr(arguments.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_every_ten_seconds_and_a_quick_command_none(clock, capsys):
    for second in range(25):
        clock[0] = float(second)
        show_progress(f"second {second}")
        show_progress("")
    assert capsys.readouterr() == ("", "# second 10\n# second 20\n")


def test_a_terminal_shows_each_line_in_place_of_the_last(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for line in ("one", "two", ""):
        show_progress(line)
    assert capsys.readouterr() == ("", "\r\x1b[Kone\r\x1b[Ktwo\r\x1b[K")


def test_a_bench_tells_a_log_how_far_it_is_and_its_results_stay_apart(capsys, monkeypatch):
    monkeypatch.setattr(arguments, "LOGGED_EVERY_S", 0.0)
    words = ["--operations", "get", "--servers", "here", "--rounds", "2", "--seconds", "0.01"]
    assert main(["bench", "store", *words]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == ["# server here: get (1 of 2)", "# server here: get (2 of 2)"]
    assert "of 2)" not in out
