"""Everything that could be measured, with what it would cost in seconds. Chooses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np
import pandas as pd

from ..domain.cluster import Cluster, InstanceType, cluster_name
from ..domain.setup_table import Key, modes_of, rows_of, setup_key
from ..domain.workload import MODES, Mode, Setup, Workload, joined
from ..job.compilation import COMPILE_S
from ..planner.batch_split import Line, finish_together, global_batches
from ..planner.learning import LEARNING_MOST_S, LEARNING_SEEDS, LEARNING_STEPS
from ..step_time.machine_specs import computes

Expected = Callable[
    [pd.DataFrame], pd.DataFrame
]  # setups as measurement columns -> step_s, step_low_s, step_high_s

Trained = tuple[str, Mode]
Lines = dict[tuple[str, Mode, str], Line]

PROFILE_BATCHES = 4
MESSAGE_BYTES = (4 * 2**10, 64 * 2**10, 512 * 2**10, 2 * 2**20, 8 * 2**20)
_LEAST_PROFILED = 3  # batches that determine the line of one device


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that a campaign expects to pay, beside the steps. Priors from local hosts; all of them arguments."""

    launch_s: float = 12.0  # machines, agents, torchrun, importing torch: paid once a launch
    build_s: float = 0.5
    compile_s: float = COMPILE_S  # of one shape, by torch.compile
    steps: int = 15  # one tried, 2 of warm-up, about 10 timed, 2 without communication
    train_most_s: float = 11.0  # an item's step cap holds it to about this
    probe_s: float = 7.0
    core_step_s: float = (
        0.15  # a step of the least global batch on one core; the built-in workloads take 0.1 to 0.2
    )
    gradient_bytes: float = (
        6e6  # of a workload whose size is not known yet; the built-in ones have 1 to 12 MB
    )
    minimum_s: float = 0.0  # a launch is paid for at least so long; on EC2 a minute

    def run_s(self, step_s: float) -> float:
        """Of one training run, its machines running: building the workload, and all its steps."""
        return self.build_s + self.steps * step_s

    def compiling_s(self, mode: Mode, shapes: int = 1) -> float:
        """Of compiling a model in so many shapes, where it is compiled: once as it is, and once more when sharded."""
        return mode.compiled * shapes * (1 + mode.gathered) * self.compile_s

    def billed_s(self, run_s: float) -> float:
        """Of a launch whose runs take `run_s` together."""
        return max(self.minimum_s, self.launch_s + run_s)


