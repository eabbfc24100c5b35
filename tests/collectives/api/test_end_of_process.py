"""The end of a process without ``destroy_process_group``: what is printed, told to others and waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import current_store, run_ranks

import collectives as dist

pytestmark = pytest.mark.usefixtures("preloaded_python")


def run_script(script: str, size: int, *words: str) -> list[tuple[int, str, str]]:
    """Runs a script as ``size`` ranks; returns the exit status, output and errors of each."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "WORLD_SIZE": str(size)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *words],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        ended = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


BEGIN = """
import os, sys, threading, time
from datetime import timedelta
import torch, collectives as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store, case = sys.argv[1:]
world = torch.distributed if case == "torch" else dist
backend = "collectives" if case == "torch" else "host" if case in ("future", "thread") else case
world.init_process_group(backend, f"file://{store}", rank=rank, world_size=size)
"""

UNFINISHED = (
    BEGIN
    + """
def fail():
    future = dist.all_reduce(torch.ones(2 + rank), async_op=True).get_future()
    try:
        future.wait()
    except dist.CollectiveMismatchError:
        print("refused")

def hold(ready):
    work = world.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    ready.set()
    time.sleep(600)

if case == "future":
    fail()
else:
    ready = threading.Event()
    threading.Thread(target=hold, args=(ready,), daemon=True).start()
    ready.wait()
"""
)


@pytest.mark.full
@pytest.mark.parametrize(
    "case", ["future", "thread", "torch"], ids=["failed future", "daemon thread", "daemon thread in torch"]
)
def test_no_object_that_is_still_alive_is_reported(tmp_path: Path, case: str) -> None:
    for rank, (status, _, errors) in enumerate(run_script(UNFINISHED, 2, str(tmp_path / "store"), case)):
        assert status == 0, errors
        mine = (
            f"[rank {rank}] host group '0' (default_pg) of 2: the process ends with 1 process group(s) open"
        )
        assert [line[: len(mine)] for line in errors.splitlines()] == ([] if case == "torch" else [mine])


FAILS = (
    BEGIN
    + """
tensor = torch.ones(2)
world.all_reduce(tensor)
if rank == 1:
    raise KeyError("row 17 of the d\u00e9p\u00f4t")
try:
    world.all_reduce(tensor)
except dist.GroupAbortedError as error:
    print(error)
"""
)


@pytest.mark.full
@pytest.mark.parametrize("case", ["host", "round_robin", "gloo", "torch"])
def test_other_ranks_are_told_of_the_exception_that_ended_a_program(tmp_path: Path, case: str) -> None:
    (_, told, errors), (status, _, _) = run_script(FAILS, 2, str(tmp_path / "store"), case)
    assert status == 1
    assert "rank 1 aborted" in told, errors
    assert ", after KeyError: 'row 17 of the d\u00e9p\u00f4t'" in told


def aborts_later(rank: int, size: int) -> str:
    dist.init_process_group("host", store=current_store(), rank=rank, world_size=size)
    group = dist.group.WORLD
    if rank == 1:
        sys.ps1, sys.last_value = ">>> ", KeyError("a slip at the prompt, an hour ago")
        group.abort()
        del sys.ps1, sys.last_value
        return ""
    with pytest.raises(dist.GroupAbortedError) as caught:
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


def test_an_earlier_slip_at_a_prompt_is_no_reason() -> None:
    told = run_ranks(aborts_later, 2, isolated=True)[0]
    assert "rank 1 aborted" in told
    assert "slip" not in told


LOSES = (
    BEGIN
    + """
import collectives.api.init_and_destroy
collectives.api.init_and_destroy._LEAVERS_LIMIT = timedelta(hours=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
if rank == 2:
    os.kill(os.getpid(), 9)
try:
    dist.all_reduce(tensor)
except dist.PeerLostError as error:
    print(error.rank)
"""
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "end"),
    [
        ("host", "dist.destroy_process_group()"),
        ("host", ""),
        ("round_robin", ""),
        ("gloo", "dist.destroy_process_group()"),
    ],
    ids=["host-destroy", "host-exit", "round_robin-exit", "gloo-destroy"],
)
def test_rank_0_does_not_wait_for_ranks_that_it_knows_are_dead(tmp_path: Path, case: str, end: str) -> None:
    ended = run_script(LOSES + end, 3, str(tmp_path / "store"), case)
    assert [status for status, _, _ in ended] == [0, 0, -signal.SIGKILL], ended
    assert [told.strip() for _, told, _ in ended] == ["2", "2", ""]


FORGETFUL = """
import os, sys, torch, collectives as dist
url = f"file://{sys.argv[1]}"
if os.fork() == 0:  # a process that was forked before may begin a world
    dist.init_process_group("host", f"{url}-of-the-child", rank=0, world_size=1)
    dist.new_group()
    sys.exit(0)
assert os.wait()[1] == 0
dist.init_process_group("host", url, rank=0, world_size=1)
if os.fork() == 0:  # one that was forked within a world has no part in it
    sys.exit(0)
assert os.wait()[1] == 0
tensor = torch.ones(1)
dist.all_reduce(tensor)
dist.destroy_process_group()
print("fine")
"""


@pytest.mark.full
def test_the_end_of_a_process_ends_its_own_world_with_one_line(tmp_path: Path) -> None:
    ((status, said, errors),) = run_script(FORGETFUL, 1, str(tmp_path / "store"))
    assert (status, said.strip()) == (0, "fine"), errors
    assert errors.strip() == (
        "[rank 0] host group '0' (default_pg) of 1: the process ends with 2 process group(s) open; call "
        "collectives.destroy_process_group() on all ranks"
    )


LEAVES_EARLY = (
    BEGIN
    + """
tensor = torch.ones(1_000_000)
dist.all_reduce(tensor)
if rank == 1:
    time.sleep(0.5)
    dist.recv(tensor, 0)
    dist.destroy_process_group()
else:
    dist.send(tensor + 1, 1)
print(tensor[0].item())
"""
)


@pytest.mark.full
def test_rank_that_ends_early_leaves_what_it_sent(tmp_path: Path) -> None:
    (first, *_), (second, said, errors) = run_script(LEAVES_EARLY, 2, str(tmp_path / "store"), "host")
    assert (first, second, said.strip()) == (0, 0, "3.0"), errors
