"""Seconds of the first and of later epochs with and without a cache of decoded samples, and what Srift says of them.

`python -m tests.benchmarks.data_cache` trains a small network on JPEG files of 256 x 256 pixels (those that
examples/own-repository makes), cropped at random to 64 x 64. There is no remote storage: each read of a file waits for
`--remote-ms` milliseconds, asleep, as a read from another machine would, and then decodes. Epochs are trained

    none           as they are
    memory         with all decoded photos in memory
    disk           with all of them in a file in the folder for temporary files
    half + disk    with memory for half of them, and the file
    left           with a file that another process filled before

in turns, several times over. An epoch's seconds and those in which it waits for batches are medians over the rounds,
with the smallest and the largest beside. `srift_wait_s` is the wait that a run of Srift's measures (`input_s`), for as
many steps as an epoch has. It is compared with `steady_wait_s`, of as many steps of later epochs but the first of
each, for which workers begin with nothing, cache or not. `none` is measured twice a round, as noise.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flows.cli import explained
from tasks.node.data_cache import Cached
from tasks.node.entrypoint import LoadedWorkload
from tasks.node.loader import Loader
from tasks.node.measuring import Patience
from tasks.node.record import Item
from tasks.node.steps import train
from tasks.node.torchvision_operators import declare_what_did_not_load
from tasks.reporting.tables import print_frame
from tests.benchmarks.commands import ROOT

PHOTOS, BATCH, PIXELS = 192, 16, 64
EPOCHS = 3
NONE, AGAIN = "none", "none, again"
_STEPS = PHOTOS // BATCH
_DECODED_BYTES = 3 * 256 * 256  # of a photo


class Photos(Dataset[tuple[Image.Image, int]]):
    """Those of a folder, each read after a while and decoded, and the number of its class."""

    def __init__(self, folder: str, wait_s: float) -> None:
        self.paths, self.wait_s = [str(one) for one in sorted(Path(folder).glob("*/*.jpg"))], wait_s

    def __len__(self) -> int:
        """Photos."""
        return len(self.paths)

    def __getitem__(self, place: int) -> tuple[Image.Image, int]:
        """One, and its class."""
        path = Path(self.paths[place])
        time.sleep(self.wait_s)
        with Image.open(path) as photo:
            return photo.convert("RGB"), int(path.parent.name.rpartition("-")[2])


class Augmented(Dataset[tuple[Tensor, int]]):
    """Photos as the example has them: cropped and flipped at random, outside of any cache."""

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
        """Photos."""
        return len(self.photos)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        """One, and its class."""
        photo, label = self.photos[place]
        return self.prepare(photo), label


@contextmanager
def no_cache(photos: Photos) -> Iterator[Dataset[Any]]:
    """As they are."""
    yield photos


def fill(photos: Photos, options: dict[str, Any]) -> None:
    """Read all of them through a cache."""
    kept = Cached(photos, **options)
    for place in range(len(kept)):
        kept[place]


def with_cache(memory: float, disk: bool, filled: bool = False) -> Callable[[Photos], Any]:
    """A cache with memory for a part of the photos, of a folder of its own."""

    @contextmanager
    def made(photos: Photos) -> Iterator[Dataset[Any]]:
        with tempfile.TemporaryDirectory() as folder:
            memory_gib = memory * PHOTOS * _DECODED_BYTES / 2**30
            options: dict[str, Any] = {"memory_gib": memory_gib, "folder": folder if disk else None}
            if filled:
                other = multiprocessing.get_context("spawn").Process(
                    target=fill, args=(photos, options)
                )
                other.start()
                other.join()
                if other.exitcode:
                    raise RuntimeError(
                        f"the process that fills the file ended with {other.exitcode}"
                    )
            yield Cached(photos, **options)

    return made


VARIANTS: dict[str, Callable[[Photos], Any]] = {
    NONE: no_cache,
    "memory": with_cache(1.1, disk=False),
    "disk": with_cache(0.0, disk=True),
    "half + disk": with_cache(0.5, disk=True),
    "left": with_cache(0.0, disk=True, filled=True),
    AGAIN: no_cache,
}


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small one: what is measured is the loader."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
        ),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def trained(dataset: Dataset[Any], workers: int) -> tuple[list[float], list[list[float]], float]:
    """Seconds of each epoch, and of waiting for each batch; and a sum over weights that tells what was trained on."""
    model, optimizer = network()
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator().manual_seed(1),
    )
    seconds: list[float] = []
    waits: list[list[float]] = []
    for _ in range(EPOCHS):
        began = before = time.perf_counter()
        waited = []
        for inputs, target in loader:
            waited.append(time.perf_counter() - before)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            before = time.perf_counter()
        seconds.append(time.perf_counter() - began)
        waits.append(waited)
    return (
        seconds,
        waits,
        float(sum(one.detach().double().abs().sum() for one in model.parameters())),
    )


def measured_wait(dataset: Dataset[Any], workers: int) -> float:
    """Seconds of waiting in as many steps as an epoch has, by a run of Srift's."""
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
        values, problem = train(item, built, None, Patience(), place=0)
    finally:
        built.close()
    if problem:
        raise RuntimeError(problem)
    return float(values["input_s"]) * _STEPS


