"""A restart by torchrun: ranks make new groups and go on from a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sources import SAFE_PATH
from torch import nn
from torch_systems.systems import elastic_program as program
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
