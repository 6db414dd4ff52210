"""Build an autoencoder with wide layers, which has large gradients and needs little arithmetic."""

from typing import Any

import torch
from torch import Tensor, nn


def build(features: int = 512, width: int = 1280, frames: int = 6) -> tuple[Any, ...]:
    """Return model, loss, batch function and optimizer."""
    model = nn.Sequential(
        nn.Linear(features, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, features),
    )
    clips = torch.randn(512, frames, features)

    def make_batch(batch: int) -> tuple[Tensor, Tensor]:
        picked = clips[torch.randint(len(clips), (batch,))]
        return picked, picked

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, nn.MSELoss(), make_batch, optimizer
