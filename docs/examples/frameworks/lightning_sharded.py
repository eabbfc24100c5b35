"""Lightning's ModelParallelStrategy over this package: torch's fully_shard, on CPUs, too.

Run with: python lightning_sharded.py
"""

import lightning.pytorch as pl
import tiny
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Regression(pl.LightningModule):
    def __init__(self, given):
        super().__init__()
        self.given = given
        self.network = tiny.network()
        self.losses = []

    def configure_model(self):
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.network(inputs), targets)
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone()).item())
        return loss

    def on_train_end(self):
        assert dist.get_backend() == self.given.backend
        parameters = self.network.named_parameters()
        whole = torch.nn.ParameterDict({n.replace(".", "_"): p.full_tensor() for n, p in parameters})
        if self.trainer.is_global_zero:
            tiny.report(self.given, self.losses, whole)


if __name__ == "__main__":
    given = tiny.arguments()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend=given.backend
        ),
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(tiny.dataset(), batch_size=8)
    trainer.fit(Regression(given), loader)
