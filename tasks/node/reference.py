"""Fixed work beside what is measured: its seconds say how fast this machine is at the moment,
whatever is trained.

A few products of small matrices and copies of memory, the same on every machine of a kind and
beside every workload: neighbours, caches and clock rates make them slower as they make training
slower. Two figures of one machine type are compared with each other, never those of two types.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .device import now

# Rows of the square matrices, MiB to copy, products in a row, and rounds of both: about 5 ms of one
# core, 20 of a T4. Changing one of them makes all references before incomparable.
_CPU = (256, 8, 4, 3)
_CUDA = (2048, 32, 1, 4)
_MOST_REPEATS = 100
_LEAST_S = 0.05  # several periods of a CPU quota, which would show in a shorter time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """The work and its memory; `threads` are those of the rank when it starts."""

    left: torch.Tensor
    right: torch.Tensor
    product: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    products: int
    rounds: int
    threads: int

    @classmethod
    def on(cls, device: torch.device) -> Reference:
        """Make it for a rank's device, and run it once."""
        rows, mebibytes, products, rounds = _CUDA if device.type == "cuda" else _CPU

        def full(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.full(shape, 0.5, dtype=torch.float32, device=device)

        matrices = [full((rows, rows)) for _ in range(3)]
        buffers = [full((mebibytes * 2**18,)) for _ in range(2)]
        reference = cls(
            left=matrices[0],
            right=matrices[1],
            product=matrices[2],
            source=buffers[0],
            target=buffers[1],
            products=products,
            rounds=rounds,
            threads=torch.get_num_threads(),
        )
        reference.seconds()
        return reference

    def seconds(self) -> float:
        """Mean seconds of the work, on the same threads and precision whatever a workload has
        changed.

        The first run does not count: the caches hold the data of what ran before.
        """
        with torch.no_grad(), _computing_with(self.threads):
            self._once()
            started = now(self.left.device)
            spent_s, count = 0.0, 0
            while spent_s < _LEAST_S and count < _MOST_REPEATS:
                self._once()
                spent_s, count = now(self.left.device) - started, count + 1
            return spent_s / count

    def _once(self) -> None:
        for _ in range(self.rounds):
            for _ in range(self.products):
                torch.mm(self.left, self.right, out=self.product)
            self.target.copy_(self.source)


@contextmanager
def _computing_with(threads: int) -> Iterator[None]:
    """Compute with that many threads and full float32 products; restore the settings afterwards."""
    before, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        if before != threads:
            torch.set_num_threads(threads)
        if precision != "highest":
            torch.set_float32_matmul_precision("highest")
        yield
    finally:
        if before != threads:
            torch.set_num_threads(before)
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)
