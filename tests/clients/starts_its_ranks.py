"""A script in which Lightning starts rank 1 itself; prints the class of the wrapper and the trained parameters."""

import sys
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.clients import import_torchvision

import_torchvision()
import lightning  # noqa: E402 - it imports torchvision


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 4)

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        wrapper = type(self.trainer.strategy.model)
        line = f"rank {self.global_rank} {wrapper.__module__} {self.net.weight.sum().item():.9g}\n"
        sys.stdout.write(line)  # in one piece, beside the other rank


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(), DataLoader(TensorDataset(data), batch_size=4))
