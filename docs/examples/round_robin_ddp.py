"""Our DistributedDataParallel over a round-robin group: successive buckets go to successive lanes.

Run with: torchrun --standalone --nproc-per-node 2 round_robin_ddp.py
"""

import torch

import collectives as dist
from collectives.backends.round_robin import round_robin_process_groups
from collectives.ddp import DistributedDataParallel

dist.init_process_group("host")
lanes = round_robin_process_groups([dist.new_group() for _ in range(3)])

torch.manual_seed(dist.get_rank())
network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
model = DistributedDataParallel(network, process_group=lanes, bucket_cap_mb=0.05)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(10):
    inputs = torch.randn(32, 64)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()  # several buckets are in flight at once
    optimizer.step()

mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(everyone, mine)
assert all(torch.equal(mine, other) for other in everyone)
if dist.get_rank() == 0:
    print(f"worked: {dist.get_world_size()} ranks, three lanes of host, bitwise equal parameters")
dist.destroy_process_group()
