"""The harness itself: errors reach the parent, hangs end, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import harness
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
    run_world,
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


def has_loaded(rank: int, size: int, name: str) -> bool:
    return name in sys.modules


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


def sum_over(group: object, value: float) -> list[float]:
    tensor = torch.full((3,), value + group.rank())
    group.allreduce(tensor).wait()
    return tensor.tolist()


def skip_here(rank: int, size: int) -> None:
    if rank == 0:
        pytest.skip("not on this machine")


def unpicklable(rank: int, size: int) -> object:
    return lambda: None


def test_new_ranks_find_modules_loaded() -> None:
    assert run_ranks(has_loaded, 2, "tabnanny") == [False, False]
    harness.preload("tabnanny")
    assert run_ranks(has_loaded, 2, "tabnanny") == [True, True]
    assert run_ranks(has_loaded, 1, "tabnanny", isolated=True) == [True]


def test_results_come_by_rank_and_classes_travel() -> None:
    assert run_ranks(multiply, 3, Case(5)) == [Case(0), Case(5), Case(10)]


def test_processes_are_used_again() -> None:
    first = run_ranks(pid_of, 2)
    assert len(set(first)) == 2
    assert run_ranks(pid_of, 2) == first
    assert run_ranks(pid_of, 3)[:2] == first
    assert not set(run_ranks(pid_of, 2, isolated=True)) & set(first)


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


def test_a_signal_without_a_name_is_given_by_its_number() -> None:
    number = signal.SIGRTMIN + 2
    with pytest.raises(RankFailedError, match=rf"was killed by signal {number:d};"):
        run_ranks(die_on_one, 2, int(number))


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


def test_ranks_work_on_after_one_died() -> None:
    with pytest.raises(RankFailedError):
        run_ranks(die_on_one, 2, signal.SIGKILL)
    assert run_ranks(multiply, 2, Case(5)) == [Case(0), Case(5)]


def test_a_hang_ends_and_shows_where() -> None:
    with pytest.raises(
        RankTimeoutError, match=r"(?s)ranks \[1\] did not finish within 0.5 s.*its task read.*a_telling_name"
    ):
        run_ranks(hang_on_one, 2, timeout=0.5)


def answer_and_stop(rank: int, size: int) -> int:
    if rank == 0:
        return 0
    child = subprocess.Popen(["sleep", "60"])
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return child.pid


def test_a_hang_tells_whether_the_task_was_read() -> None:
    child = run_ranks(answer_and_stop, 2)[1]
    time.sleep(0.5)
    with pytest.raises(
        RankTimeoutError,
        match=rf"its task not read, the one before answer_and_stop, .* its children {child}\)",
    ):
        run_ranks(multiply, 2, Case(1), timeout=0.5)
    os.kill(child, signal.SIGKILL)


def test_lost_ranks_need_not_answer() -> None:
    assert run_ranks(leave_early, 3, isolated=True, lost={1}) == [0, Died(3), 2]
    assert run_ranks(hang_on_one, 2, isolated=True, lost={1}) == [None, Died(-signal.SIGKILL)]
    with pytest.raises(ValueError, match="isolated"):
        run_ranks(leave_early, 3, lost={1})


@pytest.mark.parametrize("size", [1, 4])
def test_a_group_is_made_and_ended(size: int) -> None:
    expected = [size * 1.0 + sum(range(size))] * 3
    assert run_ranks(sum_over, size, 1.0, backend="gloo") == [expected] * size


def test_a_skip_reaches_the_parent() -> None:
    with pytest.raises(pytest.skip.Exception, match="not on this machine"):
        run_ranks(skip_here, 2)


def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(RankFailedError, match="cannot be pickled"):
        run_ranks(unpicklable, 1)


def all_reduce_in_world(rank: int, size: int) -> float:
    import collectives

    x = torch.tensor([1.0 + rank])
    collectives.all_reduce(x)
    assert collectives.get_world_size() == size
    return x.item()


def test_a_world_is_made_and_ended() -> None:
    for _ in range(2):
        assert run_world(all_reduce_in_world, 3, backend="host") == [6.0] * 3


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


def run_littering_session(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "test_litter.py").write_text(LITTERING)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "shm").mkdir()
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", str(folder)]
    env = {**environment, "PYTHONPATH": PYTHONPATH}
    run = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert "3 passed" in run.stdout
    for text in ("left behind by the tests", "time.sleep(60)", "socket of the"):
        assert text in run.stdout, run.stdout
    return run


@pytest.mark.full
def test_litter_fails_the_session(tmp_path: Path) -> None:
    environment = dict(os.environ)
    environment.pop(SESSION_VARIABLE, None)
    assert "/dev/shm/collectives-litter" in run_littering_session(tmp_path, environment).stdout


@pytest.mark.full
def test_a_session_within_another_leaves_that_one_to_look_at_shared_memory(tmp_path: Path) -> None:
    environment = {**os.environ, SESSION_VARIABLE: "that of the outer session"}
    assert "/dev/shm/collectives-litter" not in run_littering_session(tmp_path, environment).stdout


def nested(rank: int, size: int) -> None:
    run_ranks(pid_of, 1)


def test_ranks_start_no_ranks() -> None:
    with pytest.raises(RankFailedError, match="a rank cannot start ranks"):
        run_ranks(nested, 1)


def test_local_functions_are_refused() -> None:
    with pytest.raises(TypeError, match="module level"):
        run_ranks(lambda rank, size: None, 1)


def test_what_tests_start_can_be_interrupted_under_a_background_shell() -> None:
    child = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('still here')"
    script = f"""
import os, signal, subprocess, sys
before = [sys.executable, "-c", {child!r}]
assert subprocess.run(before, stderr=subprocess.DEVNULL).returncode == 0
from interrupts import let_children_be_interrupted
let_children_be_interrupted()
os.kill(os.getpid(), signal.SIGINT)  # it stays uninterrupted itself
assert subprocess.run(before, stderr=subprocess.DEVNULL).returncode == -signal.SIGINT
"""
    run = subprocess.run(
        ["bash", "-c", "trap '' INT; exec \"$@\"", "bash", sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("still here") == 1
