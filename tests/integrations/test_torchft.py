"""torchft's Manager and DDP train over our groups; what its process group does when a replica dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from torch._C import _distributed_c10d as c10d

from collectives.errors import PeerLostError

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "frameworks"


def quorums(group):
    """Ranks meet, go apart, and meet again without the one that died."""
    from collectives.integrations.torchft import ProcessGroupCollectives

    rank, one = group.rank(), torch.ones(3)
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.fill_(store.port)
    group.broadcast(port, 0).wait()
    address = f"127.0.0.1:{port.item()}"
    replicas = ProcessGroupCollectives(timedelta(seconds=20))
    assert replicas.errored() is None
    assert replicas.getBackendName() == "torchft-collectives"
    for quorum in range(2):
        replicas.configure(f"{address}/quorum{quorum}", f"replica {rank}", rank, 3)
        tensor = one.clone()
        replicas.allreduce([tensor], torch.distributed.ReduceOp.SUM).wait()
        assert tensor.tolist() == [3, 3, 3]
        assert replicas.size() == 3
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        replicas.allreduce([one.clone()], torch.distributed.ReduceOp.SUM).wait()
    assert isinstance(replicas.errored(), PeerLostError)
    replicas.set_timeout(timedelta(seconds=10))
    replicas.configure(f"{address}/quorum2", f"replica {rank}", rank, 2)
    assert replicas.errored() is None
    tensor = one.clone()
    replicas.allreduce([tensor], torch.distributed.ReduceOp.SUM).wait()
    assert tensor.tolist() == [2, 2, 2]
    gathered = [[torch.zeros(3) for _ in range(2)]]
    replicas.allgather(gathered, [one * rank], c10d.AllgatherOptions()).wait()
    assert [part.tolist() for part in gathered[0]] == [[0, 0, 0], [1, 1, 1]]
    replicas.barrier().wait()
    replicas.shutdown()
    replicas.shutdown()
    assert replicas.errored() is None


def test_replicas_meet_again_without_the_one_that_died() -> None:
    pytest.importorskip("torchft")
    run_ranks(quorums, 3, backend="host", isolated=True, lost=[2])


def test_the_example_trains_on_through_kills() -> None:
    pytest.importorskip("torchft")
    command = [sys.executable, "torchft_train.py", "--replicas", "3", "--kills", "2", "--every", "12"]
    done = subprocess.run(
        [*command, "--steps", "400", "--megabytes", "10"],
        cwd=EXAMPLES,
        env={**os.environ, "RUST_LOG": "error"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "worked: 2 kills, 400 steps" in done.stdout
    lost = [
        int(line.split(" lost")[0].rsplit(maxsplit=1)[-1])
        for line in done.stdout.splitlines()
        if " lost, " in line
    ]
    assert len(lost) == 3
    assert max(lost) <= 2, "a kill costs at most one step"
