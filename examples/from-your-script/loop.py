"""Train a small convolutional network to tell squares from discs, in a plain PyTorch loop."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """A dataset of noisy pictures. Each shows a square (label 0) or a disc (label 1)."""

    def __init__(self, count: int, pixels: int) -> None:
        self.count, self.pixels = count, pixels

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 2
        across, down = torch.meshgrid(*[torch.linspace(-1, 1, self.pixels)] * 2, indexing="xy")
        distance = across.hypot(down) if label else torch.maximum(across.abs(), down.abs())
        shape = (distance < 0.3 + 0.5 * torch.rand(())).float()
        return (shape + 0.3 * torch.randn_like(shape))[None], label


class Network(nn.Module):
    """Three convolutions and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1), nn.ReLU()),
        )
        self.head = nn.Linear(4 * width, 2)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(pictures).mean(dim=(2, 3)))


def build(samples: int = 4096, width: int = 64, lr: float = 0.05):
    model = Network(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loader = DataLoader(Shapes(samples, pixels=32), batch_size=64, shuffle=True)
    return model, nn.CrossEntropyLoss(), loader, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4096)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = Network(width=64).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Shapes(args.samples, pixels=32), batch_size=64, shuffle=True)

    for epoch in range(args.epochs):
        for pictures, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(pictures.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