# Linux machines on EC2 are billed by the second from one minute on; the times to start are priors.
EC2_COSTS = Costs(launch_s=60.0, build_s=5.0, minimum_s=60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One thing to measure, and the seconds expected for it. `kind` is one of those of node/record.py.

    `workload` is trained in `mode`; `members` are instance types in rank order; `nodes` those of a launch that
    serve it, and `reason` why, once it is bought. `batches` are samples a device, one a machine (profile: batches to
    try); `seed` is that of a learning run, others have their launch's. `devices` are used on each machine, empty: one
    each. `width` is the predicted 90 % interval relative to the step time, None if unknown. Of an elastic run `steps`
    are trained, with a checkpoint every `checkpoint_every`; a lost machine is waited for `wait_s` (node/record.py).
    Its last machine is taken away `lose_after_s` after the first step, None: none is.
    """

    kind: str
    workload: str = ""
    mode: Mode = MODES[0]
    members: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    accumulation_steps: int = 1
    message_bytes: tuple[int, ...] = ()
    global_batch: int = 0
    exact: bool = True  # at a global batch that the workload tolerates
    est_s: float
    width: float | None = None
    reason: str = ""
    seed: int = 0
    steps: int = 0
    checkpoint_every: int = 0
    wait_s: float = 2.0
    lose_after_s: float | None = None

    @property
    def trained(self) -> Trained:
        """Name of the workload, and how it is trained."""
        return self.workload, self.mode

    @property
    def label(self) -> str:
        """The workload, with its mode where that is not the usual one."""
        return self.workload if self.mode == Mode() else f"{self.workload} in {self.mode}"

    @property
    def cluster(self) -> str:
        """Name of the machines that take part."""
        return cluster_name(self.members)

    @property
    def layout(self) -> tuple[int, ...]:
        """Devices used on each machine."""
        return self.devices or (1,) * len(self.members or self.nodes)

    def row(self) -> dict[str, object]:
        """As `Setup.row` has it."""
        return {
            "workload": self.workload,
            "cluster": self.cluster,
            "layout": joined(self.layout),
            "batch_per_device": joined(self.batches),
            "accumulation_steps": self.accumulation_steps,
            **self.mode._asdict(),
        }

    @property
    def tie_text(self) -> str:
        """Seeds the order of equals: a list stays the same only while this text does."""
        return (
            f"Want(kind={self.kind!r}, workload={self.label!r}, members={self.members!r}, batches={self.batches!r},"
            f" accumulation_steps={self.accumulation_steps!r}, message_bytes={self.message_bytes!r},"
            f" global_batch={self.global_batch!r}, exact={self.exact!r}, est_s={self.est_s!r}, width={self.width!r})"
        )


def sub_clusters(cluster: Cluster) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Every different sub-cluster by its instance types, and the first nodes that form it, in rank order."""
    return _first_nodes(tuple(offer.instance_type.name for offer in cluster.members))


@lru_cache(maxsize=4096)  # every launch of a list asks again, and 16 machines have 65,535 subsets
def _first_nodes(names: tuple[str, ...]) -> dict[tuple[str, ...], tuple[int, ...]]:
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    for size in range(1, len(names) + 1):
        for nodes in combinations(range(len(names)), size):
            found.setdefault(tuple(names[node] for node in nodes), nodes)
    return found


def profile_of(workload: Workload, instance_type: InstanceType, costs: Costs) -> PlannedRun:
    """A profile of `workload` on one machine, at 4 batches from an eighth of the least global batch to the most."""
    least = max(1, workload.global_batch_least // 8)
    sizes = np.geomspace(least, workload.global_batch_most, PROFILE_BATCHES)
    step_s = costs.core_step_s * sizes / workload.global_batch_least / instance_type.cores
    est_s = float(
        np.maximum(1.0, 4 * step_s).sum() + max(1.0, 5 * step_s[len(sizes) // 2])
    )  # as node/profiler.py does
    return PlannedRun(
        kind="profile",
        workload=workload.name,
        mode=workload.modes[0],
        members=(instance_type.name,),
        batches=tuple(sorted({round(float(size)) for size in sizes})),
        est_s=costs.build_s + est_s + costs.compiling_s(workload.modes[0], PROFILE_BATCHES),
    )


def probe_of(members: tuple[str, ...], costs: Costs) -> PlannedRun:
    """All-reduces over `members`, from 4 KiB to 8 MiB."""
    return PlannedRun(
        kind="probe", members=members, message_bytes=MESSAGE_BYTES, est_s=costs.probe_s
    )


def learning_runs(
    workload: Workload, mode: Mode, cluster: Cluster, costs: Costs
) -> list[PlannedRun]:
    """Trainings of `workload` on the first two machines of `cluster` that show what it learns in `mode` and in plain
    data parallelism, from LEARNING_SEEDS each; none where they cannot train so, or have more devices than samples.
    """
    two = Cluster(members=cluster.members[:2])
    devices = min(offer.instance_type.devices for offer in two.members)
    share = workload.global_batch_least // (2 * devices)
    if len(two.members) < 2 or share < 1 or not _trains(two, mode, (devices, devices)):
        return []
    cores = sum(offer.instance_type.cores for offer in two.members)
    est_s = costs.build_s + min(LEARNING_STEPS * 2 * costs.core_step_s / cores, LEARNING_MOST_S)
    return [
        PlannedRun(
            kind="learn",
            workload=workload.name,
            mode=one,
            members=tuple(offer.instance_type.name for offer in two.members),
            nodes=(0, 1),
            devices=(devices, devices) if devices > 1 else (),
            batches=(share, share),
            global_batch=2 * devices * share,
            est_s=est_s + costs.compiling_s(one),
            reason=f"{mode.strategy} was not shown yet to learn {workload.name} as {mode.dense.strategy} does",
            seed=seed,
        )
        for one in (mode.dense, mode)
        for seed in LEARNING_SEEDS
    ]


def training_runs(
    workloads: Sequence[Workload],
    clusters: Sequence[Cluster],
    profiles: pd.DataFrame,
    *,
    expected_step: Expected | None,
    costs: Costs,
) -> dict[Key, PlannedRun]:
    """Training runs of every workload, in the first of its modes, on every given cluster, by what they would measure.

    At the workload's global batches, and for variety at half the least and with two accumulation steps. Unequal
    machines share the batch so that they finish together, by their profiles where each has one, else by their cores. A
    machine with several devices is also measured with one, at the same batch a device: the difference shows what they
    cost each other. `expected_step` is asked only about workloads and instance types that have profiles.
    """
    lines = profiled_lines(profiles)
    planned: list[tuple[Setup | None, bool, Workload]] = []
    for workload in workloads:
        least, most = workload.global_batch_least, workload.global_batch_most
        totals = tuple(global_batches(least, most))
        variants = [(total, 1, least <= total <= most) for total in totals]
        variants += [(totals[0] // 2, 1, False), (totals[0], 2, True)]
        mode = workload.modes[0]
        for cluster in clusters:
            whole = tuple(offer.instance_type.devices for offer in cluster.members)
            if not _trains(cluster, mode, whole):
                continue
            alone = len(whole) == 1 and whole[0] > 1 and not mode.of_several
            for total, steps, exact in variants:
                planned.append(
                    (_setup(workload, cluster, whole, total, steps, lines), exact, workload)
                )
                if alone:
                    share = total // whole[0]
                    setup = _setup(workload, cluster, (1,), share, steps, lines)
                    planned.append((setup, least <= share <= most, workload))
    possible = [(setup, exact, workload) for setup, exact, workload in planned if setup is not None]
    known = _expected([setup for setup, _, _ in possible], lines, expected_step)
    candidates: dict[Key, PlannedRun] = {}
    for setup, exact, workload in possible:
        key = setup_key(setup)
        step_s, width = known.get(key) or (_prior_step_s(setup, workload, costs), None)
        candidates.setdefault(
            key,
            replace(training_run(setup, step_s, costs), exact=exact, width=width),
        )
    return candidates


def training_run(setup: Setup, step_s: float, costs: Costs) -> PlannedRun:
    """A training run of `setup`, whose steps are expected to take `step_s`."""
    return PlannedRun(
        kind="train",
        workload=setup.workload,
        mode=setup.mode,
        members=tuple(offer.instance_type.name for offer in setup.cluster.members),
        batches=setup.batch_per_device,
        accumulation_steps=setup.accumulation_steps,
        global_batch=setup.global_batch,
        est_s=min(costs.run_s(step_s), costs.train_most_s) + costs.compiling_s(setup.mode),
        devices=_devices(setup),
    )


def _trains(cluster: Cluster, mode: Mode, layout: tuple[int, ...]) -> bool:
    able = mode.runs_on(
        *(np.array([one]) for one in (len(layout), min(layout), max(layout), sum(layout)))
    )
    return bool(able[0]) and all(
        computes(offer.instance_type.device, mode) for offer in cluster.members
    )


def profiled_lines(profiles: pd.DataFrame) -> Lines:
    """(a, k) of forward and backward seconds by (workload, mode of one device, instance type), where three batches or more are profiled."""
    lines: Lines = {}
    for key, rows in _by_mode(profiles):
        batch = rows["batch"].to_numpy(dtype=float)
        seconds = (rows["forward_s"] + rows["backward_s"]).to_numpy(dtype=float)
        if len(set(batch)) < _LEAST_PROFILED or not np.all(np.isfinite(seconds)):
            continue
        slope, intercept = np.polyfit(batch, seconds, 1, w=1 / np.maximum(seconds, 1e-9))
        if slope <= 0:
            continue
        lines[key] = (max(float(intercept), 0.0), float(slope))
    return lines


def _by_mode(profiles: pd.DataFrame) -> Iterator[tuple[tuple[str, Mode, str], pd.DataFrame]]:
    if not len(profiles):
        return
    keys = list(
        zip(
            profiles["workload"].astype(str),
            modes_of(profiles),
            profiles["instance_type"].astype(str),
            strict=True,
        )
    )
    for key in dict.fromkeys(keys):
        yield key, profiles[[one == key for one in keys]]


def _setup(
    workload: Workload,
    cluster: Cluster,
    layout: tuple[int, ...],
    total: int,
    steps: int,
    lines: Lines,
) -> Setup | None:
    types = [offer.instance_type for offer in cluster.members]
    if total < 1 or total % steps:
        return None
    mode = workload.modes[0]
    keys = [(workload.name, mode.alone, one.name) for one in types]
    if all(key in lines for key in keys):
        speeds = [lines[key] for key in keys]
    else:
        speeds = [(0.0, one.devices / one.cores) for one in types]
    shares = finish_together(speeds, total // steps, layout)
    if shares is None or (mode.of_equal_batches and len(set(shares)) > 1):
        return None
    return Setup(
        workload=workload.name,
        cluster=cluster,
        layout=layout,
        batch_per_device=shares,
        accumulation_steps=steps,
        **mode._asdict(),
    )


def _devices(setup: Setup) -> tuple[int, ...]:
    """The layout; empty where no machine has more than one device."""
    several = any(offer.instance_type.devices > 1 for offer in setup.cluster.members)
    return setup.layout if several else ()


def _expected(
    setups: Sequence[Setup], lines: Lines, expected_step: Expected | None
) -> dict[Key, tuple[float, float]]:
    """(step seconds, relative width) of the setups that can be predicted."""
    if expected_step is None:
        return {}
    can = [
        one
        for one in setups
        if all(
            (one.workload, one.mode.alone, offer.instance_type.name) in lines
            for offer in one.cluster.members
        )
    ]
    if not can:
        return {}
    rows = rows_of(expected_step(pd.DataFrame([one.row() for one in can])))
    known = {}
    for setup, row in zip(can, rows, strict=True):
        step_s = float(row["step_s"])
        if np.isfinite(step_s) and step_s > 0:
            known[setup_key(setup)] = (
                step_s,
                float(row["step_high_s"] - row["step_low_s"]) / step_s,
            )
    return known


def _prior_step_s(setup: Setup, workload: Workload, costs: Costs) -> float:
    """A guess before anything is measured: work spread over the cores, a ring over the slowest link (physics.md)."""
    types = [offer.instance_type for offer in setup.cluster.members]
    cores = sum(
        one.cores * used / one.devices for one, used in zip(types, setup.layout, strict=True)
    )
    compute_s = costs.core_step_s * setup.global_batch / workload.global_batch_least / cores
    gradient_bytes = float(workload.gradient_bytes or costs.gradient_bytes)
    slowest = min(one.bandwidth_gbps for one in types) * 1e9 / 8
    ring_s = 2 * (len(types) - 1) / len(types) * gradient_bytes / slowest
    return compute_s / 3 + max(
        compute_s * 2 / 3, ring_s
    )  # communication hides under the backward pass


@dataclass(slots=True)
class Schedule:
    """A launch being filled: seconds of each machine's own runs, and of those that need several."""

    names: tuple[str, ...]
    alone_s: list[float]
    together_s: float

    @classmethod
    def of(cls, cluster: Cluster) -> Schedule:
        """Nothing to do yet."""
        names = tuple(offer.instance_type.name for offer in cluster.members)
        return cls(names=names, alone_s=[0.0] * len(names), together_s=0.0)

    @property
    def seconds(self) -> float:
        """Of all runs; the start of the machines is not in it."""
        return max(self.alone_s) + self.together_s

    def extra_s(self, candidate: PlannedRun) -> float:
        """By how much `candidate` would lengthen the launch: nothing, where its machine would stand idle otherwise."""
        if len(candidate.members) > 1:
            return candidate.est_s
        return max(
            0.0,
            self.alone_s[self._idlest(candidate.members[0])] + candidate.est_s - max(self.alone_s),
        )

    def add(self, candidate: PlannedRun) -> tuple[int, ...] | None:
        """Take `candidate` in. Returns its machine where it needs just one: the idlest of its type."""
        if len(candidate.members) > 1:
            self.together_s += candidate.est_s
            return None
        node = self._idlest(candidate.members[0])
        self.alone_s[node] += candidate.est_s
        return (node,)

    def _idlest(self, name: str) -> int:
        return min(
            (node for node, other in enumerate(self.names) if other == name),
            key=self.alone_s.__getitem__,
        )


def in_order(
    cluster: Cluster, candidates: Sequence[PlannedRun]
) -> tuple[list[tuple[PlannedRun, tuple[int, ...]]], float]:
    """`candidates` with the nodes that serve each, those of one machine first; and the seconds of all of them."""
    schedule = Schedule.of(cluster)
    nodes = sub_clusters(cluster)
    ordered = sorted(candidates, key=lambda candidate: len(candidate.members) > 1)
    return [
        (candidate, schedule.add(candidate) or nodes[candidate.members]) for candidate in ordered
    ], schedule.seconds
