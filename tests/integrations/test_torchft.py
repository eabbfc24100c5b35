"""torchft's Manager and DDP train over our groups; what its process group does when a replica dies."""

from __future__ import annotations

import copy
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

from collectives.ddp.model_averaging import DiLoCoAverager
from collectives.ddp.optim import PostLocalSGDOptimizer
from collectives.errors import PeerLostError

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "frameworks"


def store_of_rank_0(group):
    """Returns the address of a store as torchft makes it, and on rank 0 the store, to be kept."""
    port, store = torch.zeros(1, dtype=torch.int64), None
    if group.rank() == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.fill_(store.port)
    group.broadcast(port, 0).wait()
    return f"127.0.0.1:{port.item()}", store


def quorums(group):
    """Ranks meet, go apart, and meet again without the one that died."""
    from collectives.integrations.torchft import ProcessGroupCollectives

    rank, one = group.rank(), torch.ones(3)
    address, _store = store_of_rank_0(group)
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


def messages_without_a_replica(group):
    """Whoever ends its group disturbs no operation that goes on without it."""
    from collectives.integrations.torchft import ProcessGroupCollectives

    rank, one = group.rank(), torch.ones(3)
    address, _store = store_of_rank_0(group)
    replicas = ProcessGroupCollectives(timedelta(seconds=20))
    replicas.configure(f"{address}/quorum", f"replica {rank}", rank, 3)
    replicas.allreduce([one.clone()], torch.distributed.ReduceOp.SUM).wait()
    if rank == 2:
        replicas.shutdown()
    group.barrier().wait()
    got = torch.zeros(3)
    if rank == 0:
        replicas.send([one], 1, 0).wait()
    elif rank == 1:
        replicas.recv([got], 0, 0).wait()
        assert got.tolist() == [1, 1, 1]
    group.barrier().wait()
    if rank < 2:
        with pytest.raises(PeerLostError, match=r"rank 2 .*has left the group"):
            replicas.allreduce([one.clone()], torch.distributed.ReduceOp.SUM).wait()
        replicas.shutdown()


def test_a_replica_that_ends_its_group_leaves_the_others_messages_alone() -> None:
    pytest.importorskip("torchft")
    run_ranks(messages_without_a_replica, 3, backend="host", isolated=True)


class OneQuorum:
    """What torchft's DiLoCo calls of a Manager, for replicas that none joins or leaves."""

    _use_async_quorum = False

    def __init__(self, group):
        self._group, self._step = group, 0

    def current_step(self):
        return self._step

    def should_commit(self):
        self._step += 1
        return True

    def allreduce(self, tensor, should_quantize=False):
        assert not should_quantize
        return self._group.allreduce(tensor.div_(self._group.size()))

    def nothing(self, *_):
        pass

    start_quorum = disallow_state_dict_read = allow_state_dict_read = register_state_dict_fn = nothing


def diloco_of_both(group):
    """Trains two copies of a model, by torchft's DiLoCo and by ours; returns their parameters."""
    from torchft.local_sgd import DiLoCo

    torch.manual_seed(1)
    theirs = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    ours = copy.deepcopy(theirs)
    batches = [
        torch.randn(8, 4, generator=torch.Generator().manual_seed(9 * s + group.rank())) for s in range(20)
    ]

    def train(model, optimizer):
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    inner = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    outer = torch.optim.SGD(theirs.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(OneQuorum(group), [theirs], inner, outer, sync_every=4):
        train(theirs, inner)
    averager = DiLoCoAverager(ours.parameters(), period=4, lr=0.7, momentum=0.9, process_group=group)
    train(ours, PostLocalSGDOptimizer(torch.optim.AdamW(ours.parameters(), lr=0.01), averager))
    averager.finish()
    return [[p.detach() for p in model.parameters()] for model in (theirs, ours)]


def test_diloco_takes_the_steps_of_torchfts() -> None:
    pytest.importorskip("torchft")
    for theirs, ours in run_ranks(diloco_of_both, 2, backend="host"):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


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
