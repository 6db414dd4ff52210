"""Define a workload (a training job), its modes and goals, and a setup (one way to run it)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product, starmap
from typing import TYPE_CHECKING, NamedTuple

from .cluster import Cluster

if TYPE_CHECKING:  # published rows are read without NumPy
    from .numeric import BoolArray, IntArray

# fp32: products in 32 bits. tf32: tensor cores drop 13 bits of a factor. bf16 and fp16: autocast.
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# DDP with compressed gradients: 16 bits per entry, low-rank factors, or only the largest entries.
FP16_SENT, POWERSGD_SENT, MSTOPK_SENT = COMPRESSED = ("ddp-fp16", "ddp-powersgd", "ddp-mstopk")
# DDP in which Adasum replaces the mean: of gradients, or of the weight updates of each device.
ADASUM, ADASUM_DELTA = COMBINED = ("adasum", "adasum-delta")
UPDATES_SHARED = "zero1"  # DDP with sharded optimizer states and updates
# Tensor parallelism: layers split over a row of devices, a square grid, or several square grids.
TENSOR_1D, TENSOR_2D, TENSOR_25D = TENSOR = ("tensor-1d", "tensor-2d", "tensor-2.5d")
SERVED = ("ps-1", "ps-2", "ps-4")  # gradients averaged by 1, 2 or 4 parameter servers
TABLES = "tables"  # DDP with each embedding table on one device
_GATHERED = ("fsdp", "zero2")
STRATEGIES = ("ddp", *_GATHERED, *COMPRESSED, *COMBINED, UPDATES_SHARED, *TENSOR, *SERVED, TABLES)
# The planner chooses these strategies only if a workload allows no other strategies.
UNPLANNED = (POWERSGD_SENT, ADASUM_DELTA, "ps-2", "ps-4")
# checkpointing: the backward pass recomputes activations. compile: torch.compile. offload: sharded
# weights, gradients and optimizer state are kept in host memory.
SWITCHES = (
    "none",
    "checkpointing",
    "compile",
    "offload",
    "checkpointing+compile",
    "checkpointing+offload",
    "compile+offload",
    "checkpointing+compile+offload",
)


class Mode(NamedTuple):
    """How a workload is trained: its precision, strategy (DDP, FSDP, ...) and switches.

    `switches` are names joined by `+`, such as "compile+offload"; "none" means no switch.
    """

    precision: str = "fp32"
    strategy: str = "ddp"
    switches: str = "none"

    def __str__(self) -> str:
        """Return a text such as `bf16 fsdp compile`, without the default strategy and switches."""
        return " ".join(value for value in self if value not in ("ddp", "none"))

    @property
    def sharded(self) -> bool:
        """True if weights, gradients or optimizer state are sharded over the devices."""
        return self.strategy in (*_GATHERED, UPDATES_SHARED)

    @property
    def gathered(self) -> bool:
        """True for FSDP and ZeRO-2, which exchange weights or gradients per block of layers."""
        return self.strategy in _GATHERED

    @property
    def compressed(self) -> bool:
        """True if the devices exchange compressed gradients, which may slow convergence."""
        return self.strategy in COMPRESSED

    @property
    def combined(self) -> bool:
        """True for Adasum, which combines gradients or weight changes without averaging them."""
        return self.strategy in COMBINED

    @property
    def divided(self) -> bool:
        """True for tensor parallelism, which splits each layer over several devices."""
        return self.strategy in TENSOR

    @property
    def servers(self) -> int:
        """Return the number of parameter servers; 0 for other strategies.

        A machine runs at most one server.
        """
        return int(self.strategy.removeprefix("ps-")) if self.strategy in SERVED else 0

    @property
    def must_be_faster(self) -> bool:
        """True for modes that the planner may choose only if they are reliably faster than DDP.

        On the same machines, the upper bound of the mode's step time must be below the predicted
        step time of DDP.
        """
        return self.compressed or self.divided or self.servers > 0

    @property
    def sends_otherwise(self) -> bool:
        """True for compressed gradients, Adasum, tensor parallelism and parameter servers.

        Srift compares the step time and the convergence of such modes with DDP.
        """
        return self.must_be_faster or self.combined

    @property
    def of_equal_batches(self) -> bool:
        """True if the strategy needs the same batch size on every device."""
        return self.strategy == ADASUM_DELTA or self.divided

    @property
    def of_several(self) -> bool:
        """True if the mode needs at least two devices, as every strategy except DDP does."""
        return self.strategy != "ddp"

    @property
    def offloaded(self) -> bool:
        """True if the sharded weights, gradients and optimizer state are kept in host memory."""
        return "offload" in self.switches

    @property
    def compiled(self) -> bool:
        """True if torch.compile compiles the model at the first step of each input shape."""
        return "compile" in self.switches

    def runs_on(
        self, machines: IntArray, fewest: IntArray, most: IntArray, ranks: IntArray
    ) -> BoolArray:
        """Return a (clusters,) mask that is True for clusters that can train in this mode.

        Each argument is a (clusters,) array:

        - `machines`: the number of machines
        - `fewest`, `most`: the fewest and the most devices used on a machine
        - `ranks`: the number of all used devices
        """
        able: BoolArray = (ranks > 1) | (not self.of_several)
        if self.combined:  # Adasum combines ranks in pairs, then pairs of pairs
            able &= ranks & (ranks - 1) == 0
        elif self.servers:
            able = (machines > 1) & (machines >= self.servers)
        elif self.strategy == MSTOPK_SENT:  # devices of equal index exchange gradients
            able = (machines > 1) & (fewest == most)
        elif self.divided:
            able = ranks < 0
            for count in set(ranks.tolist()):
                if grid_shape(self.strategy, count):
                    able |= ranks == count
        return able

    @property
    def dense(self) -> Mode:
        """Return the baseline for comparisons of step time and convergence.

        If `sends_otherwise` is True, the baseline is DDP with the same precision and the same
        switches. Otherwise, the mode is its own baseline.
        """
        return self._replace(strategy="ddp") if self.sends_otherwise else self

    @property
    def alone(self) -> Mode:
        """Return the equivalent mode for a single device: DDP, without offload."""
        kept = self.switches.removesuffix("offload").removesuffix("+")  # offload is the last switch
        return Mode(self.precision, switches=kept or "none")


def label(workload: str, mode: Mode) -> str:
    """Return a text such as `resnet in bf16 fsdp`, or only `resnet` in the default mode."""
    return workload if mode == Mode() else f"{workload} in {mode}"


# Legal values of each mode column of a measurement row. The first value is the default.
MODE_COLUMNS = {"precision": PRECISIONS, "strategy": STRATEGIES, "switches": SWITCHES}
MODES = tuple(
    mode
    for mode in starmap(Mode, product(*MODE_COLUMNS.values()))
    if (mode.gathered or not mode.offloaded)
    and (mode.switches == "none" or not (mode.divided or mode.strategy == TABLES))
)

GOALS = ("cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest")
# Columns of the published table that distinguish goals. The last two are the limits.
GOAL_COLUMNS = ("provider", "workload", "goal", "constraint_hours", "constraint_usd")

# Each 1 % over the limit counts like 10 % more of the objective. On measured setups, choices with
# this price have nearly the lowest regret. They exceed the limit as often as choices that must meet
# the limit with probability 0.9 (BENCHMARKS.md, "Choices").
OVERSHOOT_PRICE = 10.0


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What to minimise for a workload, and under which limit (see `planner/choice_rule.py`).

    - `goal`: a name in GOALS
    - `hours`: the deadline in hours; None if the goal has no deadline
    - `usd`: the budget in dollars; None if the goal has no budget
    - `p_required`: the required probability of meeting the deadline or the budget, such as 0.9. If
      None, a probability of one half is required, and exceeding the limit has a penalty.
    - `overshoot_price`: the size of the penalty. Exceeding the limit by 1 % is as bad as an
      objective that is `overshoot_price` % higher.
    """

    goal: str
    hours: float | None = None
    usd: float | None = None
    p_required: float | None = None
    overshoot_price: float = OVERSHOOT_PRICE

    @property
    def objective(self) -> str:
        """Return the quantity to minimise: "usd" or "hours"."""
        return "usd" if self.goal.startswith("cheapest") else "hours"

    @property
    def constraint(self) -> str | None:
        """Return the quantity that has a limit, "hours" or "usd"; None if there is no limit."""
        return {"cheapest_within_deadline": "hours", "fastest_within_budget": "usd"}.get(self.goal)

    @property
    def used(self) -> str:
        """Return the quantity that has a limit, "hours" or "usd".

        If the goal has no limit, return the quantity to minimise.
        """
        return self.constraint or self.objective

    @property
    def limit(self) -> float:
        """Return the deadline in hours or the budget in dollars; infinity if there is no limit."""
        limit = getattr(self, self.constraint) if self.constraint else None
        return math.inf if limit is None else limit


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training job: the number of samples to train on and the allowed global batches.

    - `modes`: the modes that the user allows
    - `parameters`, `gradient_bytes`, `flops_per_sample`: None if unknown
    - `layers`, `hidden`, `sequence`: layers, width and tokens per sample of a transformer; None for
      other workloads
    - `vocabulary`: the number of different tokens of a transformer; None if unknown
    - `checkpoint_bytes`: the size of a checkpoint; None until a checkpoint was measured
    """

    name: str
    digest: str
    samples: int
    global_batch_least: int
    global_batch_most: int
    goals: tuple[Goal, ...]
    parameters: int | None = None
    gradient_bytes: int | None = None
    flops_per_sample: float | None = None
    checkpoint_bytes: int | None = None
    layers: int | None = None
    hidden: int | None = None
    sequence: int | None = None
    vocabulary: int | None = None
    modes: tuple[Mode, ...] = MODES[:1]


def grid_shape(strategy: str, ranks: int) -> tuple[int, int, int] | None:
    """Return the shape (rows, columns, depth) of the device grid of a tensor-parallel strategy.

    For example, `tensor-2d` on 4 ranks gives (2, 2, 1). Returns None if `ranks` devices cannot form
    a grid for the strategy.
    """
    if strategy == TENSOR_1D:
        return (1, ranks, 1) if ranks > 1 else None
    side = math.isqrt(ranks)
    if strategy == TENSOR_2D:
        return (side, side, 1) if side > 1 and side**2 == ranks else None
    sides = (each for each in range(math.isqrt(ranks // 2), 1, -1) if ranks % each**2 == 0)
    return next(((each, each, ranks // each**2) for each in sides), None)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A workload on a cluster, with all settings that determine the step time.

    `layout` has the number of devices used on each instance. `batch_per_device` has the samples per
    device in a micro-step, for each instance. `accumulation_steps` micro-steps make one step.
    """

    workload: str
    cluster: Cluster
    layout: tuple[int, ...]
    batch_per_device: tuple[int, ...]
    accumulation_steps: int = 1
    mode: Mode = MODES[0]

    @property
    def global_batch(self) -> int:
        """Return the number of samples that the cluster processes in one optimizer step."""
        pairs = zip(self.layout, self.batch_per_device, strict=True)
        return sum(devices * batch for devices, batch in pairs) * self.accumulation_steps

    def row(self) -> dict[str, str | int]:
        """Return the columns that identify the setup in measurements and published tables."""
        return {
            "workload": self.workload,
            "cluster": self.cluster.name,
            "layout": join_numbers(self.layout),
            "batch_per_device": join_numbers(self.batch_per_device),
            "accumulation_steps": self.accumulation_steps,
            **self.mode._asdict(),
            "provider": self.cluster.members[0].instance_type.provider,
        }


def join_numbers(numbers: tuple[int, ...]) -> str:
    """Join numbers by `+`: (8, 4) gives `8+4`. Equal numbers are written once: (8, 8) gives `8`."""
    return str(numbers[0]) if len(set(numbers)) == 1 else "+".join(map(str, numbers))
