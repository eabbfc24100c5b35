"""A short soak with a fixed seed finds nothing, and one over a spoiled backend finds what is wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from soak import planted
from soak.driver import main
from soak.rounds import KINDS, Round


def test_a_round_is_drawn_from_seed_and_number() -> None:
    rounds = [Round(7, number) for number in range(100)]
    again = [Round(7, number) for number in range(100)]
    assert [one.listing() for one in rounds] == [one.listing() for one in again]
    assert [one.listing() for one in pickle.loads(pickle.dumps(rounds))] == [one.listing() for one in rounds]
    assert {one.fault.kind for one in rounds} == set(KINDS)
    assert len({one.listing() for one in rounds}) == 100


@pytest.mark.full
def test_ten_seconds_find_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "counts.json"
    status = main(["--minutes", "0.17", "--seed", "20", "--hang", "60", "--json", str(file)])
    counts = json.loads(file.read_text())
    assert status == 0, capsys.readouterr().err
    assert counts["operations"] > 0
    assert sum(counts["faults"].values()) == counts["rounds"] > 0
    assert [counts[what] for what in ("wrong results", "wrong errors", "hangs", "leaks")] == [0, 0, 0, 0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("plant", "fault", "found"),
    [
        (planted.wrong_result, "none", "wrong results"),
        (planted.wrong_blame, "leave", "wrong errors"),
        (planted.hang, "none", "hangs"),
        (planted.leak, "none", "leaks"),
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[], None], fault: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "counts.json"
    arguments = ["--seed", "3", "--round", "1", "--backends", "host", "--faults", fault, "--hang", "15"]
    assert main([*arguments, "--json", str(file)], plant) == 1
    counts = json.loads(file.read_text())
    said = capsys.readouterr().err
    kinds = "wrong results", "wrong errors", "hangs", "leaks"
    assert [what for what in kinds if counts[what]] == [found], said
    assert "round 1 of seed 3: host on " in said
    assert "again: python tests/soak --seed 3 --round 1 --backends host" in said
    assert "step 59, " in said
