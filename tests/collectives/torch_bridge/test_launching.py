"""Programs as users start them: spawn, and a plain import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from sources import SAFE_PATH

import collectives
from collectives.torch_bridge import register_backend

pytestmark = pytest.mark.usefixtures("preloaded_python")

SCRIPT = """
import torch
import torch.distributed as dist
import collectives

def main():
    dist.init_process_group("{backend}")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5, 1.5]], model.module.weight.grad
    dist.destroy_process_group()
    print(f"rank {{rank}} of {{size}} is done\\n", end="", flush=True)  # in one write

{start}
"""
SPAWN = """
def child(rank, path):
    import os
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=path)
    main()

if __name__ == "__main__":
    import sys
    torch.multiprocessing.spawn(child, (sys.argv[1],), 2)
"""


def run(folder, *command):
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=90, check=False, env=None
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def finished(done):
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2 is done",
        "rank 1 of 2 is done",
    ]
    assert "Overriding" not in done.stderr


@pytest.mark.full
def test_spawn(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.format(backend="collectives", start=SPAWN))
    finished(run(tmp_path, sys.executable, *SAFE_PATH, str(script), str(free_port())))


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
