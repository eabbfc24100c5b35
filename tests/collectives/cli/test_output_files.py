"""Names of files to write are checked before anything is measured, and leave nothing behind."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from collectives.cli import main
from collectives.cli.output_files import output_file

COMMANDS = [
    *(["bench", name, option] for name in ("allreduce", "ddp", "store") for option in ("--json", "--html")),
    *(["bench", "paper", "fig6", option] for option in ("--json", "--html")),
    *(["accept", "--rehearse", option] for option in ("--json", "--html")),
    ["conformance", "--backend", "gloo", "--json"],
    ["demo", "--out"],
    ["trace", "record.json", "-o"],
    ["trace", "record.json", "--torch"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_place_that_cannot_be_written_is_refused_at_once(words, tmp_path, capsys):
    if "--html" in words:
        pytest.importorskip("plotly")
    file = tmp_path / "file"
    file.write_text("kept")
    try:
        status = main([*words, str(file / "within")])
    except SystemExit as ended:
        status = ended.code
    assert status
    printed = capsys.readouterr()
    assert "cannot be written" in printed.err
    assert not printed.out
    assert file.read_text() == "kept"


def test_a_file_keeps_what_it_holds_until_it_is_written(tmp_path, capsys):
    kept = tmp_path / "kept.json"
    kept.write_text("old")
    new = tmp_path / "made" / "new.json"
    for file in (kept, new):
        with pytest.raises(SystemExit):
            main(["bench", "store", "--json", str(file), "--rounds", "none"])
    assert "invalid" in capsys.readouterr().err
    assert kept.read_text() == "old"
    assert [*new.parent.iterdir()] == []


def test_a_folder_is_no_file(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "store", "--json", str(tmp_path)])
    assert "Is a directory" in capsys.readouterr().err


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
        output_file(tmp_path / ("x" * 300))
