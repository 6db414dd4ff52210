"""A workload brought to life on one rank: its file loaded, its parts checked, one pass tried before anybody waits."""

from __future__ import annotations

import importlib.util
import re
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .device import to_device
from .loader import Loader
from .precision import Arithmetic, arithmetic
from .record import WorkloadFile

_CPU = torch.device("cpu")
_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')  # of a traceback that came as text from another process


@dataclass(slots=True)
class Waits:
    """Seconds that a rank has spent so far on waiting for its batches, or on making them."""

    seconds: float = 0.0


class WorkloadError(Exception):
    """The workload's file does not do what an entrypoint must; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorkload:
    """What an entrypoint returned. `loss(model(inputs), target)` is a mean over the batch of `make_batch(batch)`.

    All of it lies on `device`, batches too. `loader` is where they come from, if the entrypoint returned one.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    make_batch: Callable[[int], tuple[Any, Any]]
    optimizer: torch.optim.Optimizer
    device: torch.device = _CPU
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    loader: Loader | None = None
    waits: Waits = field(default_factory=Waits)

    def loss_of(self, module: nn.Module, batch: int) -> Tensor:
        """The loss of a new batch, by the model or what it is wrapped in; `waits` counts what the batch took."""
        started = time.perf_counter()
        inputs, target = self.make_batch(batch)
        self.waits.seconds += time.perf_counter() - started
        with self.arithmetic.forward():
            return self.loss(module(inputs), target)

    def close(self) -> None:
        """End what the loader has running."""
        if self.loader is not None:
            self.loader.close()

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        return sum(one.numel() for one in self.model.parameters() if one.requires_grad)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients of one step."""
        return sum(one.numel() * one.element_size() for one in self.model.parameters() if one.requires_grad)


def build(
    mailbox: Path, workload: WorkloadFile, *, seed: int, rank: int, device: torch.device, precision: str = "fp32"
) -> LoadedWorkload:
    """Load and call the entrypoint: equal weights on every rank, other data on each.

    On a GPU, that GPU is torch's default device while the entrypoint and its batch maker run, so that plain torch makes
    everything there; what they make elsewhere is moved. In place of a batch maker there may be a DataLoader
    (loader.py), whose processes `close` of what is returned ends.

    Raises WorkloadError where it does not fit the contract, LoaderError where its loader does not, NoSuchPrecision
    where the device does not compute so, and whatever the user's own code raises.
    """
    computing = arithmetic(precision, device)
    torch.manual_seed(seed)
    spec = importlib.util.spec_from_file_location(f"srift_workload_{workload.digest}", mailbox / workload.file)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{workload.file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, workload.function, None)
    if not callable(function):
        raise WorkloadError(f"no function {workload.function!r} in the file of workload {workload.name!r}")
    with _default(device):
        parts = function(**workload.arguments)
    if not isinstance(parts, tuple) or len(parts) != 4:
        raise WorkloadError(f"{workload.function} must return (model, loss, make_batch or a DataLoader, optimizer)")
    model, loss, batches, optimizer = parts
    loaded = isinstance(batches, DataLoader)
    if not isinstance(model, nn.Module) or not callable(loss) or not (loaded or callable(batches)):
        raise WorkloadError(
            f"{workload.function} must return a torch module, a loss, a batch maker or a DataLoader, and an optimizer"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(f"the fourth part that {workload.function} returns is no torch optimizer")
    for part in (model, loss):
        if isinstance(part, nn.Module):
            part.to(device)
    own_seed = seed + 1000 * (rank + 1)
    torch.manual_seed(own_seed)
    loader = Loader(batches, seed=own_seed, made_in=getattr(function, "__code__", None)) if loaded else None
    return LoadedWorkload(
        model=model,
        loss=loss,
        make_batch=_on_device(batches if loader is None else loader, device, made_there=loader is None),
        optimizer=optimizer,
        device=device,
        arithmetic=computing,
        loader=loader,
    )


def own_line(error: BaseException, workload: WorkloadFile) -> str:
    """Where in the workload's own file an error arose, `mine.py, line 14, in make_batch`; empty where elsewhere.

    In another process, by what that told; of an error that no line raised, where the function that it blames begins.
    """
    named, own = workload.source or workload.name, Path(workload.file).name
    frames = [(one.filename, one.lineno, one.name) for one in traceback.extract_tb(error.__traceback__)]
    codes: tuple[CodeType, ...] = getattr(error, "codes", ())
    told = [(file, int(line), name) for file, line, name in _FRAME.findall(str(error))]
    blamed = [(one.co_filename, one.co_firstlineno, one.co_name) for one in reversed(codes)]
    if isinstance(error, SyntaxError) and Path(error.filename or "").name == own:
        return f"{named}, line {error.lineno}"
    for places in (frames, told, blamed):
        at = [(line, name) for file, line, name in places if Path(file).name == own]
        if at:
            return f"{named}, line {at[-1][0]}, in {at[-1][1]}"
    return ""


def _default(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "cpu" else device


def _on_device(
    make_batch: Callable[[int], tuple[Any, Any]], device: torch.device, *, made_there: bool
) -> Callable[[int], tuple[Any, Any]]:
    """`make_batch` as it is on the CPU; else with its batches on `device`, which is torch's default if `made_there`."""
    if device.type == "cpu":
        return make_batch

    def made(batch: int) -> tuple[Any, Any]:
        with _default(device if made_there else _CPU):
            inputs, target = make_batch(batch)
        return to_device(inputs, device), to_device(target, device)

    return made


def try_once(built: LoadedWorkload, batch: int) -> None:
    """One forward and backward pass without any other rank, so that a mistake fails here and not in a collective.

    Raises WorkloadError where the loss is no scalar, and whatever the user's own code raises.
    """
    loss = built.loss_of(built.model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise WorkloadError("the loss must be one number, the mean over the batch")
    loss.backward()  # type: ignore[no-untyped-call]
    built.optimizer.zero_grad(set_to_none=True)
