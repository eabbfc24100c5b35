"""torch.compile around and inside of DistributedDataParallel."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

import pytest
import torch
from harness import run_ranks
from on_ranks import on_ranks
from sources import SAFE_PATH
from torch import nn

from collectives.ddp import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("preloaded_python")

WIDTH = 384  # a layer is half a bucket of the least size that the compiler splits at


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = norm
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        for layer in self.first:
            x = torch.tanh(layer(x))
        x = self.norm(x)
        for layer in self.second:
            x = torch.tanh(layer(x))
        return x


def train(group, how, norm, backend=None):
    """Returns the parameters after some steps, the number of graphs, and whether it overlapped."""
    torch._dynamo.reset()
    from torch._dynamo.backends.debugging import aot_eager

    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = functools.partial(torch.compile, backend=backend or counting)
    torch.manual_seed(0)
    module = Net(norm)
    inner = compiled(module) if how == "inside" else module
    model = DistributedDataParallel(inner, process_group=group, bucket_cap_mb=0.1)
    if how == "outside":
        model = compiled(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + group.rank()))
        model(x).square().mean().backward()
        optimizer.step()
    data = model._get_ddp_logging_data()
    early = data["backward_comm_time_start"] < data["backward_compute_time_end"]
    return nn.utils.parameters_to_vector(module.parameters()).detach(), len(graphs), early


def compare(group, how):
    expected, none, _ = train(group, "never", nn.Identity())
    assert none == 0
    found, graphs, early = train(group, how, nn.Identity())
    assert torch.equal(found, expected), (found - expected).abs().max()
    return graphs, early


@on_ranks(2)
def test_trains_as_without_the_compiler_and_communicates_during_backward(group):
    for how in ("outside", "inside"):
        graphs, early = compare(group, how)
        assert graphs == 2, how  # one would deliver all gradients at the end
        assert early, how
    with torch._dynamo.config.patch(optimize_ddp=False):
        graphs, _ = compare(group, "outside")
        assert graphs == 1


def train_compiled(group, how):
    """Returns parameters after training with inductor, without a compiler, and whether it overlapped."""
    found, _, early = train(group, how, nn.LayerNorm(WIDTH), "inductor")
    from torch._dynamo.utils import counters

    counted = dict(counters["inductor"])
    return found, train(group, "never", nn.LayerNorm(WIDTH))[0], early, counted


@pytest.fixture(scope="module")
def compiled_code(tmp_path_factory):
    """What inductor has compiled, so that the second of its tests compiles only what differs."""
    return tmp_path_factory.mktemp("inductor")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler; set CXX"
)
@pytest.mark.parametrize("how", ["outside", "inside"])
def test_inductor_trains_as_no_compiler_and_communicates_during_backward(how, compiled_code):
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(compiled_code)}
    results = run_ranks(train_compiled, 2, how, backend="host", isolated=True, env=env, timeout=540)
    for found, expected, early, counted in results:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(found, results[0][0])
        assert early
        assert counted  # it was inductor that compiled


@pytest.mark.full
def test_the_compiler_is_not_loaded_for_those_who_do_not_use_it(fresh_python):
    script = """if True:
        import sys, torch, collectives
        from collectives.ddp import DistributedDataParallel, SyncBatchNorm
        from collectives.store import HashStore
        collectives.init_process_group("host", store=HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), SyncBatchNorm(2)))
        model(torch.randn(3, 2)).sum().backward()
        collectives.destroy_process_group()
        print("torch._dynamo" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


LOGGED = """
import torch
from torch import nn
import collectives as dist
from collectives.ddp import DistributedDataParallel

dist.init_process_group("host", store=dist.HashStore(), rank=0, world_size=1)
module = nn.Sequential(*[nn.Linear(384, 384) for _ in range(4)])
model = torch.compile(DistributedDataParallel(module, bucket_cap_mb=1), backend="eager")
model(torch.ones(2, 384)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.full
def test_torch_logs_show_the_buckets_of_the_compiler():
    """``TORCH_LOGS`` shows what it shows of torch's wrapper: the buckets, and the graph cut at them."""
    done = subprocess.run(
        [sys.executable, *SAFE_PATH, "-c", LOGGED],
        env={**os.environ, "TORCH_LOGS": "ddp_graphs,ddp", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "_dynamo/backends/distributed.py:" in line]
    assert sum("DDPOptimizer used bucket cap 1048576 and created 2 buckets" in line for line in told) == 1
    for graph in ("orig", "split", "final"):
        assert sum(f"[__ddp_graphs] ---{graph} graph---" in line for line in told) == 1
