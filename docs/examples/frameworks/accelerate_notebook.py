"""Accelerate's notebook_launcher over this package: cells of a notebook, which is a script here.

Run with: python accelerate_notebook.py
"""

import socket

import accelerate
import tiny
import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs

import collectives.integrations.accelerate

given = tiny.arguments()
collectives.integrations.accelerate.register()


def training():  # runs in a process of its own for each rank, forked from the notebook's
    accelerator = accelerate.Accelerator(
        cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=given.backend)]
    )
    assert dist.get_backend() == given.backend
    model = tiny.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(tiny.dataset(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(4):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if accelerator.is_main_process:
        tiny.report(given, losses, accelerator.unwrap_model(model))
    accelerator.end_training()


with socket.socket() as free:  # a notebook takes the port that it is told, 29500 without
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
accelerate.notebook_launcher(training, num_processes=2, use_port=str(port))
