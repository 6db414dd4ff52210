"""Fixed work beside each measured block: its seconds say how fast this machine is at the moment,
whatever is trained.

A few products of small matrices and copies of memory, the same on every machine of a kind and
beside every workload: neighbours, caches and clock rates make them slower as they make training
slower. Two figures of one machine type are compared with each other, never those of two types.
"""

from __future__ import annotations

import torch

from .device import now

# Rows of the square matrices, MiB to copy, products in a row, and rounds of both: about 5 ms of one
# core, 20 of a T4. Changing one of them makes all references before incomparable.
_CPU = (256, 8, 4, 3)
_CUDA = (2048, 32, 1, 4)
_MOST_REPEATS = 100
_LEAST_S = 0.05  # several periods of a CPU quota, which would show in a shorter time


class Reference:
    """The work and its memory, on the threads that a rank has when it starts."""

    def __init__(self, device: torch.device) -> None:
        rows, mebibytes, self.products, self.rounds = _CUDA if device.type == "cuda" else _CPU
        self.device, self.threads = device, torch.get_num_threads()
        shapes = [(rows, rows)] * 3 + [(mebibytes * 2**18,)] * 2
        self.left, self.right, self.product, self.source, self.target = (
            torch.full(shape, 0.5, dtype=torch.float32, device=device) for shape in shapes
        )
        self.seconds()

    def seconds(self) -> float:
        """Mean seconds of the work, with the same threads and full float32 products whatever a
        workload has set.

        The first run does not count: the caches hold the data of the workload.
        """
        threads = self.threads
        before, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.no_grad():
                self._once()
                started = now(self.device)
                spent_s, count = 0.0, 0
                while spent_s < _LEAST_S and count < _MOST_REPEATS:
                    self._once()
                    spent_s, count = now(self.device) - started, count + 1
                return spent_s / count
        finally:
            torch.set_num_threads(before)
            torch.set_float32_matmul_precision(precision)

    def _once(self) -> None:
        for _ in range(self.rounds):
            for _ in range(self.products):
                torch.mm(self.left, self.right, out=self.product)
            self.target.copy_(self.source)
