"""Training jobs as values: workloads, modes, goals, and the setups that run them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

from .cluster import Cluster

if TYPE_CHECKING:
    from .numeric import BoolArray, IntArray

# 32-bit floats; TF32 on tensor cores (10-bit mantissa); autocast to 16 bits.
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# DDP with compressed gradients: 16-bit values, low-rank factors, or the largest entries.
FP16_SENT, POWERSGD_SENT, MSTOPK_SENT = COMPRESSED = ("ddp-fp16", "ddp-powersgd", "ddp-mstopk")
# DDP with Adasum in place of the mean, of gradients or of each device's parameter update.
ADASUM, ADASUM_DELTA = COMBINED = ("adasum", "adasum-delta")
UPDATES_SHARED = "zero1"  # DDP with sharded optimizer states
# Layers divided over a row of devices, a square, or several squares.
TENSOR_1D, TENSOR_2D, TENSOR_25D = TENSOR = ("tensor-1d", "tensor-2d", "tensor-2.5d")
SERVED = ("ps-1", "ps-2", "ps-4")  # gradients averaged by so many parameter servers
TABLES = "tables"  # DDP with each embedding table on one device
_GATHERED = ("fsdp", "zero2")
STRATEGIES = ("ddp", *_GATHERED, *COMPRESSED, *COMBINED, UPDATES_SHARED, *TENSOR, *SERVED, TABLES)
# The planner does not choose these; they run if srift.toml names no other strategy.
UNPLANNED = (POWERSGD_SENT, ADASUM_DELTA, "ps-2", "ps-4")
# Activations recomputed in the backward pass; a compiled model; shared states in host memory.
_SWITCHES = ("checkpointing", "compile", "offload")
SWITCHES = (
    "none",
    *(
        "+".join(some)
        for count in range(1, len(_SWITCHES) + 1)
        for some in combinations(_SWITCHES, count)
    ),
)


class Mode(NamedTuple):
    """How a workload is trained: precision, strategy, and switches joined by `+` (or `none`)."""

    precision: str = PRECISIONS[0]
    strategy: str = STRATEGIES[0]
    switches: str = SWITCHES[0]

    def __str__(self) -> str:
        """Return the precision and every value that is not the default: `bf16 fsdp compile`."""
        rest = zip(self[1:], (STRATEGIES[0], SWITCHES[0]), strict=True)
        return " ".join([self.precision, *(value for value, usual in rest if value != usual)])

    @property
    def sharded(self) -> bool:
        """True if the training state is sharded, so that more devices need less memory each."""
        return self.strategy in (*_GATHERED, UPDATES_SHARED)

    @property
    def gathered(self) -> bool:
        """True if a device holds a shard of weights or gradients and computes a block at a time."""
        return self.strategy in _GATHERED

    @property
    def compressed(self) -> bool:
        """True if gradients are sent in fewer bytes, so that convergence must be checked."""
        return self.strategy in COMPRESSED

    @property
    def combined(self) -> bool:
        """True if Adasum combines gradients or updates."""
        return self.strategy in COMBINED

    @property
    def divided(self) -> bool:
        """True for tensor parallelism: devices exchange activations instead of gradients."""
        return self.strategy in TENSOR

    @property
    def servers(self) -> int:
        """Return the number of parameter servers, at most one per machine; 0 without them."""
        return int(self.strategy.removeprefix("ps-")) if self.strategy in SERVED else 0

    @property
    def must_be_faster(self) -> bool:
        """True if it is chosen only where its upper bound is below the prediction of DDP."""
        return self.compressed or self.divided or self.servers > 0

    @property
    def sends_otherwise(self) -> bool:
        """True if devices compute as in DDP but exchange other data, or in another way."""
        return self.must_be_faster or self.combined

    @property
    def of_equal_batches(self) -> bool:
        """True if every device must have the same batch."""
        return self.strategy == ADASUM_DELTA or self.divided

    @property
    def of_several(self) -> bool:
        """True if it needs several devices."""
        return self.strategy != STRATEGIES[0]

    @property
    def offloaded(self) -> bool:
        """True if the state lies in host memory."""
        return _SWITCHES[2] in self.switches.split("+")

    @property
    def compiled(self) -> bool:
        """True if the first step of each shape is a compilation."""
        return _SWITCHES[1] in self.switches.split("+")

    def runs_on(
        self, machines: IntArray, fewest: IntArray, most: IntArray, ranks: IntArray
    ) -> BoolArray:
        """Return (rows,) bool: can clusters with `fewest` to `most` devices a machine train so?"""
        several = ranks > 1
        able: BoolArray
        if self.combined:  # in pairs, and pairs of pairs
            able = several & (ranks & (ranks - 1) == 0)
        elif self.servers:
            able = (machines > 1) & (machines >= self.servers)
        elif self.strategy == MSTOPK_SENT:  # between devices of one place on all machines
            able = (machines > 1) & (fewest == most)
        elif self.divided:
            able = ranks < 0
            for count in set(ranks.tolist()):
                if grid_shape(self.strategy, count) is not None:
                    able |= ranks == count
        else:
            able = (machines > 1) | (most > 1) | (not self.of_several)
        return able

    @property
    def dense(self) -> Mode:
        """Return the DDP mode to compare with if the exchange differs; else itself."""
        return self._replace(strategy=STRATEGIES[0]) if self.sends_otherwise else self

    @property
    def alone(self) -> Mode:
        """Return the mode of a single device: strategy ddp, no offloading."""
        kept = [switch for switch in self.switches.split("+") if switch != _SWITCHES[2]]
        return Mode(self.precision, STRATEGIES[0], "+".join(kept) or SWITCHES[0])


# Values of each column of a measurement row, the default first.
MODE_COLUMNS = {"precision": PRECISIONS, "strategy": STRATEGIES, "switches": SWITCHES}
MODES = tuple(
    mode
    for mode in (Mode(*values) for values in product(PRECISIONS, STRATEGIES, SWITCHES))
    if (mode.gathered or not mode.offloaded)
    and (mode.switches == SWITCHES[0] or not (mode.divided or mode.strategy == TABLES))
)

GOALS = ("cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest")

# Each 1 % over a limit costs 10 % of the objective. On measured rows this is near the least regret,
# with as many missed limits as a required probability of 0.9 (BENCHMARKS.md, "Choices").
OVERSHOOT_PRICE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A question about a workload (`planner/choice_rule.py`).

    `p_required` is the least probability of meeting the limit. With None, a cluster may exceed the
    limit: each 1 % over it costs `overshoot_price` % of the objective.
    """

    goal: str
    hours: float | None = None
    usd: float | None = None
    p_required: float | None = None
    overshoot_price: float = OVERSHOOT_PRICE

    @property
    def objective(self) -> str:
        """The quantity to minimise: "usd" or "hours"."""
        return "usd" if self.goal.startswith("cheapest") else "hours"

    @property
    def constraint(self) -> str | None:
        """The limited quantity, "hours" or "usd"; None without a constraint."""
        return {"cheapest_within_deadline": "hours", "fastest_within_budget": "usd"}.get(self.goal)

    @property
    def limit(self) -> float | None:
        """The deadline in hours or the budget in dollars; None without a constraint."""
        return {"hours": self.hours, "usd": self.usd}.get(self.constraint or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training job: the samples it must see and the global batches it tolerates.

    `modes` are the modes that its training tolerates. Parameters, bytes and FLOPs are None until a
    profile or an import gives them; `checkpoint_bytes` is None until a checkpoint was written.
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
    modes: tuple[Mode, ...] = MODES[:1]


def grid_shape(strategy: str, ranks: int) -> tuple[int, int, int] | None:
    """Return rows, columns and depth of the device grid of tensor parallelism, or None."""
    if strategy == TENSOR_1D:
        return (1, ranks, 1) if ranks > 1 else None
    side = math.isqrt(ranks)
    if strategy == TENSOR_2D:
        return (side, side, 1) if side > 1 and side**2 == ranks else None
    sides = (each for each in range(math.isqrt(ranks // 2), 1, -1) if ranks % each**2 == 0)
    return next(((each, each, ranks // each**2) for each in sides), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All that decides a step time. `layout` and `batch_per_device` have a number per instance."""

    workload: str
    cluster: Cluster
    layout: tuple[int, ...]
    batch_per_device: tuple[int, ...]
    accumulation_steps: int = 1
    strategy: str = STRATEGIES[0]
    precision: str = PRECISIONS[0]
    switches: str = SWITCHES[0]

    @property
    def mode(self) -> Mode:
        return Mode(self.precision, self.strategy, self.switches)

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over the whole cluster."""
        pairs = zip(self.layout, self.batch_per_device, strict=True)
        return sum(devices * batch for devices, batch in pairs) * self.accumulation_steps

    def row(self) -> dict[str, str | int]:
        """The columns of measurements, predictions and the published table."""
        return {
            "workload": self.workload,
            "cluster": self.cluster.name,
            "layout": joined(self.layout),
            "batch_per_device": joined(self.batch_per_device),
            "accumulation_steps": self.accumulation_steps,
            "strategy": self.strategy,
            "precision": self.precision,
            "switches": self.switches,
            "provider": self.cluster.members[0].instance_type.provider,
        }


def joined(numbers: tuple[int, ...]) -> str:
    """Join numbers by `+`; equal numbers are written once."""
    return str(numbers[0]) if len(set(numbers)) == 1 else "+".join(map(str, numbers))
