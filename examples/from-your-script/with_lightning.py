"""Train a network on a table of random numbers with Lightning."""

import argparse

import lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 64


class Regression(lightning.LightningModule):
    """A multilayer perceptron, trained with AdamW on the mean squared error."""

    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            *(nn.Linear(FEATURES, width), nn.GELU()),
            *(nn.Linear(width, width), nn.GELU()),
            *(nn.Linear(width, width), nn.GELU()),
            nn.Linear(width, 1),
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        features, target = batch
        loss = functional.mse_loss(self.network(features).squeeze(1), target)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Table(lightning.LightningDataModule):
    """Rows of random numbers. The target of a row is the sine of the sum of its numbers."""

    def __init__(self, rows: int, batch_size: int) -> None:
        super().__init__()
        self.rows, self.batch_size = rows, batch_size

    def setup(self, stage: str) -> None:
        features = torch.randn(self.rows, FEATURES, generator=torch.Generator().manual_seed(0))
        self.train = TensorDataset(features, features.sum(dim=1).sin())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)


class Step(nn.Module):
    def __init__(self, module: Regression) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.module.training_step(batch, 0)


def build(width: int = 512, rows: int = 16384):
    module, table = Regression(width, lr=1e-3), Table(rows, batch_size=128)
    table.setup("fit")
    loader = table.train_dataloader()
    collate = loader.collate_fn
    loader.collate_fn = lambda samples: (collate(samples), samples)
    return Step(module), lambda loss, _: loss, loader, module.configure_optimizers()["optimizer"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=16384)
    args = parser.parse_args()

    trainer = lightning.Trainer(max_epochs=args.epochs, logger=False, enable_checkpointing=False)
    trainer.fit(Regression(width=512, lr=1e-3), Table(args.rows, batch_size=128))


if __name__ == "__main__":
    main()
