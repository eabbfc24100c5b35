"""What a plain import registers, and what it leaves as it is."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from sources import SAFE_PATH

import collectives
from collectives.torch_bridge import register_backend

pytestmark = pytest.mark.usefixtures("preloaded_python")


def run(folder, *command):
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=90, check=False, env=None
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_import_registers_and_loads_no_backend(tmp_path, fresh_python):
    program = (
        "import sys, torch, collectives, torch.distributed as dist;"
        "print(dist.is_backend_available('collectives'), dist.Backend('Collectives'),"
        "dist.Backend.COLLECTIVES_ROUND_ROBIN, dist.Backend.backend_capability['collectives'],"
        "[m for m in sys.modules if m.startswith('collectives.backends')"
        " or m in ('collectives.torch_bridge.operators', 'collectives.torch_bridge.group')])"
    )
    done = run(tmp_path, sys.executable, *SAFE_PATH, "-W", "error", "-c", program)
    devices = ["cpu"] if torch.version.cuda is None else ["cpu", "cuda"]
    assert done.stdout.split("\n")[0] == f"True collectives collectives_round_robin {devices} []"


def test_default_backends_stay():
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    assert collectives.torch_bridge.register() is None
    assert dist.get_default_backend_for_device("cpu") == "gloo"


def test_a_name_of_others_is_refused():
    dist.Backend.register_backend("somebody_elses", lambda *_: None, devices=["cpu"])
    try:
        with pytest.raises(ValueError, match="somebody_elses"):
            register_backend("somebody_elses", "host")
    finally:
        del dist.Backend._plugins["SOMEBODY_ELSES"]
        del dist.Backend.SOMEBODY_ELSES
        dist.Backend.backend_list.remove("somebody_elses")
        del dist.Backend.backend_type_map["somebody_elses"]
        del dist.Backend.backend_capability["somebody_elses"]
