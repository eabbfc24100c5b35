"""Dumps on a signal, of a process that hangs, too."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from harness import current_store, run_ranks
from waiting import until

import collectives as dist


def hangs(rank: int, size: int, prefix: str, backend: str) -> None:
    dist.init_process_group(backend, store=current_store(), rank=rank, world_size=size)
    dist.barrier()
    store = current_store()
    if rank == 0:
        store.set("process", str(os.getpid()))
        dist.all_reduce(torch.ones(3))  # on the main thread, in C++, until the other rank comes
    else:
        process = int(store.get("process"))
        file = Path(f"{prefix}0.json")

        def hung() -> object:
            os.kill(process, signal.SIGUSR1)
            if not file.exists():
                return False
            group = json.loads(file.read_text())["groups"][0]
            # The core of host asks where its caller is once that has waited for a moment.
            return group["begun"] == 2 and (backend == "gloo" or group["operations"][-1]["site"])

        until(hung)
        dumped = json.loads(file.read_text())
        assert dumped["reason"] == "the signal SIGUSR1"
        assert (dumped["rank"], dumped["process"]) == (0, process)
        last = dumped["groups"][0]["operations"][-1]
        assert (last["name"], last["shape"], last["state"]) == ("all_reduce", [3], "pending")
        assert backend == "gloo" or last["site"].startswith("test_dump_signal.py:")
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "host"])
def test_a_rank_that_hangs_writes_what_it_waits_in(backend: str, tmp_path: Path) -> None:
    prefix = str(tmp_path / "flight")
    env = {"COLLECTIVES_FLIGHT_RECORD_SIGNAL": "SIGUSR1", "COLLECTIVES_FLIGHT_RECORD_FILE": prefix}
    run_ranks(hangs, 2, prefix, backend, isolated=True, env=env)


@pytest.mark.parametrize(
    ("name", "file", "complaint"),
    [
        ("USR1", "/tmp/flight", "must be the name of a signal, such as SIGUSR1, but is 'USR1'"),
        ("SIG_IGN", "/tmp/flight", "must be the name of a signal, such as SIGUSR1, but is 'SIG_IGN'"),
        ("SIGUSR1", "", "COLLECTIVES_FLIGHT_RECORD_FILE does not say where to write"),
    ],
)
def test_wrong_settings_are_told_when_a_group_is_made(
    name: str, file: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLECTIVES_FLIGHT_RECORD_SIGNAL", name)
    monkeypatch.setenv("COLLECTIVES_FLIGHT_RECORD_FILE", file)
    with pytest.raises(ValueError, match=complaint):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def keeps_its_descriptor(rank: int, size: int) -> None:
    read, write = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(write)
    dist.init_process_group("gloo", store=current_store(), rank=rank, world_size=size)
    dist.destroy_process_group()
    assert signal.set_wakeup_fd(-1) == write
    os.close(read)
    os.close(write)


def test_a_wakeup_descriptor_of_the_program_stays(tmp_path: Path) -> None:
    env = {
        "COLLECTIVES_FLIGHT_RECORD_SIGNAL": "SIGUSR1",
        "COLLECTIVES_FLIGHT_RECORD_FILE": str(tmp_path / "flight"),
    }
    run_ranks(keeps_its_descriptor, 1, isolated=True, env=env)
