"""Load photos from one folder per class. Photos are decoded and cropped on access."""

from __future__ import annotations

from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def loader(folder: str, *, pixels: int, workers: int) -> DataLoader:
    """Return a loader of (photos, class indices). Srift replaces the batch size."""
    prepare = transforms.Compose(
        [
            transforms.RandomResizedCrop(pixels),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    photos = datasets.ImageFolder(folder, transform=prepare)
    return DataLoader(photos, batch_size=32, shuffle=True, num_workers=workers, drop_last=True)
