"""Build torchvision's image classifiers, untrained, on synthetic images.

The defaults are ResNet-50 and ViT-B/16 for 224 x 224 pixels and 1,000 classes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer
from torchvision.models.resnet import Bottleneck, ResNet

_BLOCKS = (3, 4, 6, 3)  # in the four stages of a ResNet-50
_IMAGES = 64  # made once, because making new images for each batch takes longer than a step


def resnet50(
    pixels: int = 224,
    classes: int = 1000,
    width_per_group: int = 64,
    most_blocks: int = max(_BLOCKS),
) -> tuple[Any, ...]:
    """Return model, loss, batch function and optimizer.

    Each stage of the network has at most `most_blocks` blocks.
    """
    blocks = [min(most_blocks, blocks) for blocks in _BLOCKS]
    model = ResNet(Bottleneck, blocks, num_classes=classes, width_per_group=width_per_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    return model, nn.CrossEntropyLoss(), _batch_maker(pixels, classes), optimizer


def vit_b_16(
    pixels: int = 224, classes: int = 1000, width: int = 768, layers: int = 12, heads: int = 12
) -> tuple[Any, ...]:
    """Return model, loss, batch function and optimizer. `pixels` must be a multiple of 16."""
    model = VisionTransformer(
        image_size=pixels,
        patch_size=16,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=width,
        mlp_dim=4 * width,
        num_classes=classes,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.3)
    loss = nn.CrossEntropyLoss(label_smoothing=0.11)
    return model, loss, _batch_maker(pixels, classes), optimizer


def _batch_maker(pixels: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    images, labels = torch.randn(_IMAGES, 3, pixels, pixels), torch.randint(classes, (_IMAGES,))

    def make_batch(batch: int) -> tuple[Tensor, Tensor]:
        picked = torch.randint(_IMAGES, (batch,))
        return images[picked], labels[picked]

    return make_batch
