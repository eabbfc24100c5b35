"""DeepSpeed's ZeRO over this package.

Run with: torchrun --standalone --nproc-per-node 2 deepspeed_zero.py
"""

import deepspeed
import tiny
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

parser = tiny.parser()
parser.add_argument("--stage", type=int, default=2, help="of ZeRO: 0 to 3")
given = parser.parse_args()
deepspeed.init_distributed(dist_backend=given.backend)
assert dist.get_backend() == given.backend

network = tiny.network()
engine, _, _, _ = deepspeed.initialize(
    model=network,
    optimizer=torch.optim.SGD(network.parameters(), lr=0.05),
    config={
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,  # else gradients are cut to a norm of 1
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": given.stage},
    },
)
data = tiny.dataset()
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
losses = []
for _ in range(4):
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
with deepspeed.zero.GatheredParameters(list(network.parameters())):
    if dist.get_rank() == 0:
        tiny.report(given, losses, network)
engine.destroy()
dist.destroy_process_group()
