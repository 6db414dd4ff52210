"""Time a fixed computation beside each measurement, to show how fast the machine was then.

The computation multiplies small matrices and copies memory. A busy host slows down both this
computation and training, for example because the host lowers its clock rate. The times are
comparable only between machines of the same instance type.
"""

import torch

from .device import now

# Rows of the square matrices, MiB to copy, products per round, and rounds. One repetition takes
# about 5 ms on one core, and 20 ms on a T4. With other numbers, older times are not comparable.
_CPU = (256, 8, 4, 3)
_CUDA = (2048, 32, 1, 4)
_LEAST_S = 0.05  # minimum seconds to time, because a CPU quota would distort a shorter time


class Reference:
    """A fixed computation on one device, whose time shows how fast the machine is.

    The computation always uses the number of threads that torch had when the object was created.
    """

    def __init__(self, device: torch.device) -> None:
        rows, mebibytes, self.products, self.rounds = _CUDA if device.type == "cuda" else _CPU
        self.device, self.threads = device, torch.get_num_threads()
        shapes = [(rows, rows)] * 3 + [(mebibytes * 2**18,)] * 2
        self.left, self.right, self.product, self.source, self.target = (
            torch.full(shape, 0.5, dtype=torch.float32, device=device) for shape in shapes
        )
        self.seconds()

    def seconds(self) -> float:
        """Return the mean time in seconds of one repetition of the fixed computation."""
        before, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.no_grad():
                self._once()  # not timed: the caches still hold the workload's data
                started = now(self.device)
                spent_s, count = 0.0, 0
                while spent_s < _LEAST_S:
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
