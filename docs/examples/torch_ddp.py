"""torch's DistributedDataParallel over this package: one word of an existing program changes.

Run with: torchrun --standalone --nproc-per-node 2 torch_ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("collectives")
torch.manual_seed(dist.get_rank())  # other data on each rank; DDP sends rank 0's parameters to all
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

losses = []
for _ in range(50):
    inputs = torch.randn(16, 8)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 10

weights = [torch.empty_like(model.module.weight) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.detach())
assert all(torch.equal(weights[0], other) for other in weights)
if dist.get_rank() == 0:
    print(f"worked: {len(weights)} ranks, equal parameters, loss {losses[0]:.2f} to {losses[-1]:.2f}")
dist.destroy_process_group()
