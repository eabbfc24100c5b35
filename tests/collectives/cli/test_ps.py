"""What is shown of jobs that run, hang or are stopped."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
from typing import Any

import pytest
import torch
from conformance.test_works import eventually
from harness import current_store, run_ranks

import collectives as dist
from collectives import _native
from collectives.cli import main
from collectives.cli.ps import running_jobs

pytestmark = pytest.mark.usefixtures("preloaded_python")


def shown(*words: str) -> str:
    """Returns what the command prints of the job of this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["ps", "--job", str(os.getpid()), *words]) == 0
    return printed.getvalue()


def state_of(rank: int) -> dict[str, Any]:
    (job,) = json.loads(shown("--json"))
    found: dict[str, Any] = job["groups"][0]["ranks"][rank]
    return found


def one_hangs(rank: int, size: int) -> str:
    dist.init_process_group("host", store=current_store(), rank=rank, world_size=size)
    pair = dist.new_group([0, 1])
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1:
        with pytest.raises(dist.GroupAbortedError):
            dist.all_reduce(torch.ones(5))
    if rank:
        return ""
    assert isinstance(pair, dist.ProcessGroup)
    assert eventually(lambda: state_of(2)["state"] == "stopped" and state_of(1)["waits_for"] is not None)
    text = shown()
    waiting = state_of(1)
    assert waiting["operation"] == "all_reduce(SUM, float32, 5 elements)"
    assert waiting["inside"]
    assert waiting["process"] != os.getpid()
    assert eventually(lambda: "test_ps.py" in state_of(1)["site"])
    assert state_of(0)["process"] == os.getpid()
    every = shown("--all")
    assert len(every.splitlines()) > len(text.splitlines())
    assert "of 2" in every
    assert dist.group.WORLD is not None
    dist.group.WORLD.abort()
    assert "is broken: rank 0 aborted it" in shown()
    return text


def test_a_rank_that_hangs_and_one_that_is_stopped_are_shown() -> None:
    text = run_ranks(one_hangs, 3, isolated=True, lost=[2])[0]
    header, *lines = text.splitlines()
    assert header.split() == ["JOB", "RANK", "PROCESS", "STATE", "FOR", "DOES", "GROUP", "AT"]
    assert [line.split()[1] for line in lines[:3]] == ["0", "1", "2"]
    assert "after barrier number" in lines[0]
    assert "running" in lines[1]
    assert "in all_reduce(SUM, float32, 5 elements) number" in lines[1]
    assert "stopped" in lines[2]
    assert lines[3].endswith("waits for ranks 0 (running), 2 (stopped)")


def receives(rank: int, size: int) -> bool:
    group = dist.init_process_group("host", store=current_store(), rank=rank, world_size=size)
    assert group is None
    if rank == 1:
        dist.recv(torch.ones(1), src=0, tag=7)
        return True
    # Not at every moment: before the receiver sleeps for long, it leaves a short wait.
    found = eventually(lambda: "receives from rank 0, tag 7" in shown())
    dist.send(torch.ones(1), dst=1, tag=7)
    return found


def test_a_message_that_is_awaited_is_shown() -> None:
    assert run_ranks(receives, 2, isolated=True) == [True, True]


def calls_from_an_odd_file(rank: int, size: int) -> str:
    dist.init_process_group("host", store=current_store(), rank=rank, world_size=size)
    if rank == 1:
        exec(compile("dist.barrier()", "\x1b[2J.py", "exec"), {"dist": dist})
        return ""
    assert eventually(lambda: "[2J.py" in state_of(1)["site"])
    text = shown()
    dist.barrier()
    return text


def test_what_would_command_the_terminal_is_not_printed() -> None:
    text = run_ranks(calls_from_an_odd_file, 2, isolated=True)[0]
    assert "?[2J.py" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("looks", ["listdir", "scandir"])
def test_a_process_that_ends_meanwhile_is_passed_over(monkeypatch: pytest.MonkeyPatch, looks: str) -> None:
    look = getattr(os, looks)

    def ended(path: Any = ".") -> Any:
        if str(path) == f"/proc/{os.getpid()}/fd":
            raise FileNotFoundError(path)
        return look(path)

    monkeypatch.setattr(os, looks, ended)
    assert all(os.getpid() not in job.processes() for job in running_jobs())


def test_no_such_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--job", "no such job"]) == 1
    assert "no job 'no such job' of this user" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_seconds_between_looks_are_checked(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    assert main(["ps", "--watch", seconds]) == 1
    assert "above 0" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"no segment" * 1000])
def test_what_is_no_segment_is_refused(content: bytes) -> None:
    descriptor = os.memfd_create("collectives", os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, content)
        with pytest.raises(dist.DistBackendError, match="no sealed segment"):
            _native.observe_segment(descriptor)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with pytest.raises(dist.DistBackendError, match=r"no segment of a group|cannot map 0 bytes"):
            _native.observe_segment(descriptor)
    finally:
        os.close(descriptor)
