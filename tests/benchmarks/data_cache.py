"""Seconds of the first and of later epochs with and without a cache of decoded samples.

A small network trains on the JPEG files of examples/own-repository; each read sleeps as long as a
read from another machine takes. Photos are cached in memory, on disk, half in memory, and on
disk by an earlier process. The wait measured by a Srift run is compared with theirs.
"""

import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pandas as pd
import torch
import typer
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tasks.node.data_cache import Cached
from tasks.node.entrypoint import LoadedWorkload
from tasks.node.loader import Loader
from tasks.node.record import Item
from tasks.node.repetition import Patience
from tasks.node.steps import train
from tasks.node.torchvision_operators import declare_what_did_not_load
from tests.benchmarks.claims import ROOT, Claim, Write, report, show

PHOTOS, BATCH, PIXELS, EPOCHS = 192, 16, 64, 3
WORKERS, REMOTE_MS = (0, 2), 10.0
_STEPS = PHOTOS // BATCH
_DECODED_GIB = PHOTOS * 3 * 256 * 256 / 2**30
NONE = "none"
# Memory for a part of the photos, whether on disk too, whether an earlier process filled the disk.
CACHES: dict[str, tuple[float, bool, bool]] = {
    "memory": (1.1, False, False),
    "disk": (0.0, True, False),
    "half + disk": (0.5, True, False),
    "left": (0.0, True, True),
}


class Photos(Dataset[tuple[Image.Image, int]]):
    """Decoded photos of a folder, and their classes."""

    def __init__(self, folder: str) -> None:
        self.paths = [str(path) for path in sorted(Path(folder).glob("*/*.jpg"))]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> tuple[Image.Image, int]:
        path = Path(self.paths[place])
        time.sleep(REMOTE_MS / 1000)
        with Image.open(path) as photo:
            return photo.convert("RGB"), int(path.parent.name.rpartition("-")[2])


class Augmented(Dataset[tuple[Tensor, int]]):
    """Photos cropped and flipped at random, outside of any cache."""

    def __init__(self, photos: Any) -> None:
        declare_what_did_not_load()
        from torchvision import transforms

        self.photos = photos
        self.prepare = transforms.Compose(
            [
                transforms.RandomResizedCrop(PIXELS),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        photo, label = self.photos[place]
        return self.prepare(photo), label


def fill(photos: Photos, options: dict[str, Any]) -> None:
    """Read all photos through a cache."""
    kept = Cached(photos, **options)
    for place in range(len(kept)):
        kept[place]


def cached(photos: Photos, name: str, folder: str) -> Any:
    """The photos behind the cache of this name."""
    if name not in CACHES:
        return photos
    share, disk, filled = CACHES[name]
    options: dict[str, Any] = {
        "memory_gib": share * _DECODED_GIB,
        "folder": folder if disk else None,
        "key": "photos",
    }
    if filled:
        process = multiprocessing.get_context("spawn").Process(target=fill, args=(photos, options))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"filling the cache failed with {process.exitcode}")
    return Cached(photos, **options)


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small network: the loader is measured."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def trained(dataset: Dataset[Any], workers: int) -> dict[str, float]:
    """Seconds of the first and of later epochs, wait_s of a later one, and a sum of weights."""
    model, optimizer = network()
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator().manual_seed(1),
    )
    seconds, waits = [], []
    for _ in range(EPOCHS):
        began = before = time.perf_counter()
        waited = []
        for inputs, target in loader:
            waited.append(time.perf_counter() - before)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            before = time.perf_counter()
        seconds.append(time.perf_counter() - began)
        waits.append(fmean(waited[1:]) * _STEPS)  # workers begin an epoch with nothing
    weights = sum(float(weight.detach().double().abs().sum()) for weight in model.parameters())
    later = {"later_s": median(seconds[1:]), "wait_s": median(waits[1:])}
    return {"first_s": seconds[0], "weights": weights} | later


def measured_wait(dataset: Dataset[Any], workers: int) -> float:
    """Seconds of waiting in an epoch's steps, as a Srift run measures them."""
    model, optimizer = network()
    loader = Loader(DataLoader(dataset, batch_size=BATCH, num_workers=workers), seed=1)
    built = LoadedWorkload(
        model=model,
        loss=nn.CrossEntropyLoss(),
        make_batch=loader,
        optimizer=optimizer,
        loader=loader,
    )
    item = Item(
        run_id="r", kind="train", nodes=[0], batches=[BATCH], least_steps=_STEPS, most_steps=_STEPS
    )
    try:
        values = train(item, built, None, Patience())
    finally:
        built.close()
    return float(values["input_s"]) * _STEPS


def epochs(rounds: int) -> pd.DataFrame:
    """A row a cache, number of workers and round."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        maker = ROOT / "examples" / "own-repository" / "make_photos.py"
        subprocess.run([sys.executable, maker, folder, "--count", str(PHOTOS)], check=True)
        photos = Photos(folder)
        for workers in WORKERS:
            for turn in range(rounds):
                for name in (NONE, *CACHES):
                    with tempfile.TemporaryDirectory() as cache:
                        dataset = Augmented(cached(photos, name, cache))
                        row = {"cache": name, "workers": workers, "round": turn}
                        row |= trained(dataset, workers)
                        rows.append(row | {"srift_s": measured_wait(dataset, workers)})
    return pd.DataFrame(rows)


def main(rounds: int = 3, write: Write = False) -> None:
    """Print seconds by cache and workers, over epochs without a cache."""
    torch.set_num_threads(1)
    rows = epochs(rounds)
    middle = rows.groupby(["workers", "cache"]).median().drop(columns="round")
    show(f"medians of {rounds} rounds, {PHOTOS} photos", middle.reset_index())
    over = middle.div(middle.query("cache == @NONE").droplevel("cache"), level="workers")
    alike = bool(rows.groupby("workers")["weights"].nunique().eq(1).all())
    claims = [Claim("a cache trains to the same bits", "all", f"{len(rows)} trainings", alike)]
    for name in CACHES:
        cache_rows = over.query("cache == @name")
        later = ", ".join(f"{seconds:.2f}" for seconds in cache_rows["later_s"])
        first = float(cache_rows["first_s"].max())
        met = first <= 1.1 and bool((cache_rows["later_s"] < 1).all())
        result = f"{first:.2f}; later {later}"
        claims.append(Claim(f"first epoch, cache {name}", "1.1; later below 1", result, met))
    off = ((rows["srift_s"] - rows["wait_s"]) / rows["later_s"]).abs()
    worst = float(off.groupby([rows["workers"], rows["cache"]]).median().max())
    claim = Claim("the measured wait, of an epoch", "10 % off", f"{worst:.1%}", worst <= 0.1)
    report("data_cache", [*claims, claim], write=write)


if __name__ == "__main__":
    # classes need one module name here and in the process that fills a file
    from tests.benchmarks import data_cache

    typer.run(data_cache.main)
