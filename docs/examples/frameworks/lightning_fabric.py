"""Lightning Fabric over this package.

Run with: python lightning_fabric.py
"""

import tiny
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

given = tiny.arguments()
fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=given.backend))
fabric.launch()
assert dist.get_backend() == given.backend

model = tiny.network()
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(tiny.dataset(), batch_size=8))

losses = []
for step, (inputs, targets) in enumerate(batch for _ in range(4) for batch in loader):
    accumulates = step % 2 == 0
    with fabric.no_backward_sync(model, enabled=accumulates):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
    if not accumulates:
        optimizer.step()
        optimizer.zero_grad()
    losses.append(fabric.all_reduce(loss.detach()).item())
if fabric.is_global_zero:
    tiny.report(given, losses, model.module)
dist.destroy_process_group()
