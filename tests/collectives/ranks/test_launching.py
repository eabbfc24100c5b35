"""``launch``: a function on several ranks, its results, its output, and what becomes of failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import python_client
import torch
from sources import PYTHONPATH

import collectives
from collectives.ranks.launching import Ranks

pytestmark = pytest.mark.usefixtures("preloaded_python")


class UnpicklableError(Exception):
    """Cannot travel."""

    def __reduce__(self):
        raise TypeError("an exception that stays where it is")


def everything(offset):
    """Exercises what a rank finds in its environment; both layers make their world without arguments."""
    import torch.distributed as dist

    collectives.init_process_group("host")
    total = torch.tensor(offset + collectives.get_rank())
    collectives.all_reduce(total)
    collectives.destroy_process_group()
    dist.init_process_group("collectives")
    doubled = total.clone()
    dist.all_reduce(doubled)
    dist.destroy_process_group()
    print("out of", os.environ["WORLD_SIZE"])
    print("no end of line", end="", file=sys.stderr)
    return os.getpid(), int(os.environ["LOCAL_RANK"]), total, doubled.item()


def test_results_come_by_rank_and_output_line_by_line(capsys, fresh_python):
    # Fresh: Triton of torch 2.15 reports at exit what others do not free.
    results = collectives.launch(everything, (10,), nproc=2)
    assert [rank for _, rank, _, _ in results] == [0, 1]
    assert [(total.item(), doubled) for _, _, total, doubled in results] == [(21, 42)] * 2
    assert not [pid for pid, *_ in results if Path(f"/proc/{pid}").exists()]
    written = capsys.readouterr()
    assert sorted(written.out.splitlines()) == ["[rank 0] out of 2", "[rank 1] out of 2"]
    errors = [line for line in written.err.splitlines() if "[c10d]" not in line]  # torch's own, of names
    assert sorted(errors) == ["[rank 0] no end of line", "[rank 1] no end of line"]


@pytest.mark.full
def test_a_function_may_hold_what_is_around_it():
    secret = torch.arange(3)
    found = collectives.launch(lambda: (os.environ["A"], secret + 1), nproc=1, environment={"A": "b"})
    assert found[0][0] == "b"
    assert found[0][1].tolist() == [1, 2, 3]


@pytest.mark.full
@pytest.mark.parametrize("world", ["host", "torch"])
def test_the_cause_is_raised_not_what_follows_from_it(world):
    def fail():
        module = collectives if world == "host" else torch.distributed
        module.init_process_group("host" if world == "host" else "collectives")
        module.barrier()
        try:
            if module.get_rank() == 1:
                raise KeyError("no such row")
            module.all_reduce(torch.ones(1))
        finally:
            module.destroy_process_group()  # of which the others hear before the parent does

    begin = time.monotonic()
    with pytest.raises(
        collectives.RankFailedError, match=r"(?s)rank 1 failed:.*in fail.*'no such row'"
    ) as caught:
        collectives.launch(fail)
    assert time.monotonic() - begin < 30
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)


def end(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit(3)
    if how == "unpicklable result":
        return sys._getframe()
    raise UnpicklableError("of a rank")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("how", "message", "cause"),
    [
        ("kill", "^rank 0 was killed by SIGKILL before the function returned$", type(None)),
        ("exit", "(?s)^rank 0 failed:.*SystemExit: 3", SystemExit),
        ("raise", "(?s)^rank 0 failed:.*UnpicklableError: of a rank", type(None)),
        ("unpicklable result", "(?s)^rank 0 failed:.*cannot pickle 'frame' object", TypeError),
    ],
)
def test_how_a_rank_may_fail(how, message, cause):
    with pytest.raises(collectives.RankFailedError, match=message) as caught:
        collectives.launch(end, (how,), nproc=1)
    assert isinstance(caught.value.__cause__, cause)


def test_a_rank_that_dies_after_it_has_answered_has_not_failed(tmp_path):
    told = tmp_path / "pid"

    def answer_and_die():
        if int(os.environ["RANK"]) == 1:
            told.with_suffix(".new").write_text(str(os.getpid()))
            told.with_suffix(".new").rename(told)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return "answered"
        while not told.exists() or running(int(told.read_text())):
            time.sleep(0.01)
        time.sleep(0.2)  # for the parent to see it
        return "outlived it"

    assert collectives.launch(answer_and_die) == ["outlived it", "answered"]


def test_wrong_arguments():
    with pytest.raises(ValueError, match="nproc must be at least 1, but is 0"):
        collectives.launch(print, nproc=0)
    with pytest.raises(TypeError, match="cannot pickle 'frame' object"):
        collectives.launch(print, (sys._getframe(),))


def leave_a_world(fails):
    collectives.init_process_group("host")
    collectives.barrier()
    if fails:
        raise ValueError("on purpose")
    return os.getpid()


@pytest.mark.full
def test_ranks_stay_from_function_to_function_and_start_anew_after_a_failure():
    with Ranks(2) as ranks:
        first = ranks.run(leave_a_world, False)
        assert ranks.run(leave_a_world, False) == first
        with pytest.raises(collectives.RankFailedError, match="ValueError: on purpose"):
            ranks.run(leave_a_world, True)
        assert not [pid for pid in first if running(pid)]
        second = ranks.run(leave_a_world, False)
        assert not set(first) & set(second)
    assert not [pid for pid in second if running(pid)]


SCRIPT = """
import os, sys, time
import collectives

def wait(folder):
    open(os.path.join(folder, f"{os.environ['RANK']}.{os.getpid()}"), "w").close()
    time.sleep(600)

collectives.launch(wait, (sys.argv[1],))
"""


@pytest.mark.full
@pytest.mark.parametrize(("number", "stopped"), [(signal.SIGKILL, True), (signal.SIGINT, False)])
def test_ranks_of_a_script_end_with_it(number, stopped, tmp_path):
    """The script has no guard around its call, and its function is not importable."""
    script, folder = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT, encoding="utf-8")
    folder.mkdir()
    files = tmp_path / "files"
    files.mkdir()
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(files)}
    environment.pop(python_client.ADDRESS, None)  # the ranks are to be children of the script
    parent = subprocess.Popen(
        [sys.executable, script, folder],
        env=environment,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 60
        while len(pids := [int(name.suffix[1:]) for name in folder.iterdir()]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if stopped:
            os.kill(pids[1], signal.SIGSTOP)
    finally:
        parent.send_signal(number)
        _, errors = parent.communicate()
    assert (b"KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    deadline = time.monotonic() + 20
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, "ranks outlive their parent"
        time.sleep(0.05)
    assert not list(files.iterdir())


def running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_rank_that_a_real_time_signal_kills() -> None:
    with pytest.raises(collectives.RankFailedError, match=r"killed by signal \d+"):
        collectives.launch(dies_by_a_real_time_signal, nproc=1)


def dies_by_a_real_time_signal() -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 1)
