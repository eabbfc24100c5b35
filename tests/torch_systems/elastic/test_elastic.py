"""Restarts by torchrun: ranks, also more than before, make new groups and go on from a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ports import free_port
from sources import SAFE_PATH
from torch import nn
from torch_systems.elastic import elastic_program as program
from torch_systems.elastic import growing_program
from torch_world import BACKEND

pytestmark = pytest.mark.usefixtures("preloaded_python")

RANKS = 2


def alone():
    """Returns the parameters of one process that takes all steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(program.STEPS):
        optimizer.zero_grad()
        model(
            torch.randn(4 * RANKS, 3, generator=torch.Generator().manual_seed(step))
        ).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def test_restart_after_a_rank_was_killed(tmp_path):
    command = [
        sys.executable, *SAFE_PATH, "-m", "torch.distributed.run",
        "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "1",
        str(Path(program.__file__)), str(tmp_path), BACKEND,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    began = {path.name: path.read_text() for path in tmp_path.glob("[01]-*")}
    assert began == {
        f"{attempt}-{rank}": f"{first} of {RANKS}"
        for attempt, first in ((0, 0), (1, program.LAST_STEP_OF_RANK_1))
        for rank in range(RANKS)
    }
    step, state = torch.load(tmp_path / "checkpoint")
    assert step == program.STEPS
    for name, value in alone().items():
        torch.testing.assert_close(state[name], value)
    for path in tmp_path.glob("error-*"):
        assert "PeerLostError" in path.read_text()


def test_a_second_machine_joins(tmp_path):
    command = [
        sys.executable, *SAFE_PATH, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-id", "growing", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
        "--rdzv-conf", "last_call_timeout=1,join_timeout=60",
        str(Path(growing_program.__file__)), str(tmp_path), BACKEND,
    ]  # fmt: skip
    # In a store that they share with the ranks, launchers of torch 2.13 meet keys of the round before, and
    # wait for ever, whatever the backend.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launchers = []
    try:
        for _ in range(2):
            launchers.append(
                subprocess.Popen(
                    command,
                    cwd=tmp_path,
                    env=environment,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
            deadline = time.monotonic() + 60
            while not (tmp_path / "waiting").exists():
                assert launchers[0].poll() is None, launchers[0].communicate()[0]
                assert time.monotonic() < deadline, "the first rank has not come to its half"
                time.sleep(0.05)
        said = [launcher.communicate(timeout=90)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()  # ends its ranks, too
            launcher.communicate()
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(said)
    began = {path.name: path.read_text().splitlines() for path in tmp_path.glob("*-of-*")}
    half = f"from {growing_program.HALF}"
    # torchrun may start the first rank alone again, before the second launcher is ready.
    first, *again = began.pop("0-of-1")
    assert (first, set(again) - {half}) == ("from 0", set())
    assert began == {"0-of-2": [half], "1-of-2": [half]}
    step, state = torch.load(tmp_path / "checkpoint")
    assert step == growing_program.STEPS
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(growing_program.STEPS):
        optimizer.zero_grad()
        model(growing_program.batch(step)).square().mean().backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value)
