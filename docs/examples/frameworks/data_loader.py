"""A DataLoader whose workers are forked from ranks that communicate.

Run with: torchrun --standalone --nproc-per-node 2 data_loader.py
"""

import tiny
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

given = tiny.arguments()
dist.init_process_group(given.backend)
data = tiny.dataset()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2, multiprocessing_context="fork")
model = DistributedDataParallel(tiny.network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

losses = []
for epoch in range(4):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:  # forks, with the group in use
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
if dist.get_rank() == 0:
    tiny.report(given, losses, model.module)
dist.destroy_process_group()
