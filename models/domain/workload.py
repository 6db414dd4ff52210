"""Training jobs as values: workloads, their goals, and the setups that run them. Never runs anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .cluster import Cluster

# What products are made in: 32 bits; tensor cores that drop 13 bits of each factor; autocast to 16 bits.
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# What each device holds: everything; a share of everything; the weights, and a share of gradients and states.
STRATEGIES = ("ddp", "fsdp", "zero2")


def mode_of(precision: str, strategy: str) -> str:
    """How a workload is trained, in a word or two: `fp32`, `bf16`, `bf16 fsdp`."""
    return precision if strategy == STRATEGIES[0] else f"{precision} {strategy}"


def precision_and_strategy(mode: str) -> tuple[str, str]:
    """What `mode_of` made a mode of."""
    precision, _, strategy = mode.partition(" ")
    return precision, strategy or STRATEGIES[0]


def sharded(mode: str) -> bool:
    """Whether devices share the state of a training among them, so that each needs less memory the more there are."""
    return precision_and_strategy(mode)[1] != STRATEGIES[0]


MODES = tuple(mode_of(precision, strategy) for precision in PRECISIONS for strategy in STRATEGIES)
_IN = " in "

GOALS = ("cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest")


# Exceeding a limit by 1 % counts as 10 % more of what is to be least: about where regret on measured rows is least at
# as many misses as a required probability of 0.9 leaves (BENCHMARKS.md, "Choices").
OVERSHOOT_PRICE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a reader wants of a workload (`planner/choice_rule.py`).

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
    modes: tuple[str, ...] = MODES[:1]

    @property
    def variants(self) -> tuple[Workload, ...]:
        """The workload in each of its modes, as a workload of its own."""
        return tuple(replace(self, name=variant(self.name, one), modes=MODES[:1]) for one in self.modes)


def variant(workload: str, mode: str) -> str:
    """What a model knows a workload in that mode as: another workload, unless it is plain data parallelism in fp32."""
    return workload if mode == MODES[0] else f"{workload}{_IN}{mode}"


def workload_and_mode(name: str) -> tuple[str, str]:
    """What `variant` made a name of."""
    workload, found, mode = name.rpartition(_IN)
    return (workload, mode) if found and mode in MODES[1:] else (name, MODES[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All that decides a step time. `batch_per_device` and `layout` hold one number an instance, in rank order."""

    workload: str
    cluster: Cluster
    layout: tuple[int, ...]
    batch_per_device: tuple[int, ...]
    accumulation_steps: int = 1
    strategy: str = "ddp"
    precision: str = "fp32"

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
            "provider": self.cluster.members[0].instance_type.provider,
        }


def joined(numbers: tuple[int, ...]) -> str:
    """One number where all are equal in batches, else joined by '+': the shortest text that means the same."""
    return str(numbers[0]) if len(set(numbers)) == 1 else "+".join(str(number) for number in numbers)
