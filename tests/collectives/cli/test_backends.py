"""The table of what backends can do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from collectives.cli import main
from collectives.cli.backends import (
    REDUCTIONS,
    columns,
    data_types,
    short_tables,
    statements,
)
from collectives.cli.tables import markdown, plain_text
from collectives.core.capabilities import OPERATIONS, Capabilities, by_device, in_common
from collectives.registry.backends import capabilities_of

PAGE = (Path(__file__).resolve().parents[3] / "docs/guide/backends.md").read_text(encoding="utf-8")
STATED = {"gloo": {"cpu", "cuda"}, "host": {"cpu"}, "nccl": {"cuda"}, "round_robin": {"cpu"}}

F32, I8, I16, BITS = torch.float32, torch.int8, torch.int16, torch.bits8
ONE = Capabilities(
    devices=frozenset({"cpu"}),
    reductions={
        F32: frozenset({"SUM", "AVG"}),
        I8: frozenset({"SUM", "BAND"}),
        I16: frozenset({"SUM", "BAND"}),
    },
)
OTHER = Capabilities(
    devices=frozenset({"cuda"}),
    reductions={F32: frozenset({"SUM"})},
    operations=frozenset(OPERATIONS) - {"recv_anysource"},
    moves=frozenset({F32, I8}),
    tags=False,
)
FOUND = {"cpu:one": ONE, "cuda:other": OTHER}


def test_the_manual_has_the_table_that_the_backends_state(monkeypatch: pytest.MonkeyPatch) -> None:
    of_manual = tuple(dtype for dtype in data_types() if str(dtype) != "torch.bcomplex32")  # of 2.14
    monkeypatch.setattr("collectives.cli.backends.data_types", lambda: of_manual)
    section = PAGE.partition("## What the backends can do\n")[2].partition("\n#")[0]
    header = re.search(r"^\| function \| (.*) \|$", section, re.MULTILINE)
    assert header is not None
    backends = [column.split(":")[1] for column in header.group(1).split(" | ")]
    assert set(STATED) <= set(backends)
    for table in short_tables(columns(dict.fromkeys(backends))):
        assert markdown(table) in section, f"paste: collectives backends {' '.join(backends)} --markdown"


def test_every_data_type_of_torch_is_there_once() -> None:
    found = data_types()
    assert len(set(found)) == len(found) > 40
    assert {F32, torch.bool, torch.float8_e5m2, torch.uint1, torch.quint4x2} <= set(found)


def test_short_tables_name_who_can() -> None:
    functions, reductions, (_, *moves) = short_tables(FOUND)
    assert functions == [
        ("function", "cpu:one", "cuda:other"),
        ("recv_anysource", "yes", "-"),
        ("every other function", "yes", "yes"),
        ("parts of different sizes", "yes", "yes"),
        ("tags of messages", "yes", "-"),
    ]
    assert reductions == [
        ("reductions of", "SUM", "AVG", "PRODUCT, MIN, MAX, BOR, BXOR, PREMUL_SUM", "BAND"),
        ("int8, int16", "cpu:one", "-", "-", "cpu:one"),
        ("float32", "all", "cpu:one", "-", "-"),
    ]
    assert ("int8, float32", "all") in moves[:2]
    assert {row[1] for row in moves} == {"all", "cpu:one"}


def test_few_that_cannot_are_named_instead_of_those_that_can() -> None:
    functions, _, (_, *moves) = short_tables({**FOUND, "cpu:third": ONE})
    assert {row[1] for row in moves} == {"all", "all but cuda:other"}
    assert functions[1] == ("recv_anysource", "yes", "-", "yes")


def test_the_whole_table_has_a_statement_for_everything() -> None:
    whole = list(statements(FOUND))
    assert len(whole) == 2 * (1 + (len(OPERATIONS) - 1) * len(data_types()))
    by_key = {(one.backend, one.function, one.dtype): one for one in whole}
    assert by_key["one", "all_reduce", "int8"].reductions == ("SUM", "BAND")
    assert by_key["one", "all_reduce", "bits8"].reason.startswith("torch.bits8 cannot be reduced")
    assert not by_key["other", "recv_anysource", "float32"].offered
    assert by_key["other", "barrier", None].offered
    assert by_key["other", "send", "float32"].reductions is None
    assert not by_key["other", "send", "bits8"].offered


def test_forms_of_a_table() -> None:
    functions = short_tables(FOUND)[0]
    assert (
        plain_text(functions).splitlines()[0]
        == f"function{' ' * (len(functions[3][0]) - 8)}  cpu:one  cuda:other"
    )
    assert markdown(functions).splitlines()[1] == "|---|---|---|"


def test_what_parts_have_in_common() -> None:
    both = in_common([ONE, OTHER])
    assert both.devices == frozenset()
    assert both.reductions == {F32: {"SUM"}}
    assert both.moves == {F32, I8}
    assert not both.tags
    mixed = by_device({"cpu": ONE, "cuda": OTHER})
    assert mixed.devices == {"cpu", "cuda"}
    assert mixed.on("cpu") == ONE
    assert mixed.on("cuda") == OTHER
    assert mixed.why_not("send", device="cpu", dtype=BITS) is None
    assert "torch.bits8 cannot be moved" in str(mixed.why_not("send", device="cuda", dtype=BITS))
    assert "torch.bits8 cannot be moved" in str(mixed.why_not("send", dtype=BITS))
    assert by_device({"cpu": ONE}) == ONE


def test_backends_state_without_a_group() -> None:
    for name, devices in STATED.items():
        stated = capabilities_of(name)
        assert stated is not None
        assert stated.devices == devices
        assert {"SUM", "AVG", "PREMUL_SUM"} <= stated.reductions[torch.float32] <= set(REDUCTIONS)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "host", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["backends"] == [{"name": "host", "devices": ["cpu"], "usable": True, "reason": ""}]
    assert {
        "backend": "host", "device": "cpu", "function": "all_reduce", "dtype": "bool", "offered": True,
        "reductions": ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"], "reason": "",
    } in whole["statements"]  # fmt: skip
    assert main(["backends", "gloo", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {" ".join(line.split()) for line in lines}
    for device in ("cpu", "cuda"):
        assert f"gloo {device} reduce complex64 SUM AVG PREMUL_SUM" in rows
    assert len(lines) == 3 + 2 * (len(OPERATIONS) - 1) * len(data_types())
    assert main(["backends", "host", "gloo", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| function | cpu:host | cpu:gloo | cuda:gloo |\n|---|")
    assert main(["backends", "hots"]) == 1
    assert "unknown backend 'hots'; known are" in capsys.readouterr().err
