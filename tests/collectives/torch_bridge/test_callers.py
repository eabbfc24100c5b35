"""Operations that C++ threads issue, which have no Python frames below them."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_world import run_torch

DEPTH = 75
"""More reentrant backward passes than autograd nests on one thread, which is 60."""


class Nested(torch.nn.Module):
    """Layers, each in a checkpoint that encloses all before it."""

    def __init__(self, depth=DEPTH):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(depth))

    def forward(self, x, depth=None):
        depth = len(self.layers) if depth is None else depth
        if depth:
            x = self.layers[depth - 1](checkpoint(self.forward, x, depth - 1, use_reentrant=True))
        return x


def mean_over_ranks(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    return gradients


def nested_checkpoints(rank, size):
    torch.manual_seed(1)
    net = Nested()
    x = torch.full((1, 2), rank + 1.0, requires_grad=True)
    net(x).sum().backward()
    expected = mean_over_ranks([p.grad.clone() for p in net.parameters()])
    # from its second iteration on DDP has a bucket for each parameter, of which autograd's further threads
    # issue those of the innermost passes
    model = DistributedDataParallel(net, bucket_cap_mb=1e-6)
    for _ in range(2):
        net.zero_grad()
        model(x).sum().backward()
        torch.testing.assert_close([p.grad for p in net.parameters()], expected)


def test_backward_passes_nested_beyond_one_thread():
    run_torch(nested_checkpoints)


def distributed_autograd(rank, size, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", _transports=["uv"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    torch.manual_seed(1)
    net = torch.nn.Linear(3, 2)
    x = torch.full((1, 3), rank + 1.0)
    net(x).square().sum().backward()
    expected = mean_over_ranks([p.grad.clone() for p in net.parameters()])
    net.zero_grad(set_to_none=True)
    model = DistributedDataParallel(net)
    with dist_autograd.context() as context:
        squares = rpc.rpc_sync(f"rank{(rank + 1) % size}", torch.square, (model(x),))
        dist_autograd.backward(context, [squares.sum()])
        gradients = dist_autograd.get_gradients(context)
        torch.testing.assert_close([gradients[p] for p in net.parameters()], expected)
        dist.barrier()
    rpc.shutdown()


def test_distributed_autograd():
    with tempfile.TemporaryDirectory() as folder:
        run_torch(distributed_autograd, 2, folder)


SCRIPT = """
def total(x: Tensor, group: str) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group))

def copies(x: Tensor, size: int, group: str) -> Tensor:
    x = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.broadcast(x, 0, group))
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, size, group)
    return torch.ops._c10d_functional.wait_tensor(gathered)

def forked(x: Tensor, size: int, group: str) -> Tuple[Tensor, Tensor]:
    first = torch.jit.wait(torch.jit.fork(total, x, group))
    return first, torch.jit.wait(torch.jit.fork(copies, x, size, group))
"""


def forked_by_torchscript(rank, size):
    x = torch.full((4,), rank + 1.0)
    total, gathered = torch.jit.CompilationUnit(SCRIPT).forked(x, size, dist.group.WORLD.group_name)
    assert torch.equal(total, torch.full((4,), sum(range(1, size + 1)) * 1.0))
    assert torch.equal(gathered, torch.ones(4 * size))


def test_threads_of_torchscript():
    run_torch(forked_by_torchscript)