def epochs(remote_ms: float, workers: list[int], rounds: int) -> pd.DataFrame:
    """A row a variant, number of workers, round and epoch, and `first` and `later` medians beside."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        maker = ROOT / "examples" / "own-repository" / "make_photos.py"
        subprocess.run([sys.executable, maker, folder, "--count", str(PHOTOS)], check=True)
        photos = Photos(folder, remote_ms / 1000)
        for number, turn in ((one, turn) for one in workers for turn in range(rounds)):
            for name, made in VARIANTS.items():
                with ExitStack() as stack:
                    dataset = Augmented(stack.enter_context(made(photos)))
                    seconds, waits, told = trained(dataset, number)
                    rows.append(
                        {
                            "variant": name,
                            "workers": number,
                            "round": turn,
                            "first_s": seconds[0],
                            "later_s": median(seconds[1:]),
                            "first_wait_s": sum(waits[0]),
                            "later_wait_s": median(sum(one) for one in waits[1:]),
                            "steady_wait_s": median(fmean(one[1:]) for one in waits[1:]) * _STEPS,
                            "srift_wait_s": measured_wait(dataset, number),
                            "weights": told,
                        }
                    )
    return pd.DataFrame(rows)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a variant and number of workers: medians over the rounds, from the smallest to the largest."""
    columns = [
        "first_s",
        "later_s",
        "first_wait_s",
        "later_wait_s",
        "steady_wait_s",
        "srift_wait_s",
    ]
    grouped = rows.groupby(["workers", "variant"], sort=False)
    texts = {
        name: grouped[name].median().map("{:.2f}".format)
        + grouped[name].min().map(" ({:.2f}-".format)
        + grouped[name].max().map("{:.2f})".format)
        for name in columns
    }
    alike = rows.groupby("workers")["weights"].transform("first") == rows["weights"]
    return pd.DataFrame(
        texts | {"as without": alike.groupby([rows["workers"], rows["variant"]]).all()}
    ).reset_index()


def ratios(
    rows: pd.DataFrame, name: str, variant: str, against: str = NONE
) -> dict[int, list[float]]:
    """By the number of workers, of each round: a variant's seconds as parts of another's."""
    table = rows.pivot_table(index=["workers", "round"], columns="variant", values=name)
    each = table[variant] / table[against]
    return {int(str(number)): own.tolist() for number, own in each.groupby(level="workers")}


def spread(values: dict[int, list[float]]) -> str:
    """The smallest and the largest of them."""
    every = list(chain.from_iterable(values.values()))
    return f"{min(every):.2f} to {max(every):.2f}"


def main(
    remote_ms: Annotated[
        float, typer.Option(min=0, help="that each read of a file waits, asleep")
    ] = 10.0,
    workers: Annotated[list[int], typer.Option(help="of the loader, several times")] = [0, 2],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = epochs(remote_ms, workers, rounds)
    title = f"{EPOCHS} epochs of {PHOTOS} photos, each read after {remote_ms:g} ms asleep; {rounds} rounds"
    print_frame(summary(rows), title)
    print(
        f"noise: later epochs of {AGAIN!r} against {NONE!r}: {spread(ratios(rows, 'later_s', AGAIN))}"
    )
    if not rows.groupby("workers")["weights"].nunique().eq(1).all():
        print("a cache changed what was trained on")
        raise typer.Exit(1)


if __name__ == "__main__":
    from tests.benchmarks import (
        data_cache,
    )  # whose classes have one name here and in the process that fills a file

    with explained():
        typer.run(data_cache.main)
