"""``collectives bench scale`` as users run it."""

from __future__ import annotations

import json

import pytest

from collectives.bench.scale import command, rank
from collectives.bench.scale.growth import LAWS, World
from collectives.cli import main

pytestmark = pytest.mark.usefixtures("preloaded_python")

SMALL = ["--groups", "2", "--iters", "1", "--sizes", "8,4K"]


def test_worlds_of_labelled_machines(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["bench", "scale", "--worlds", "1x2,2x1,2x2", *SMALL, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if not line.startswith("#")]
    plain = json.loads(path.read_text())
    assert plain["program"] == "scale"
    assert [(one["machines"], one["ranks_of_a_machine"]) for one in plain["records"]] == [
        (1, 2), (2, 1), (2, 2),
    ]  # fmt: skip
    one_machine, alone, pairs = plain["records"]
    for record in plain["records"]:
        assert record["right"]
        assert record["named"] == record["ranks"] - 1
        assert record["form_requests_most"] >= record["form_requests"] > 0
        assert 0 < record["group_segment_mib"] < 1
        assert 0 < record["death_s"] < 30
        for name in ("form_s", "group_s", "groups_s", "destroy_s", "barrier_us", "all_reduce_4096_us"):
            assert record[name] > 0, name
    # A group on one machine needs neither connection nor thread; leaders have a connection between them.
    assert (one_machine["group_connections"], one_machine["group_threads"]) == (0, 0)
    assert alone["group_connections"] >= 1
    assert pairs["group_threads"] >= 1
    assert set(plain["growth"]) <= set(one_machine)
    assert len(table) == len(plain["growth"])
    assert plain["growth"]["group_threads"]["law"] in LAWS


def test_a_death_that_is_not_named_is_told(monkeypatch, capsys):
    monkeypatch.setattr(command, "death_figures", lambda world, told: ({"death_s": 1.0}, world.size - 2))
    assert main(["bench", "scale", "--worlds", "1x2", *SMALL]) == 1
    assert "# 1x2: 0 of 1 ranks named the one that died; results were right" in capsys.readouterr().out


def test_a_world_for_which_there_is_no_memory_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(command, "memory_available_bytes", lambda: 300 << 20)
    assert main(["bench", "scale", "--worlds", "1x2,8x8", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "# skipped 8x8: 2 groups may need 1984 MiB, which are not free; make fewer" in out


def test_the_victim_leads_the_last_machine():
    assert rank.victim_of(World(4, 8)) == 24
    assert rank.victim_of(World(1, 2)) == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--worlds", "4"], "'4' is no world; write machines and the ranks of each as 4x8"),
        (["--worlds", "1x1"], "a world of 1x1 has fewer than 2 ranks"),
        (["--groups", "0"], "must be 1 or more, but is 0"),
    ],
)
def test_arguments_that_cannot_be(words, reason, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "scale", *words])
    assert reason in capsys.readouterr().err
