"""Hugging Face Accelerate over this package.

Run with: accelerate launch --multi_gpu --num_processes 2 accelerate_launch.py
"""

import accelerate
import tiny
import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs

import collectives.integrations.accelerate as ours

given = tiny.arguments()
ours.register()  # Accelerate takes no name but gloo for CPUs
make = ours.Accelerator if given.ddp == "collectives" else accelerate.Accelerator
accelerator = make(
    cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[InitProcessGroupKwargs(backend=given.backend)]
)
assert dist.get_backend() == given.backend

model = tiny.network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = torch.utils.data.DataLoader(tiny.dataset(), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for _ in range(4):
    for inputs, targets in loader:
        with accelerator.accumulate(model):  # every second batch is averaged over the ranks
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
if accelerator.is_main_process:
    tiny.report(given, losses, accelerator.unwrap_model(model))
accelerator.end_training()
