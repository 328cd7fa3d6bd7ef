"""Lightning's Trainer, which starts its second rank itself and hands its optimizers closures; with validation."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, _):
        self.log("loss", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    loaders = [DataLoader(TensorDataset(torch.randn(rows, 256)), batch_size=50) for rows in (2000, 500)]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, enable_progress_bar=False, logger=False
    )
    trainer.fit(Model(), *loaders)
