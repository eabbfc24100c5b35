"""The harness itself: errors reach the parent, hangs end, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import rank_watch
import torch
from harness import (
    SESSION_VARIABLE,
    Died,
    RankFailedError,
    RankTimeoutError,
    current_store,
    run_ranks,
)
from sources import PYTHONPATH


@dataclass
class Case:
    value: int


def multiply(rank: int, size: int, case: Case) -> Case:
    return Case(case.value * rank)


def pid_of(rank: int, size: int) -> int:
    return os.getpid()


def environment(rank: int, size: int) -> tuple[str | None, int]:
    return os.environ.get("HARNESS_TEST"), torch.get_num_threads()


def exchange(rank: int, size: int) -> str:
    store = current_store()
    store.set(f"from{rank}", str(rank))
    return store.get(f"from{(rank + 1) % size}").decode()


def fail_on_one(rank: int, size: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unhappy")
    time.sleep(60)


def die_on_one(rank: int, size: int, number: int) -> None:
    print("last words of", rank)
    if rank == 1:
        os.kill(os.getpid(), number)


def exit_on_one(rank: int, size: int, code: int) -> None:
    if rank == 1:
        os._exit(code)


def die_before_a_child(rank: int, size: int) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print("child", child)
    os.kill(os.getpid(), signal.SIGKILL)


def close_all_files(rank: int, size: int) -> None:
    os.closerange(3, 1000)
    time.sleep(60)


def hang_on_one(rank: int, size: int) -> None:
    def a_telling_name() -> None:
        time.sleep(60)

    if rank == 1:
        a_telling_name()


def leave_early(rank: int, size: int) -> int:
    if rank == 1:
        os._exit(3)
    return rank


def skip_here(rank: int, size: int) -> None:
    if rank == 0:
        pytest.skip("not on this machine")


def unpicklable(rank: int, size: int) -> object:
    return lambda: None


def test_results_come_by_rank_and_classes_travel() -> None:
    assert run_ranks(multiply, 3, Case(5)) == [Case(0), Case(5), Case(10)]


def test_processes_are_used_again() -> None:
    first = run_ranks(pid_of, 2)
    assert len(set(first)) == 2
    assert run_ranks(pid_of, 2) == first
    assert run_ranks(pid_of, 3)[:2] == first
    assert not set(run_ranks(pid_of, 2, isolated=True)) & set(first)


def test_few_processes_wait_for_the_next_call() -> None:
    many = run_ranks(pid_of, 10)
    assert run_ranks(pid_of, 8) == many[:8]
    assert not set(run_ranks(pid_of, 10)) & set(many[8:])


def keep_files_open(rank: int, size: int) -> int:
    if rank == 1:
        kept.extend(os.dup(0) for _ in range(100))
    return os.getpid()


kept: list[int] = []


def test_a_process_that_keeps_many_files_open_is_not_used_again() -> None:
    before = run_ranks(keep_files_open, 2)
    after = run_ranks(pid_of, 2)
    assert before[0] in after
    assert before[1] not in after


def test_environment_is_set_for_the_call_only() -> None:
    assert run_ranks(environment, 2, env={"HARNESS_TEST": "x"}) == [("x", 1)] * 2
    assert run_ranks(environment, 2) == [(None, 1)] * 2


def test_every_call_has_an_empty_store() -> None:
    assert run_ranks(exchange, 3) == ["1", "2", "0"]
    assert run_ranks(exchange, 3) == ["1", "2", "0"]


def test_a_failure_shows_its_traceback_and_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "_GRACE_SECONDS", 0.2)
    before = run_ranks(pid_of, 2)
    with pytest.raises(
        RankFailedError, match=r"(?s)rank 1 failed; still running: \[0\].*rank one is unhappy"
    ) as info:
        run_ranks(fail_on_one, 2)
    assert isinstance(info.value.__cause__, ValueError)
    assert "fail_on_one" in info.value.errors[1]
    assert not set(run_ranks(pid_of, 2)) & set(before)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_death_is_an_error_with_the_signal_and_the_last_output(number: signal.Signals) -> None:
    with pytest.raises(
        RankFailedError,
        match=rf"the process of rank 1 \(pid \d+\) was killed by {number.name}; "
        r"its last output:\nlast words of 1",
    ):
        run_ranks(die_on_one, 2, number)


@pytest.mark.parametrize("code", [0, 7])
def test_an_exit_is_an_error_with_the_exit_code(code: int) -> None:
    with pytest.raises(
        RankFailedError, match=rf"\(pid \d+\) ended with exit code {code}; it wrote no output"
    ):
        run_ranks(exit_on_one, 2, code)


def test_a_death_is_seen_while_a_child_of_the_rank_lives() -> None:
    with pytest.raises(RankFailedError, match="was killed by SIGKILL") as info:
        run_ranks(die_before_a_child, 1)
    child = int(info.value.errors[0].split()[-1])
    assert Path(f"/proc/{child}/cmdline").read_bytes()  # nothing if it had ended
    os.kill(child, signal.SIGKILL)


def test_a_rank_that_can_no_longer_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "_END_SECONDS", 0.2)
    with pytest.raises(RankFailedError, match="closed its connection and still runs"):
        run_ranks(close_all_files, 1)


def test_a_hang_ends_and_shows_where() -> None:
    with pytest.raises(
        RankTimeoutError, match=r"(?s)ranks \[1\] did not finish within 0.5 s.*a_telling_name"
    ):
        run_ranks(hang_on_one, 2, timeout=0.5)


def test_lost_ranks_need_not_answer() -> None:
    assert run_ranks(leave_early, 3, isolated=True, lost={1}) == [0, Died(3), 2]
    assert run_ranks(hang_on_one, 2, isolated=True, lost={1}) == [None, Died(-signal.SIGKILL)]
    with pytest.raises(ValueError, match="isolated"):
        run_ranks(leave_early, 3, lost={1})


def test_a_skip_reaches_the_parent() -> None:
    with pytest.raises(pytest.skip.Exception, match="not on this machine"):
        run_ranks(skip_here, 2)


def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(RankFailedError, match="cannot be pickled"):
        run_ranks(unpicklable, 1)


LITTERING = """
import os, pathlib, socket, subprocess, sys
import census
kept = []
# Not the real folder: another session that runs here just now would find it there, too.
census.SHARED_MEMORY = pathlib.Path(__file__).parent / "shm"

def test_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)

def test_segment():
    (census.SHARED_MEMORY / "collectives-litter").write_text("x")

def test_socket():
    kept.append(socket.socket())
"""


@pytest.mark.full
def test_litter_fails_the_session(tmp_path: Path) -> None:
    (tmp_path / "test_litter.py").write_text(LITTERING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "shm").mkdir()
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    environment.pop(SESSION_VARIABLE, None)
    run = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert "3 passed" in run.stdout
    for text in (
        "left behind by the tests",
        "time.sleep(60)",
        "socket of the",
        "/dev/shm/collectives-litter",
    ):
        assert text in run.stdout, run.stdout


def nested(rank: int, size: int) -> None:
    run_ranks(pid_of, 1)


def test_ranks_start_no_ranks() -> None:
    with pytest.raises(RankFailedError, match="a rank cannot start ranks"):
        run_ranks(nested, 1)


def test_local_functions_are_refused() -> None:
    with pytest.raises(TypeError, match="module level"):
        run_ranks(lambda rank, size: None, 1)
