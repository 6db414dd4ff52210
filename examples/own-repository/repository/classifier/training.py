"""Build the training that Srift measures: a ResNet-50 on a folder of photos."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import resnet50

from .photos import loader


def build(
    data: str, pixels: int = 224, workers: int = 2
) -> tuple[nn.Module, nn.Module, DataLoader, torch.optim.Optimizer]:
    """Return the model, the loss, the loader and the optimizer."""
    model = resnet50(num_classes=int(os.environ.get("PHOTO_CLASSES", "10")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return model, nn.CrossEntropyLoss(), loader(data, pixels=pixels, workers=workers), optimizer
