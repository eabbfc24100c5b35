"""torch's distributed checkpoints (DCP) over this package: saved, loaded, and trained on.

Run with: torchrun --standalone --nproc-per-node 2 distributed_checkpoint.py
"""

import shutil
import tempfile

import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

given = tiny.arguments()
dist.init_process_group(given.backend)
data = tiny.dataset()
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)


def start():
    model = tiny.network()
    fully_shard(model)  # each rank holds half of every parameter, and saves its half
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model, optimizer):
    losses = []
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


model, optimizer = start()
losses = train(model, optimizer)
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
dcp.save(state, checkpoint_id=folder[0])
ahead = train(model, optimizer)

model, optimizer = start()
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
dcp.load(state, checkpoint_id=folder[0])
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
assert train(model, optimizer) == ahead  # as if nothing had happened in between

whole = torch.nn.ParameterDict({n.replace(".", "_"): p.full_tensor() for n, p in model.named_parameters()})
if dist.get_rank() == 0:
    tiny.report(given, losses + ahead, whole)
    shutil.rmtree(folder[0])
dist.destroy_process_group()
