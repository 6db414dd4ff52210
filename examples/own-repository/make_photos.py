"""Write random JPEG files, one folder per class, for `torchvision.datasets.ImageFolder`.

`python make_photos.py photos --count 400` writes 400 files of 256 x 256 pixels in 10 classes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--pixels", type=int, default=256)
    given = parser.parse_args()
    random = np.random.default_rng(0)
    for index in range(given.count):
        folder = given.folder / f"class-{index % given.classes}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((given.pixels, given.pixels)).save(
            folder / f"{index:05d}.jpg", quality=85
        )


if __name__ == "__main__":
    main()
