"""Lightning's DDP over this package, with torch's wrapper or ours, in automatic or manual optimization.

Run with: python lightning_ddp.py
"""

import lightning.pytorch as pl
import tiny
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from collectives.integrations.lightning import CollectivesStrategy


class Regression(pl.LightningModule):
    def __init__(self, given):
        super().__init__()
        self.given = given
        self.network = tiny.network()
        self.losses = []
        self.automatic_optimization = not given.manual

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.network(inputs), targets)
        self.losses.append(self.trainer.strategy.reduce(loss.detach().clone()).item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)  # averages the gradients
            optimizer.step()
        return loss

    def on_train_end(self):
        assert dist.get_backend() == self.given.backend
        if self.trainer.is_global_zero:
            tiny.report(self.given, self.losses, self.network)


if __name__ == "__main__":
    parser = tiny.parser()
    parser.add_argument("--manual", action="store_true", help="manual optimization")
    parser.add_argument("--start", default="popen", help="how ranks start: popen, spawn or fork")
    given = parser.parse_args()
    strategy = CollectivesStrategy if given.ddp == "collectives" else DDPStrategy
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy(process_group_backend=given.backend, start_method=given.start),
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(tiny.dataset(), batch_size=8)
    trainer.fit(Regression(given), loader)
