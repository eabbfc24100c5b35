"""Ray Train over this package, with torch's wrapper or ours.

Run with: python ray_train.py
"""

import tempfile

import ray.train
import tiny
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model

import collectives.ddp


def training(config):
    given = config["given"]
    assert dist.get_backend() == given.backend
    network = tiny.network()
    if given.ddp == "collectives":
        model = collectives.ddp.DistributedDataParallel(network)
    else:
        model = prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = prepare_data_loader(torch.utils.data.DataLoader(tiny.dataset(), batch_size=8))
    losses = []
    for _ in range(4):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
    if ray.train.get_context().get_world_rank() == 0:
        tiny.report(given, losses, network)


if __name__ == "__main__":
    given = tiny.arguments()
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            training,
            train_loop_config={"given": given},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            torch_config=TorchConfig(backend=given.backend),
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        trainer.fit()
    ray.shutdown()
