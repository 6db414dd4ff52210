"""Call a workload's entrypoint on one rank, check its result, and try one training pass."""

import importlib
import importlib.util
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .data_paths import S3, DataMissing
from .device import to_device
from .loader import Loader
from .precision import Arithmetic
from .record import WorkloadFile
from .torchvision_operators import declare_what_did_not_load

BatchMaker = Callable[[int], tuple[Any, Any]]

_FRAME = re.compile(r'File "(.+)", line (\d+)(, in \S+)?')  # a frame of a printed traceback


class WorkloadError(Exception):
    """The entrypoint is missing or returns wrong objects, or a parameter gets no gradient."""


@dataclass(kw_only=True)
class LoadedWorkload:
    """The model, loss, batch function and optimizer that an entrypoint returned.

    Loss and batches are on `device`. The model is on `device` if `shared` is False.

    make_batch: a function; `make_batch(batch)` returns (inputs, target) with `batch` samples.
    loss: a function; `loss(model(inputs), target)` is the mean loss of the samples.
    loader: the source of batches if the entrypoint returned a DataLoader, else None.
    shared: True if the model stays in host memory until a strategy, such as FSDP, shards it.
    waited_s: total seconds in which this rank made batches, or waited for the loader's batches.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    make_batch: BatchMaker
    optimizer: torch.optim.Optimizer
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    loader: Loader | None = None
    shared: bool = False
    waited_s: float = 0.0

    @property
    def device(self) -> torch.device:
        return self.arithmetic.device

    def loss_of(self, module: nn.Module, batch: int) -> Tensor:
        """Make a batch of `batch` samples, and return its mean loss.

        module: the model, or the module into which a strategy such as DDP wrapped the model.
        """
        started = time.perf_counter()
        inputs, target = self.make_batch(batch)
        self.waited_s += time.perf_counter() - started
        with self.arithmetic.forward():
            return self.loss(module(inputs), target)

    def close(self) -> None:
        """End the loader's worker processes, if there is a loader."""
        if self.loader is not None:
            self.loader.close()

    @property
    def stateful(self) -> dict[str, Any]:
        """Return {name: object} for the objects whose `state_dict` a checkpoint saves."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.arithmetic.scaler,
        }

    def state(self) -> dict[str, Any]:
        return {name: component.state_dict() for name, component in self.stateful.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the trained parameters.

        parameters: the number of elements.
        gradient_bytes: the size of the gradients in bytes.
        """
        trained = [weights for weights in self.model.parameters() if weights.requires_grad]
        return {
            "parameters": sum(weights.numel() for weights in trained),
            "gradient_bytes": sum(weights.nbytes for weights in trained),
        }


