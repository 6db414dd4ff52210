"""Build a decoder-only language model and batches of synthetic text."""

from typing import Any

import torch
from torch import Tensor, nn


class LanguageModel(nn.Module):
    """Token and position embeddings, causal transformer layers, and a head over the vocabulary."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.mask = nn.Buffer(mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits (batch, vocabulary, length) for tokens of shape (batch, length)."""
        hidden = self.layers(self.tokens(text) + self.positions, mask=self.mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits.transpose(1, 2)


def build(
    vocabulary: int = 512, length: int = 64, width: int = 128, layers: int = 4
) -> tuple[Any, ...]:
    """Return model, loss, batch function and optimizer."""
    model = LanguageModel(vocabulary, length, width, layers)
    text = torch.randint(vocabulary, (256, length + 1))

    def make_batch(batch: int) -> tuple[Tensor, Tensor]:
        rows = text[torch.randint(len(text), (batch,))]
        return rows[:, :-1], rows[:, 1:]

    return model, nn.CrossEntropyLoss(), make_batch, torch.optim.AdamW(model.parameters(), lr=3e-4)
