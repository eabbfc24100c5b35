"""PyTorch Ignite over this package, with torch's wrapper or ours.

Run with: torchrun --standalone --nproc-per-node 2 ignite_idist.py
"""

import ignite.distributed as idist
import tiny
import torch
from ignite.engine import Engine, Events
from ignite.metrics import RunningAverage

import collectives.ddp
import collectives.integrations.ignite

given = tiny.arguments()
wrapper = torch.nn.parallel.DistributedDataParallel
if given.ddp == "collectives":
    wrapper = collectives.ddp.DistributedDataParallel
collectives.integrations.ignite.register(wrapper)  # Ignite knows the names nccl, gloo and mpi alone


def training(_):
    assert idist.backend() == given.backend
    model = idist.auto_model(tiny.network())
    assert isinstance(model, wrapper)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05))
    losses = []

    def step(_, batch):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine):
        losses.append(idist.all_reduce(engine.state.output) / idist.get_world_size())

    trainer.run(idist.auto_dataloader(tiny.dataset(), batch_size=16, shuffle=False), max_epochs=4)
    if idist.get_rank() == 0:
        tiny.report(given, losses, model.module)


with idist.Parallel(backend=given.backend) as parallel:
    parallel.run(training)
