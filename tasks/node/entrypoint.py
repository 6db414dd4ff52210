"""A workload brought to life on one rank: its file loaded, its parts checked, one pass tried before anybody waits."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .device import to_device
from .precision import Arithmetic, arithmetic
from .record import WorkloadFile

_CPU = torch.device("cpu")


class WorkloadError(Exception):
    """The workload's file does not do what an entrypoint must; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorkload:
    """What an entrypoint returned. `loss(model(inputs), target)` is a mean over the batch of `make_batch(batch)`.

    All of it lies on `device`, batches too.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    make_batch: Callable[[int], tuple[Any, Any]]
    optimizer: torch.optim.Optimizer
    device: torch.device = _CPU
    arithmetic: Arithmetic = field(default_factory=Arithmetic)

    def loss_of(self, module: nn.Module, batch: int) -> Tensor:
        """The loss of a new batch, by the model or what it is wrapped in."""
        inputs, target = self.make_batch(batch)
        with self.arithmetic.forward():
            return self.loss(module(inputs), target)

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
    everything there; what they make elsewhere is moved.

    Raises WorkloadError where it does not fit the contract, NoSuchPrecision where the device does not compute so, and
    whatever the user's own code raises.
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
        raise WorkloadError(f"{workload.function} must return (model, loss, make_batch, optimizer)")
    model, loss, make_batch, optimizer = parts
    if not isinstance(model, nn.Module) or not callable(loss) or not callable(make_batch):
        raise WorkloadError(f"{workload.function} must return a torch module, a loss, a batch maker and an optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(f"the fourth part that {workload.function} returns is no torch optimizer")
    if not any(one.requires_grad for one in model.parameters()):  # the other ranks would wait for its gradients
        raise WorkloadError("the model has no parameter to train")
    for part in (model, loss):
        if isinstance(part, nn.Module):
            part.to(device)
    torch.manual_seed(seed + 1000 * (rank + 1))
    return LoadedWorkload(
        model=model,
        loss=loss,
        make_batch=_on_device(make_batch, device),
        optimizer=optimizer,
        device=device,
        arithmetic=computing,
    )


def build_to_share(
    mailbox: Path, workload: WorkloadFile, *, seed: int, rank: int, device: torch.device, precision: str
) -> LoadedWorkload:
    """As `build`, but that the model lies in the host's memory: shares of it alone must fit on a device."""
    built = build(mailbox, workload, seed=seed, rank=rank, device=_CPU)
    computing = arithmetic(precision, device)  # it holds for the process
    if isinstance(built.loss, nn.Module):
        built.loss.to(device)
    batches = _on_device(built.make_batch, device)
    return replace(built, make_batch=batches, device=device, arithmetic=computing)


def own_line(error: BaseException, workload: WorkloadFile) -> str:
    """Where in the workload's own file an error arose, `mine.py, line 14, in make_batch`; empty where elsewhere."""
    named, own = workload.source or workload.name, Path(workload.file).name
    frames = [one for one in traceback.extract_tb(error.__traceback__) if Path(one.filename).name == own]
    if isinstance(error, SyntaxError) and Path(error.filename or "").name == own:
        return f"{named}, line {error.lineno}"
    return f"{named}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def _default(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "cpu" else device


def _on_device(make_batch: Callable[[int], tuple[Any, Any]], device: torch.device) -> Callable[[int], tuple[Any, Any]]:
    """`make_batch` as it is on the CPU; else with its batches on `device`."""
    if device.type == "cpu":
        return make_batch

    def made(batch: int) -> tuple[Any, Any]:
        with device:
            inputs, target = make_batch(batch)
        return to_device(inputs, device), to_device(target, device)

    return made


def try_once(built: LoadedWorkload, batch: int, *, shared: bool = False) -> None:
    """One forward and backward pass without any other rank, so that a mistake fails here and not in a collective.

    Of a model that is `shared` out a batch alone is made: all of it may fit on no device. Raises WorkloadError where
    the loss is no scalar, and whatever the user's own code raises.
    """
    if shared:
        built.make_batch(batch)
        return
    loss = built.loss_of(built.model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise WorkloadError("the loss must be one number, the mean over the batch")
    loss.backward()  # type: ignore[no-untyped-call]
    built.optimizer.zero_grad(set_to_none=True)
