"""Build a click predictor, whose embedding tables hold nearly all parameters."""

from typing import Any

import torch
from torch import Tensor, nn

_FIELDS = 12  # number of features, each with an embedding table
_WIDTH, _HIDDEN = 32, 512  # sizes of an embedding, and of the head's first layer


class Recommender(nn.Module):
    """An embedding table per feature, pairwise dot products of the embeddings, and a small head."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, _WIDTH, mode="mean") for _ in range(_FIELDS)
        )
        self.head = nn.Sequential(
            nn.Linear(_FIELDS * (_FIELDS + _WIDTH), _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, 128),
            nn.ReLU(),
            nn.Linear(128, 1),
        )

    def forward(self, clicks: Tensor) -> Tensor:
        """Return logits of shape (batch,) for clicks of shape (batch, fields, recent items)."""
        fields = torch.stack([table(clicks[:, i]) for i, table in enumerate(self.tables)], dim=1)
        pairs = fields @ fields.transpose(1, 2)
        logits: Tensor = self.head(torch.cat([pairs.flatten(1), fields.flatten(1)], dim=1))
        return logits.squeeze(1)


def build(rows: int = 3000) -> tuple[Any, ...]:
    """Return model, loss, batch function and optimizer."""
    model = Recommender(rows)
    clicks, bought = torch.randint(rows, (2048, _FIELDS, 120)), torch.rand(2048).round()

    def make_batch(batch: int) -> tuple[Tensor, Tensor]:
        picked = torch.randint(len(clicks), (batch,))
        return clicks[picked], bought[picked]

    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    return model, nn.BCEWithLogitsLoss(), make_batch, optimizer
