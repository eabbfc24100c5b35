"""What ranks of ``launch`` have started ends with them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sources import PYTHONPATH

import collectives
from collectives.ranks.processes import RankFailedError

pytestmark = pytest.mark.full  # interpreters of their own: a fork of a stand-in leads another group


def start_and(how):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("started", child.pid, apart.pid)
    if how == "dies" and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "returns":
        time.sleep(600)


def numbers(text):
    return [tuple(map(int, line.split("started ")[1].split())) for line in text.splitlines()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def ends(pid):
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def check(started):
    try:
        assert [child for child, _ in started if not ends(child)] == []
        assert all(is_running(apart) for _, apart in started), "a session of its own is the user's affair"
    finally:
        for _, apart in started:
            os.kill(apart, signal.SIGKILL)


@pytest.mark.parametrize("how", ["returns", "dies"])
def test_processes_that_ranks_start_end_with_them(how, capfd):
    fails = contextlib.nullcontext() if how == "returns" else pytest.raises(RankFailedError, match="rank 0")
    with fails:
        collectives.launch(start_and, (how,), nproc=2)
    started = numbers(capfd.readouterr().out)
    assert started
    check(started)


SCRIPT = """
import collectives, test_launched_children
collectives.launch(test_launched_children.start_and, ("waits",), nproc=2)
"""


def test_they_end_where_the_caller_is_killed():
    path = os.pathsep.join([str(Path(__file__).parent), PYTHONPATH])
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with script:
        lines = script.stdout.readline() + script.stdout.readline()
        script.kill()
    check(numbers(lines))
