"""Build a click predictor, whose embedding tables hold nearly all parameters."""

from typing import Any

import torch
from torch import Tensor, nn


class Recommender(nn.Module):
    """An embedding table per feature, pairwise dot products of the embeddings, and a small head."""

    def __init__(self, fields: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="mean") for _ in range(fields)
        )
        self.head = nn.Sequential(
            nn.Linear(fields * (fields + width), hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden // 4),
            nn.ReLU(),
            nn.Linear(hidden // 4, 1),
        )

    def forward(self, clicks: Tensor) -> Tensor:
        """Return logits of shape (batch,) for clicks of shape (batch, fields, recent items)."""
        fields = torch.stack([table(clicks[:, i]) for i, table in enumerate(self.tables)], dim=1)
        pairs = fields @ fields.transpose(1, 2)
        logits: Tensor = self.head(torch.cat([pairs.flatten(1), fields.flatten(1)], dim=1))
        return logits.squeeze(1)


def build(
    fields: int = 12, rows: int = 3000, width: int = 32, recent: int = 120, hidden: int = 512
) -> tuple[Any, ...]:
    """Return model, loss, batch function and optimizer."""
    model = Recommender(fields, rows, width, hidden)
    clicks, bought = torch.randint(rows, (2048, fields, recent)), torch.rand(2048).round()

    def make_batch(batch: int) -> tuple[Tensor, Tensor]:
        picked = torch.randint(len(clicks), (batch,))
        return clicks[picked], bought[picked]

    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    return model, nn.BCEWithLogitsLoss(), make_batch, optimizer
