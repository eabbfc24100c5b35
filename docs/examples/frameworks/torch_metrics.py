"""torchmetrics over this package: every rank gets the figure of all ranks.

Run with: torchrun --standalone --nproc-per-node 2 torch_metrics.py
"""

import tiny
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection

given = tiny.arguments()
dist.init_process_group(given.backend)
data = tiny.dataset()
model = DistributedDataParallel(tiny.network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
metrics = MetricCollection({"mse": MeanSquaredError(), "rows": MeanMetric()})

losses = []
for _ in range(8):
    for inputs, targets in DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False)):
        outputs = model(inputs)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(outputs, targets).backward()
        optimizer.step()
        metrics["mse"].update(outputs.detach(), targets)
        metrics["rows"].update(float(dist.get_rank()))
    figures = metrics.compute()  # communicates
    assert figures["rows"] == 0.5  # the mean over both ranks, not this rank's own
    losses.append(figures["mse"].item())
    metrics.reset()
if dist.get_rank() == 0:
    tiny.report(given, losses, model.module)
dist.destroy_process_group()
