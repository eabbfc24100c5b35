"""DistributedDataParallel beside what it is compared with: a parameter server on torch's RPC.

Both train the same model on the same data and end with the same parameters. With RPC, every trainer sends its
gradients to one process, which steps and sends parameters back; DDP has no such process. RPC needs no process
group, so that both run in one program.

Run with: torchrun --standalone --nproc-per-node 2 parameter_server.py
"""

import tempfile
import threading

import torch
from torch.distributed import rpc

import collectives as dist
from collectives.ddp import DistributedDataParallel

STEPS, RATE = 10, 0.1


def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 1)


def gradients(model, rank, step):
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    model.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


class Server:
    """Averages the gradients of all trainers, steps, and answers with the parameters."""

    model, given, changed, steps = make_model(), [], threading.Condition(), 0

    @classmethod
    def push(cls, grads, trainers):
        with cls.changed:
            step = cls.steps
            cls.given.append(grads)
            if len(cls.given) == trainers:
                for parameter, *parts in zip(cls.model.parameters(), *cls.given, strict=True):
                    parameter.data -= RATE * sum(parts) / trainers
                cls.given, cls.steps = [], step + 1
                cls.changed.notify_all()
            assert cls.changed.wait_for(lambda: cls.steps > step, timeout=60)
            return [parameter.detach().clone() for parameter in cls.model.parameters()]


dist.init_process_group("host")
rank, size = dist.get_rank(), dist.get_world_size()
ours, served = DistributedDataParallel(make_model()), make_model()
optimizer = torch.optim.SGD(ours.parameters(), lr=RATE)

folder = tempfile.TemporaryDirectory()
path = [f"{folder.name}/rpc"]
dist.broadcast_object_list(path)
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path[0]}", num_worker_threads=size + 4)
rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=size, rpc_backend_options=options)
for step in range(STEPS):
    gradients(ours, rank, step)  # averaged within backward
    optimizer.step()
    parameters = rpc.rpc_sync("trainer0", Server.push, (gradients(served, rank, step), size))
    for parameter, new in zip(served.parameters(), parameters, strict=True):
        parameter.data.copy_(new)
rpc.shutdown()

for parameter, other in zip(ours.parameters(), served.parameters(), strict=True):
    torch.testing.assert_close(parameter, other)
if rank == 0:
    print(f"worked: DistributedDataParallel and a parameter server trained alike, {STEPS} steps")
dist.destroy_process_group()
