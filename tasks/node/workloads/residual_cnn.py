"""Build a compute-bound residual network with small gradients, on small images."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_conv = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)


class Residual(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # not batch norm, which depends on the batch size per device
        self.body = nn.Sequential(
            _conv(channels, channels),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            _conv(channels, channels),
            nn.GroupNorm(4, channels),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map a tensor of shape (batch, channels, height, width) to a tensor of the same shape."""
        return torch.relu(images + self.body(images))


def build(width: int = 20) -> tuple[Any, ...]:
    """Return model, loss, batch function and optimizer."""
    model = nn.Sequential(
        _conv(3, width),
        Residual(width),
        _conv(width, 2 * width, stride=2),
        Residual(2 * width),
        _conv(2 * width, 4 * width, stride=2),
        Residual(4 * width),
        Residual(4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )
    images, labels = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))

    def make_batch(batch: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(images), (batch,))
        return images[rows], labels[rows]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, nn.CrossEntropyLoss(), make_batch, optimizer
