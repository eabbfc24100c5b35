"""Ranks under a parent: answers, failures, and that nothing stays behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import bench_bodies
import pytest

from collectives.bench.core.ranks import barrier_memory
from collectives.ranks import launching
from collectives.ranks.processes import CommandRanks, RankFailedError, SpawnedRanks


def gone(pid: int) -> bool:
    """Returns whether a process has ended; a zombie has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@pytest.mark.usefixtures("preloaded_python")
def test_answers_come_in_rank_order():
    with SpawnedRanks(2, bench_bodies.multiply, (10,)) as team:
        assert team.ask(1) == [10, 11]
        assert team.ask(2) == [20, 21]
        pids = [one.process.pid for one in team._processes]
        address = Path(team.address)
        assert address.is_socket()
    assert not address.exists()
    assert all(gone(pid) for pid in pids)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "ValueError: the first error, on rank 1"),
        ("kill", "rank 1 was killed by SIGKILL"),
        ("leave", "rank 1 exited with status 0 before the function returned"),
    ],
)
def test_a_failing_rank_ends_all(how, message):
    with SpawnedRanks(2, bench_bodies.fail, (1, how)) as team:
        pids = team.gather()
        begin = time.monotonic()
        with pytest.raises(RankFailedError, match=message) as caught:
            team.ask("go")
        assert time.monotonic() - begin < 30
        assert caught.value.rank == 1
        assert ("Traceback" in str(caught.value)) == (how == "raise")
        assert "an error that follows" not in str(caught.value)
        assert all(gone(pid) for pid in pids)


@pytest.mark.usefixtures("preloaded_python")
def test_a_rank_that_cannot_begin_is_named():
    with (
        # Around the start, too: a rank may have failed before the other has come.
        pytest.raises(RankFailedError, match=r"(?s)rank \d failed.*TypeError"),
        SpawnedRanks(2, bench_bodies.multiply) as team,
    ):
        team.ask(1)  # the body lacks an argument


@pytest.mark.usefixtures("preloaded_python")
def test_running_ranks_have_no_files(tmp_path, monkeypatch):
    """Whoever kills their parent leaves none behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with SpawnedRanks(2, bench_bodies.multiply, (3,)) as team:
        assert team.ask(5) == [15, 16]
        assert not list(tmp_path.glob("collectives*"))


@pytest.mark.usefixtures("preloaded_python")
def test_nobody_leaves_the_barrier_before_all_have_come_and_ranks_end_with_the_team():
    with barrier_memory(3) as path, SpawnedRanks(3, bench_bodies.cross, (3, path, 60)) as team:
        pids = [one.process.pid for one in team._processes]
        crossings = team.gather()
        with pytest.raises(
            RankFailedError, match=r"rank \d has done its work, but was given another command: 5"
        ):
            team.ask(5)
    assert all(gone(pid) for pid in pids)
    team.close()  # a second time
    arrived = zip(*(arrivals for arrivals, _ in crossings), strict=True)
    left = zip(*(leavings for _, leavings in crossings), strict=True)
    for arrivals, leavings in zip(arrived, left, strict=True):
        assert max(arrivals) <= min(leavings)


def command_that_starts(ranks, code):
    """Returns a command that starts Python processes, which know their rank and the parent's address."""
    imports = "from collectives.ranks.processes import connect, commands; import sys"
    script = f"{imports}; rank = int(sys.argv[1])\n{code}"
    starts = " ".join(f'"{sys.executable}" -c "$0" {rank} "$1" &' for rank in range(ranks))
    return ["bash", "-c", f"{starts} wait", script]


@pytest.mark.full
def test_ranks_of_a_command():
    code = (
        "with connect(sys.argv[2], rank) as connection:\n"
        "    (start,) = connection.recv()\n"
        "    for command in commands(connection):\n"
        "        connection.send(start + command + rank)\n"
    )
    with CommandRanks(2, command_that_starts(2, code), os.environ, (100,)) as team:
        assert team.ask(10) == [110, 111]
        assert team.ask(20) == [120, 121]
    team.close()  # a second time


def test_a_command_that_ends_too_early_is_an_error_with_its_output():
    with pytest.raises(RankFailedError, match=r"(?s)bash ended with status 7 before its.*some words"):
        CommandRanks(2, ["bash", "-c", "echo some words; exit 7"], os.environ, ())


@pytest.mark.full
def test_a_command_that_does_not_listen_is_ended(monkeypatch):
    monkeypatch.setattr(CommandRanks, "grace_s", 1.0)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "connection = connect(sys.argv[2], rank); connection.recv(); time.sleep(600)\n"
    )
    script = f"from collectives.ranks.processes import connect; import sys; rank = 0\n{code}"
    begin = time.monotonic()
    with CommandRanks(1, [sys.executable, "-c", script, "0"], os.environ, ()) as team:
        pid = team._processes[0].process.pid
    assert gone(pid)
    assert time.monotonic() - begin < 30


def test_a_command_that_is_missing_leaves_no_descriptor() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    with pytest.raises(FileNotFoundError):
        CommandRanks(1, ["/missing/mpirun"], dict(os.environ), None)
    assert descriptors() == before


def test_a_command_queued_before_the_end_of_the_parent() -> None:
    mine, its = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        mine.close()
        working = threading.Event()
        watch = threading.Thread(target=launching._end_with_parent, args=(its.fileno(), working), daemon=True)
        watch.start()
        watch.join(1.0)
        working.set()
        time.sleep(5)
        os._exit(7)
    its.close()
    mine.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
