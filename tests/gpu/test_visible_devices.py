"""Ranks whose GPU is chosen by CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from gpu.cuda_ranks import NO_DEVICE
from gpu.one_visible_device import in_sight_of_one
from harness import run_ranks
from sources import PYTHONPATH


@pytest.mark.usefixtures("preloaded_python")
def test_what_ranks_load_asks_cuda_nothing() -> None:
    """A rank loads the module first, and then sets the variable; CUDA would not read it any more."""
    program = (
        "import torch\n"
        "def refuse(*_): raise AssertionError('CUDA was asked')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse\n"
        f"import {in_sight_of_one.__module__}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(NO_DEVICE is not None, reason=str(NO_DEVICE))
def test_one_visible_device_for_each_rank() -> None:
    everyone = ",".join(map(str, range(torch.cuda.device_count())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", everyone).split(",")
    assert run_ranks(in_sight_of_one, 2, visible, isolated=True) == [[3.0] * 3] * 2
