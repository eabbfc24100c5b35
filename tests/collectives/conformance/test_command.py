"""``collectives conformance`` as users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sources import PYTHONPATH

from collectives.conformance.__main__ import main
from collectives.conformance.examination import questions

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.fixture(autouse=True)
def ranks_find_test_modules(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def verdicts(tmp_path, *arguments):
    """Returns the exit status and the verdicts by function and data type."""
    path = tmp_path / "answers.json"
    status = main([*arguments, "--json", str(path)])
    records = json.loads(path.read_text())
    assert all(record["details"] or record["verdict"] == "ok" for record in records)
    return status, {(record["function"], record["dtype"]): record for record in records}


@pytest.mark.full
def test_ours_is_right_throughout(tmp_path, capsys):
    dtypes = [word for name in ("float32", "bfloat16", "bool", "complex64") for word in ("--dtype", name)]
    status, found = verdicts(tmp_path, "--backend", "collectives", *dtypes)
    assert status == 0
    assert len(found) == 2 + (15 + 12) * 4
    assert {record["verdict"] for record in found.values()} == {"ok"}
    assert all(record["offered"] == record["asked"] for record in found.values())
    assert found["all_reduce", "torch.float32"]["asked"] == 6
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("# collectives, 2 ranks")
    assert f"{'barrier':32}ok           -" in lines
    assert f"{'all_reduce':32}ok           every data type (4)" in lines


@pytest.mark.full
def test_gloo_lacks_some(tmp_path, capsys):
    functions = [word for name in ("all_reduce", "all_gather") for word in ("--function", name)]
    status, found = verdicts(
        tmp_path, "--backend", "gloo", *functions, "--dtype", "float32", "--dtype", "int16", "--details"
    )
    assert found["all_reduce", "torch.float32"]["verdict"] == "ok"
    assert status == int(any(record["verdict"] == "wrong" for record in found.values()))
    assert found["all_reduce", "torch.float32"]["offered"] < found["all_reduce", "torch.float32"]["asked"]
    assert found["all_reduce", "torch.int16"]["verdict"] == "unsupported"
    out = capsys.readouterr().out
    assert "unsupported  int16" in out
    assert "# gloo: all_reduce int16 SUM: " in out


@pytest.mark.full
@pytest.mark.timeout(300)
def test_faults_are_found(tmp_path):
    names = ("float32", "float64", "int32", "int64", "int8", "int16", "uint8")
    dtypes = [word for name in names for word in ("--dtype", name)]
    arguments = ["--backend", "faulty", "--import", "faulty_backend", "--function", "all_reduce"]
    status, found = verdicts(tmp_path, *arguments, *dtypes, "--timeout", "2")
    assert status == 1
    got = {dtype.removeprefix("torch."): record["verdict"] for (_, dtype), record in found.items()}
    strided = [record["verdict"] for (function, _), record in found.items() if "strided" in function]
    assert strided == [record["verdict"] for record in found.values()][: len(strided)]
    assert got == {
        "float32": "ok", "float64": "wrong", "int32": "hang", "int64": "wrong", "int8": "wrong",
        "int16": "unsupported", "uint8": "wrong",
    }  # fmt: skip


@pytest.mark.full
def test_short_table(capsys):
    arguments = ["--backend", "collectives", "--backend", "gloo", "--dtype", "int16", "--dtype", "float32"]
    assert main([*arguments, "--function", "all_gather", "--function", "barrier", "--markdown"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| function | collectives | gloo |",
        "|---|---|---|",
        "| barrier | right | right |",
        "| all_gather | 2 right | 1 right, 1 refused |",
        "| all_gather, strided | 2 right | 1 right, 1 refused |",
    ]


def test_the_manual_counts_the_data_types():
    """What ours does with them, the other tests find out."""
    reduced, moved = (
        len({one.dtype for one in questions() if one.title == title}) for title in ("all_reduce", "broadcast")
    )
    page = (Path(__file__).resolve().parents[3] / "docs/guide/backends.md").read_text(encoding="utf-8")
    assert f"{reduced} data types are reduced, and {moved - reduced} more moved" in page


@pytest.mark.full
def test_wrong_arguments(capsys, tmp_path):
    for arguments in (["--backend", "nobody_has_this"], ["--backend", "gloo", "--ranks", "1"]):
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        assert raised.value.code not in {0, None}
        if "nobody_has_this" in arguments:
            assert "--import" in raised.value.code
    with pytest.raises(SystemExit):
        main(["--backend", "gloo", "--dtype", "nothing"])
    assert "no data type" in capsys.readouterr().err
    for name, value, reason in (
        ("--timeout", "0", "more than 0"),
        ("--json", str(tmp_path), "cannot be written: Is a directory"),
    ):
        with pytest.raises(SystemExit):
            main(["--backend", "gloo", name, value])
        assert reason in capsys.readouterr().err
