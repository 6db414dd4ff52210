"""The arithmetic of a run: which products are made in which format, and gradients that would vanish in it scaled up.

fp32   everything in 32 bits; TF32, which torch has on for convolutions unless set otherwise, is off
tf32   products of 32-bit numbers on tensor cores that drop 13 bits of each factor (NVIDIA GPUs from Ampere on)
bf16   torch's autocast: products in bfloat16, weights, sums and gradients in 32 bits
fp16   autocast to float16, with the loss scaled so that small gradients stay above 0
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
SCALED = "fp16"
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AMPERE = (8, 0)  # compute capability
_CPU = torch.device("cpu")


class NoSuchPrecision(ValueError):
    """This device does not compute so; the message says what it has."""


@dataclass(slots=True)
class Arithmetic:
    """How one workload computes on one device; `scaler` where gradients are scaled, with the state of its scale."""

    precision: str = "fp32"
    device: torch.device = _CPU
    scaler: torch.amp.GradScaler | None = None

    def hold(self) -> None:
        """Set the format of this process's products of 32-bit numbers, whatever other code has set."""
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = self.precision == "tf32"

    def forward(self) -> AbstractContextManager[object]:
        """Around the forward pass and the loss."""
        dtype = _AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step; it is left out where scaled gradients were too large, and the scale is halved."""
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        self.scaler.update()

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, so that updates may be left out."""
        return self.scaler is not None

    @property
    def scale(self) -> float:
        """What the loss is multiplied by."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())


def arithmetic(precision: str, device: torch.device) -> Arithmetic:
    """That of `precision` on `device`, set for this process from now on: another is to be asked for anew.

    Raises NoSuchPrecision where the device lacks it: what is slower or coarser never takes its place unsaid.
    """
    if precision not in PRECISIONS:
        raise NoSuchPrecision(f"unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if precision == "tf32" and (capability is None or capability < _AMPERE):
        raise NoSuchPrecision(
            f"tf32 needs an NVIDIA GPU of Ampere or later; this is {_named(device)}: train in fp32"
        )
    if precision == "bf16" and capability is not None and capability < _AMPERE:
        raise NoSuchPrecision(
            f"bf16 needs a GPU of Ampere or later; this is {_named(device)}: train in fp16 or fp32"
        )
    scaler = torch.amp.GradScaler(device.type) if precision == SCALED else None
    computing = Arithmetic(precision, device, scaler)
    computing.hold()
    return computing


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a processor"
