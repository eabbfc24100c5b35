"""What is taken for a failure of the backend when ranks end, and for a wrong order of streams."""

from __future__ import annotations

import signal
import sys

import pytest

from collectives.bench.acceptance import cases
from collectives.bench.acceptance.cases import CASES, RankEnd, run_ranks, write_answer
from collectives.bench.acceptance.report import CheckFailedError

LOST = {"error": "PeerLostError", "said": "rank 1 is lost", "seconds": 0.1}
REPLAYED = {"found": [16.0], "wanted": [16.0]}
KILLED = RankEnd(-signal.SIGKILL, None, 0.0, "")


def ended(status=0, exit_seconds=0.5, output="", **values):
    return RankEnd(status, values, exit_seconds, output)


def test_what_is_right():
    figures = CASES["killed"].judge([ended(**LOST), KILLED])
    assert figures == {"error": "PeerLostError", "seconds_to_error": 0.1, "exit_status": -9}
    assert CASES["live_loss"].judge([ended(), ended(exit_seconds=2.5)]) == {"seconds_to_exit": 2.5}


@pytest.mark.parametrize(
    ("case", "ends", "said"),
    [
        ("killed", [ended(**{**LOST, "error": None}), KILLED], "rank 0 got no error"),
        ("killed", [ended(**{**LOST, "error": "DistBackendError"}), KILLED], "rank 0 got DistBackendError"),
        ("killed", [ended(**{**LOST, "said": "something is lost"}), KILLED], "something is lost"),
        ("killed", [ended(**{**LOST, "seconds": 60.0}), KILLED], "rank 0 got its error after 60.0 s"),
        ("killed", [ended(**LOST), ended(1)], "rank 1 ended with 1 instead of -9"),
        ("killed", [ended(None, **LOST), KILLED], "rank 0 had to be killed"),
        ("killed", [ended(-11, output="a crash", **LOST), KILLED], "rank 0 ended with status -11.*a crash"),
        ("loss_in_training", [ended(**{**LOST, "error": None}), KILLED], "as if nothing had happened"),
        ("uncaught", [ended(**LOST), ended(1, output="")], "the exception was not shown"),
        ("uncaught", [ended(**LOST), ended(1, 99.0, "ValueError: nobody catches this")], "99.0 s to exit"),
        ("live_loss", [ended(), ended(exit_seconds=99.0)], "rank 1 took 99.0 s to exit"),
        ("live_loss", [ended(), RankEnd(0, None, 0.0, "")], "rank 1 ended with status 0"),
        ("live_graph", [ended(**REPLAYED), ended(0, 99.0, **REPLAYED)], "rank 1 took 99.0 s to exit"),
        (
            "live_graph",
            [ended(**REPLAYED), ended(found=[4.0], wanted=[16.0])],
            r"rank 1 has \[4.0\] instead of \[16.0\]",
        ),
        (
            "abort_and_make_again",
            [ended(first=1, last=1, spare=0, seconds=0.1), ended(first=1, last=4, spare=2, seconds=0.1)],
            "rank 1 holds 3 more after 20 groups",
        ),
    ],
)
def test_what_is_wrong(case, ends, said):
    with pytest.raises(CheckFailedError, match=f"(?s){said}"):
        CASES[case].judge(ends)


def test_answers_and_ends(monkeypatch, tmp_path):
    """Ranks that answer, that fail, and that never end; the last answer of a rank counts."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import json, os, sys, time\n"
        "rank, folder = sys.argv[-4], sys.argv[-1]\n"
        "print('here is', rank, os.environ['WORD'], flush=True)\n"
        "if rank == '0':\n"
        "    answer = {'values': {'x': 1}, 'at': time.monotonic()}\n"
        "    json.dump(answer, open(f'{folder}/0.json', 'w'))\n"
        "if rank == '1':\n"
        "    sys.exit(3)\n"
        "if rank == '2':\n"
        "    time.sleep(60)\n"
    )
    started = cases.subprocess.Popen

    def start(command, **options):
        return started([sys.executable, str(script), *command[3:]], **options)

    monkeypatch.setattr(cases.subprocess, "Popen", start)
    ends = run_ranks("platform", "body", 3, 5.0, environment={"WORD": "now"}, without=[2])
    assert [end.status for end in ends] == [0, 3, None]
    assert [end.answer for end in ends] == [{"x": 1}, None, None]
    assert 0 <= ends[0].exit_seconds < 5
    assert [end.output for end in ends[:2]] == ["here is 0 now\n", "here is 1 now\n"]


def test_the_last_answer_counts(tmp_path):
    for value in (1, 2):
        write_answer(str(tmp_path), 0, {"x": value})
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]
    assert '"x": 2' in (tmp_path / "0.json").read_text()


IN_ORDER = {"found": [6.0, 6.0], "wanted": [6.0, 6.0], "seconds_of_the_host": 0.1}


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.section == "streams"])
def test_values_in_the_order_of_streams(case):
    assert CASES[case].judge([ended(**IN_ORDER), ended(**IN_ORDER)])["ranks"] == 2
    with pytest.raises(CheckFailedError, match=r"rank 1 has \[6.0, 2.0\] instead of \[6.0, 6.0\]"):
        CASES[case].judge([ended(**IN_ORDER), ended(**{**IN_ORDER, "found": [6.0, 2.0]})])


def test_a_host_that_waits():
    late = ended(**{**IN_ORDER, "seconds_of_the_host": 1.2})
    with pytest.raises(CheckFailedError, match=r"the host waited: 1\.20 s"):
        CASES["late_producer"].judge([ended(**IN_ORDER), late])