def build(
    folder: Path,
    workload: WorkloadFile,
    *,
    seed: int,
    rank: int,
    computing: Arithmetic,
    shared: bool = False,
) -> LoadedWorkload:
    """Call the workload's entrypoint, and return the model, loss, batch function and optimizer.

    folder: the folder with the workload's Python file or unpacked archive.
    workload: the workload. Its `data` must be a folder on this machine (see data.data_path).
    seed: the random seed. All ranks get the same initial weights, but draw different data.
    computing: the precision, and the device on which the workload computes.
    shared: True to leave the model in host memory until a strategy, such as FSDP, shards it.

    If the entrypoint returns a DataLoader, the caller must call `close()` on the result to end the
    loader's worker processes.

    Raises:
        WorkloadError: if there is no entrypoint, or the entrypoint returns wrong objects.
        LoaderError: if the returned DataLoader cannot be rebuilt.
        DataMissing: if `workload.data` is an S3 address.
        Exception: any error of the user's code.
    """
    device = computing.device
    torch.manual_seed(seed)
    declare_what_did_not_load()
    module = _module(folder, workload)
    torch.manual_seed(seed)  # the module's code, which runs once, may draw random numbers
    function = getattr(module, workload.function, None)
    if not callable(function):
        raise WorkloadError(
            f"no function {workload.function!r} in the file of workload {workload.name!r}"
        )
    if workload.data.startswith(S3):
        raise DataMissing(f"the workload's data {workload.data} are not on this machine")
    data = {"data": workload.data} if workload.data else {}
    with torch.device("cpu") if shared else device:
        parts = function(**workload.arguments, **data)
    match parts:
        case (
            nn.Module() as model,
            Callable() as loss,
            DataLoader() | Callable() as batches,
            torch.optim.Optimizer() as optimizer,
        ):
            pass
        case _:
            raise WorkloadError(
                f"{workload.function} must return (model, loss, make_batch or a DataLoader,"
                " optimizer)"
            )
    averaged = set(model.parameters())
    trained = [weights for held in optimizer.param_groups for weights in held["params"]]
    if any(weights.requires_grad and weights not in averaged for weights in trained):
        raise WorkloadError(
            "the optimizer trains a parameter outside the model, so the parameter's gradient would"
            " not be averaged over devices. Add the parameter to the model, or create the optimizer"
            " after the model"
        )
    computing.hold()  # user code may have changed torch's float32 precision
    for component in (loss,) if shared else (model, loss):
        if isinstance(component, nn.Module):
            component.to(device)
    rank_seed = seed + 1000 * (rank + 1)
    torch.manual_seed(rank_seed)
    loader = Loader(batches, seed=rank_seed) if isinstance(batches, DataLoader) else None
    return LoadedWorkload(
        model=model,
        loss=loss,
        make_batch=_on_device(loader or batches, device),  # type: ignore[arg-type]
        optimizer=optimizer,
        arithmetic=computing,
        loader=loader,
        shared=shared,
    )


def _module(folder: Path, workload: WorkloadFile) -> ModuleType:
    """Import the workload's Python module, and return it.

    Raises WorkloadError if the code file is not a Python file. Also raises the errors of the user's
    code.
    """
    if workload.module:
        root = str(folder / workload.folder)
        if sys.path[0] != root:
            # Python does the same for a script in this folder. Loader workers inherit the path.
            sys.path.insert(0, root)
        return importlib.import_module(workload.module)
    file = folder / workload.folder / workload.source if workload.folder else folder / workload.file
    spec = importlib.util.spec_from_file_location(f"srift_workload_{workload.digest}", file)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{workload.file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # torch.compile and pickle look up the module in sys.modules
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def user_line(error: BaseException, workload: WorkloadFile) -> str:
    """Return where the workload's code raised `error`, such as "mine.py, line 14, in make_batch".

    If the traceback has several frames of the workload's code, the innermost frame is returned. If
    it has none, the result is "".
    """
    # the message of a DataLoader worker's error contains the worker's traceback
    frames = _FRAME.findall("".join(traceback.format_exception(error)))
    ending = f"/{workload.folder}/" if workload.folder else f"/{workload.file}"
    for file, line, function in reversed(frames):
        _, found, inside = file.partition(ending)
        if found:
            return f"{inside or workload.source or workload.name}, line {line}{function}"
    return ""


def _on_device(make_batch: BatchMaker, device: torch.device) -> BatchMaker:
    """Return a batch function that moves the batches of `make_batch` to `device`.

    While `make_batch` runs, `device` is torch's default device. If `make_batch` is a Loader, the
    default device is not changed, because a Loader makes batches in host memory.
    """
    if device.type == "cpu":
        return make_batch

    def made(batch: int) -> Any:
        with nullcontext() if isinstance(make_batch, Loader) else device:
            inputs_and_target = make_batch(batch)
        return to_device(inputs_and_target, device)

    return made


def try_once(built: LoadedWorkload, batch: int) -> None:
    """Run one forward and backward pass on this rank alone, to find errors before any collective.

    For a model that a strategy will shard, this function only makes a batch, because the whole
    model may not fit on a device. Raises the errors of torch and of the user's code.
    """
    if built.shared:
        built.make_batch(batch)
        return
    loss = built.loss_of(built.model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    built.optimizer.zero_grad(set_to_none=True)
