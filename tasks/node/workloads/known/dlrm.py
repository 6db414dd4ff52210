"""Build DLRM, a deep learning recommendation model (arXiv:1906.00091), on synthetic clicks.

The defaults are the authors' model for Criteo's Kaggle data, with 540 million parameters.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Inputs = tuple[Tensor, Tensor]
_NUMBERS, _WIDTH = 13, 16  # number of numeric features, and size of an embedding
# The number of distinct values of each categorical feature in the data.
_VALUES = (1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27,
           14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572)  # fmt: skip
_SAMPLES = 4096  # made once; batches are drawn from them
_SKEW = 4  # an exponent that makes small indices far more frequent, as in real data


class DLRM(nn.Module):
    """A click model: embeddings of all features, their pairwise dot products, and a network on top.

    `rows` has the number of rows of each embedding table.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__()
        self.bottom = _layers(_NUMBERS, 512, 256, 64, _WIDTH)
        self.tables = nn.ModuleList(nn.Embedding(count, _WIDTH) for count in rows)
        for count, weights in zip(rows, self.tables.parameters(), strict=True):
            nn.init.uniform_(weights, -(count**-0.5), count**-0.5)
        vectors = len(rows) + 1
        self.top = nn.Sequential(
            _layers(_WIDTH + vectors * (vectors - 1) // 2, 512, 256), nn.Linear(256, 1)
        )
        pairs = torch.tril_indices(vectors, vectors, offset=-1)
        self.pairs = nn.Buffer(pairs, persistent=False)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return logits of shape (batch,).

        `inputs` is a pair: numeric features of shape (batch, 13), and table indices of shape
        (batch, tables).
        """
        numbers, values = inputs
        dense = self.bottom(numbers)
        vectors = torch.stack(
            [dense, *(table(values[:, i]) for i, table in enumerate(self.tables))], dim=1
        )
        products = vectors @ vectors.transpose(1, 2)
        logits: Tensor = self.top(
            torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], dim=1)
        )
        return logits.squeeze(1)


def build(most_rows: int = max(_VALUES)) -> tuple[Any, ...]:
    """Return model, loss, batch function and optimizer of DLRM.

    Each embedding table has at most `most_rows` rows.
    """
    rows = [min(most_rows, values) for values in _VALUES]
    model = DLRM(rows)
    numbers, clicked = torch.rand(_SAMPLES, _NUMBERS), torch.rand(_SAMPLES).round()
    values = (torch.rand(_SAMPLES, len(rows)) ** _SKEW * torch.tensor(rows)).long()

    def make_batch(batch: int) -> tuple[Inputs, Tensor]:
        picked = torch.randint(_SAMPLES, (batch,))
        return (numbers[picked], values[picked]), clicked[picked]

    return model, nn.BCEWithLogitsLoss(), make_batch, torch.optim.SGD(model.parameters(), lr=0.1)


def _layers(*widths: int) -> nn.Sequential:
    """Return linear layers with a ReLU after each. Layer i maps widths[i] to widths[i + 1]."""
    return nn.Sequential(
        *(layer for ins, outs in pairwise(widths) for layer in (nn.Linear(ins, outs), nn.ReLU()))
    )
