"""Training jobs as values: workloads, their goals, and the setups that run them. Never runs anything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from .cluster import Cluster
from .numeric import BoolArray, IntArray

# What products are made in: 32 bits; tensor cores that drop 13 bits of each factor; autocast to 16 bits.
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# What each device holds: everything; a share of everything; the weights, and a share of gradients and states. Then ddp
# with gradients sent in fewer bytes: 16 bits each; products of narrow matrices; between machines the largest alone.
# Then Adasum in place of averages: of gradients; of what each device's own step changed. Then ddp in which each device
# holds the optimizer's states of a share of the weights alone, updates these and sends them to all. Then layers divided
# over a row of devices, a square of them, or several squares.
FP16_SENT, POWERSGD_SENT, MSTOPK_SENT = COMPRESSED = ("ddp-fp16", "ddp-powersgd", "ddp-mstopk")
ADASUM, ADASUM_DELTA = COMBINED = ("adasum", "adasum-delta")
UPDATES_SHARED = "zero1"
TENSOR_1D, TENSOR_2D, TENSOR_25D = TENSOR = ("tensor-1d", "tensor-2d", "tensor-2.5d")
# As ddp, with gradients averaged by one, two or four parameter servers instead of in a ring.
SERVED = ("ps-1", "ps-2", "ps-4")
# As ddp, but that each embedding table lies on one device.
TABLES = "tables"
_GATHERED = ("fsdp", "zero2")
STRATEGIES = ("ddp", *_GATHERED, *COMPRESSED, *COMBINED, UPDATES_SHARED, *TENSOR, *SERVED, TABLES)
# Activations are computed again in the backward pass instead of kept; the model is compiled; states that are shared out
# lie in the host's memory, and are updated there.
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
    """How a workload is trained. `switches` are joined by +, `none` where none is on.

    Its text names what is not usual: `fp32`, `bf16`, `bf16 fsdp checkpointing+compile`.
    """

    precision: str = PRECISIONS[0]
    strategy: str = STRATEGIES[0]
    switches: str = SWITCHES[0]

    def __str__(self) -> str:
        strategy = "" if self.strategy == STRATEGIES[0] else f" {self.strategy}"
        return (
            self.precision
            + strategy
            + ("" if self.switches == SWITCHES[0] else f" {self.switches}")
        )

    @classmethod
    def of(cls, text: str) -> Mode:
        """That of its text."""
        precision, *others = text.split(" ")
        strategy = others.pop(0) if others and others[0] in STRATEGIES else STRATEGIES[0]
        return cls(precision, strategy, " ".join(others) or SWITCHES[0])

    @property
    def sharded(self) -> bool:
        """Whether devices share the state of a training among them, so that each needs less the more there are."""
        return self.strategy in (*_GATHERED, UPDATES_SHARED)

    @property
    def gathered(self) -> bool:
        """Whether a device holds a share of the weights, or of their gradients, and computes a block at a time."""
        return self.strategy in _GATHERED

    @property
    def compressed(self) -> bool:
        """Whether gradients are sent in fewer bytes than they have."""
        return self.strategy in COMPRESSED

    @property
    def combined(self) -> bool:
        """Whether gradients, or changes of weights, are combined by Adasum: a step learns something else."""
        return self.strategy in COMBINED

    @property
    def servers(self) -> int:
        """Parameter servers through which gradients are sent, at most one on a machine; 0 where there are none."""
        return int(self.strategy.removeprefix("ps-")) if self.strategy in SERVED else 0

    @property
    def sends_otherwise(self) -> bool:
        """Whether devices compute what they do in plain data parallelism, and another thing is sent, or another way."""
        return self.compressed or self.combined or self.divided or self.servers > 0

    @property
    def has_to_be_faster(self) -> bool:
        """Whether it is taken only where a step is known to be faster than in plain data parallelism."""
        return self.compressed or self.divided or self.servers > 0

    @property
    def divided(self) -> bool:
        """Whether layers are divided among devices, which exchange activations in place of gradients."""
        return self.strategy in TENSOR

    @property
    def of_equal_batches(self) -> bool:
        """Whether every device has to have the same batch: its own step does not tell how many samples it is of, or it
        computes with others' samples.
        """
        return self.strategy == ADASUM_DELTA or self.divided

    @property
    def changes_learning(self) -> bool:
        """Whether a step is another than the dense one, so that it has to be shown that as much is learned."""
        return self.compressed

    @property
    def of_several(self) -> bool:
        """Whether it is something else than plain data parallelism, which one device alone cannot be."""
        return self.strategy != STRATEGIES[0]

    @property
    def offloaded(self) -> bool:
        """Whether the state lies in the host's memory."""
        return _SWITCHES[2] in self.switches.split("+")

    @property
    def compiled(self) -> bool:
        """Whether the first step of each shape is a compilation."""
        return _SWITCHES[1] in self.switches.split("+")

    def runs_on(
        self, machines: IntArray, fewest: IntArray, most: IntArray, ranks: IntArray
    ) -> BoolArray:
        """(rows,) whether so many machines can train so, with at least `fewest` and at most `most` devices each, which
        are `ranks` devices together.
        """
        if self.combined:  # in pairs, and these in pairs
            return np.asarray((ranks > 1) & (ranks & (ranks - 1) == 0), dtype=bool)
        if self.servers:
            return np.asarray((machines > 1) & (machines >= self.servers), dtype=bool)
        if self.strategy == MSTOPK_SENT:  # exchanged between devices of one place on all machines
            return np.asarray((machines > 1) & (fewest == most), dtype=bool)
        if self.divided:
            return np.array(
                [grid_shape(self.strategy, int(many)) is not None for many in ranks], dtype=bool
            )
        return np.asarray((machines > 1) | (most > 1) | (not self.of_several), dtype=bool)

    @property
    def dense(self) -> Mode:
        """The same in plain data parallelism, where something else is sent than there."""
        return self._replace(strategy=STRATEGIES[0]) if self.sends_otherwise else self

    @property
    def alone(self) -> Mode:
        """The same of one device, which shares nothing with any other."""
        kept = [one for one in self.switches.split("+") if one != _SWITCHES[2]]
        return Mode(self.precision, STRATEGIES[0], "+".join(kept) or SWITCHES[0])


