"""``collectives bench wire`` as users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collectives.bench.wire import command
from collectives.bench.wire.rank import OURS
from collectives.bench.wire.ways import WAYS
from collectives.cli import main

pytestmark = pytest.mark.usefixtures("preloaded_python")

SHORT = ["--rounds", "2", "--seconds", "0.001"]
NAMES = [*WAYS, *OURS]


def test_the_command_moves_bytes_in_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert main(["bench", "wire", "--sizes", "1000,3M", *SHORT, "--json", str(path)]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" ")]
    assert all(line.split()[-1] == "yes" for line in table)
    records = json.loads(path.read_text())["records"]
    assert [(record["size_bytes"], record["way"]) for record in records] == [
        (size, name) for size in (1000, 3 << 20) for name in NAMES
    ]
    for size in (1000, 3 << 20):
        some = {record["way"]: record for record in records if record["size_bytes"] == size}
        assert min(some[name]["over_kernel"] for name in WAYS) == 1
        for name, record in some.items():
            assert some[name]["cpu_ms_per_gb_median"] > 0
            assert 0 < record["sender_share"] < 1
            assert record["gb_per_s"] > 0


def test_bytes_that_do_not_arrive_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SpawnedRanks", Forgetful)
    assert main(["bench", "wire", "--sizes", "64K", *SHORT]) == 1
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" ")]
    assert [line.split()[-1] for line in table] == ["yes"] + ["no"] + ["yes"] * (len(NAMES) - 2)


class Forgetful(command.SpawnedRanks):
    def ask(self, command):  # type: ignore[no-untyped-def]
        answers = super().ask(command)
        return [True, False] if command == ("check", NAMES[1]) else answers


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "12"], "multiples of 8 bytes, but one is 12"),
        (["--seconds", "0"], "more than 0 and less than 3600, but is 0"),
        (["--rounds", "0"], "must be 1 or more, but is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["bench", "wire", *words])
    except SystemExit as end:
        status = int(str(end.code))
    assert status != 0
    assert said in capsys.readouterr().err
