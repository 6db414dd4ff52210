"""Set the numeric precision of a run.

fp32   float32; TF32 is off, although torch enables TF32 for convolutions by default
tf32   float32, but tensor cores compute products in TF32, which drops 13 bits of each factor; needs
       an NVIDIA GPU of the Ampere generation or newer
bf16   autocast to bfloat16; weights and their gradients stay in float32
fp16   autocast to float16; the loss is scaled so that small gradients do not become 0
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
SCALED = "fp16"
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AMPERE = (8, 0)  # compute capability
_CPU = torch.device("cpu")


class NoSuchPrecision(ValueError):
    """The precision is unknown, or the device does not support it."""


@dataclass
class Arithmetic:
    """The precision in which a workload computes on a device, enabled for this process.

    `scaler` scales the loss in fp16, and does nothing in other precisions. The constructor raises
    NoSuchPrecision if the precision is unknown or the device does not support it.
    """

    precision: str = "fp32"
    device: torch.device = _CPU
    scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self) -> None:
        named, is_gpu = self.precision, self.device.type == "cuda"
        if named not in PRECISIONS:
            raise NoSuchPrecision(f"unknown precision {named!r}; known: {', '.join(PRECISIONS)}")
        is_old = is_gpu and torch.cuda.get_device_capability(self.device) < _AMPERE
        if named in ("tf32", "bf16") and (is_old or (named == "tf32" and not is_gpu)):
            name = torch.cuda.get_device_name(self.device) if is_gpu else "a CPU"
            raise NoSuchPrecision(
                f"{named} needs an NVIDIA GPU of the Ampere generation or newer, but the device is"
                f" {name}. Train in fp32"
            )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=named == SCALED)
        self.hold()

    def hold(self) -> None:
        """Set torch's float32 precision.

        Call this method again after user code, which may change the precision.
        """
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = self.precision == "tf32"

    def forward(self) -> torch.autocast:
        """Return the autocast context for the forward pass and the loss."""
        dtype = _AUTOCAST.get(self.precision)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step. If fp16 gradients overflow, halve the loss scale instead."""
        self.scaler.step(optimizer)
        self.scaler.update()
