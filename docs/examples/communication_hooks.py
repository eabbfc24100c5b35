"""Communication hooks: what goes over the wire instead of the float32 buckets.

Run with: torchrun --standalone --nproc-per-node 2 communication_hooks.py
"""

import torch

import collectives as dist
from collectives.ddp import DistributedDataParallel, GradBucket
from collectives.ddp.hooks.default_hooks import fp16_compress_hook
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


def clipping_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of your own: clips the bucket, then averages it."""
    clipped = bucket.buffer().clamp_(-1, 1).div_(group.size())
    work = dist.all_reduce(clipped, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


dist.init_process_group("host")
world = dist.group.WORLD
hooks = {
    "fp16": (world, fp16_compress_hook),
    "PowerSGD": (PowerSGDState(world, start_powerSGD_iter=2), powerSGD_hook),
    "own": (world, clipping_hook),
}
for name, (state, hook) in hooks.items():
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64), process_group=world)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(40):
        inputs = torch.randn(32, 64)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], f"{name}: {losses[0]} to {losses[-1]}"
if dist.get_rank() == 0:
    print(f"worked: trained with {', '.join(hooks)}")
dist.destroy_process_group()
