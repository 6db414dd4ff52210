"""Build a compute-bound residual network with small gradients, on small images."""

from typing import Any

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # not batch norm, which depends on the batch size per device
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map a tensor of shape (batch, channels, height, width) to a tensor of the same shape."""
        return torch.relu(images + self.body(images))


def build(width: int = 20, classes: int = 10) -> tuple[Any, ...]:
    """Return model, loss, batch function and optimizer."""
    stages: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), Residual(width)]
    for channels in (width, 2 * width):
        stages += [
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False),
            Residual(2 * channels),
        ]
    stages += [
        Residual(4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    ]
    model = nn.Sequential(*stages)
    images, labels = torch.randn(128, 3, 32, 32), torch.randint(classes, (128,))

    def make_batch(batch: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(images), (batch,))
        return images[rows], labels[rows]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, nn.CrossEntropyLoss(), make_batch, optimizer
