"""What the environment tells, and scripts under a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

import collectives as dist

pytestmark = pytest.mark.usefixtures("preloaded_python")


def test_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert dist.get_node_local_rank(3) == 3
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not in the environment"):
        dist.get_node_local_rank()
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert dist.get_node_local_rank() == dist.get_node_local_rank(1) == 5


def test_elastic_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert dist.is_torchelastic_launched()


ON_TWO_MACHINES = """
import os, sys
import torch, collectives as dist
assert len(sys.argv) == 1, sys.argv
dist.init_process_group("host")
rank, local_rank = dist.get_rank(), dist.get_node_local_rank()
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, (rank, local_rank, int(os.environ["GROUP_RANK"])))
assert ranks == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)], ranks
dist.destroy_process_group()
print(f"rank {rank} is {local_rank} here\\n", end="", flush=True)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.full
def test_the_older_launcher_on_two_machines(tmp_path: Path) -> None:
    """Ranks count through both machines, local ranks on each from 0; ``--use-env`` hands over no argument."""
    script = tmp_path / "script.py"
    script.write_text(ON_TWO_MACHINES)
    words = [
        "--nnodes=2",
        "--nproc-per-node=2",
        "--use-env",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    ]
    machines = [
        start("-m", "torch.distributed.launch", f"--node-rank={machine}", *words, str(script))
        for machine in range(2)
    ]
    try:
        for machine, process in enumerate(machines):
            printed, complaints = process.communicate(timeout=60)
            assert process.returncode == 0, complaints
            first = 2 * machine
            assert sorted(printed.splitlines()) == [f"rank {first} is 0 here", f"rank {first + 1} is 1 here"]
    finally:
        for process in machines:
            process.terminate()
            process.communicate(timeout=20)