# By column of a measurement row what it may hold, the usual first.
MODE_COLUMNS = {"precision": PRECISIONS, "strategy": STRATEGIES, "switches": SWITCHES}
_MODES = (Mode(*parts) for parts in product(PRECISIONS, STRATEGIES, SWITCHES))
MODES = tuple(
    mode
    for mode in _MODES
    if (mode.gathered or not mode.offloaded)
    and (mode.switches == SWITCHES[0] or not (mode.divided or mode.strategy == TABLES))
)

GOALS = ("cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest")


# Exceeding a limit by 1 % counts as 10 % more of what is to be least: about where regret on measured rows is least at
# as many misses as a required probability of 0.9 leaves (BENCHMARKS.md, "Choices").
OVERSHOOT_PRICE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a reader asks of a workload (`planner/choice_rule.py`).

    `p_required` is the probability with which the constraint must be met; where it is None, exceeding the constraint is
    weighed at `overshoot_price` instead of forbidden.
    """

    goal: str
    hours: float | None = None
    usd: float | None = None
    p_required: float | None = None
    overshoot_price: float = OVERSHOOT_PRICE

    @property
    def objective(self) -> str:
        """What is to be least: "usd" or "hours"."""
        return "usd" if self.goal.startswith("cheapest") else "hours"

    @property
    def constraint(self) -> str | None:
        """What is limited, "hours" or "usd"; None without a constraint."""
        return {"cheapest_within_deadline": "hours", "fastest_within_budget": "usd"}.get(self.goal)

    @property
    def limit(self) -> float | None:
        """Hours or dollars that the constraint allows; None without one."""
        return {"hours": self.hours, "usd": self.usd}.get(self.constraint or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training job: how many samples it must see, and the global batch it tolerates (least = most when fixed).

    `modes` are those that its training tolerates. `parameters`, `gradient_bytes` and `flops_per_sample` are None
    until a profile or an import tells them, `checkpoint_bytes` until one was written.
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
    """Rows, columns and depth of the grid of so many devices (tasks/node/strategies/grid.py); None if they are none."""
    if strategy == TENSOR_1D:
        return (1, ranks, 1) if ranks > 1 else None
    side = math.isqrt(ranks)
    if strategy == TENSOR_2D:
        return (side, side, 1) if side > 1 and side**2 == ranks else None
    sides = (one for one in range(math.isqrt(ranks // 2), 1, -1) if ranks % one**2 == 0)
    return next(((one, one, ranks // one**2) for one in sides), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All that decides a step time. `batch_per_device` and `layout` hold one number an instance, in rank order."""

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
        """How it is trained."""
        return Mode(self.precision, self.strategy, self.switches)

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over the whole cluster."""
        micro = sum(d * b for d, b in zip(self.layout, self.batch_per_device, strict=True))
        return micro * self.accumulation_steps

    def row(self) -> dict[str, str | int]:
        """The measurement columns, as `training rows`, predictions and the published table spell them."""
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
    """One number where all are equal in batches, else joined by '+': the shortest text that means the same."""
    return (
        str(numbers[0]) if len(set(numbers)) == 1 else "+".join(str(number) for number in numbers)
    )
