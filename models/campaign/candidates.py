"""Enumerate the runs that a campaign may buy, and estimate the seconds of each run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..domain.cluster import Cluster, InstanceType, cluster_name
from ..domain.setup_table import Key, modes_of, row_key, setup_key
from ..domain.workload import MODES, Mode, Setup, Workload, join_numbers
from ..job.compilation import prior_s
from ..planner.batch_split import Line, finish_together, global_batches
from ..planner.compression import runs_on
from ..planner.learning import LEARNING_MOST_S, LEARNING_STEPS
from ..step_time.machine_specs import computes
from .value_of_information import ChoiceSet, Joint

Trained = tuple[str, Mode]
Lines = dict[tuple[str, Mode, str], Line]

PROFILE_BATCHES = 4
MESSAGE_BYTES = (4 * 2**10, 64 * 2**10, 512 * 2**10, 2 * 2**20, 8 * 2**20)
_LEAST_PROFILED = 3  # batch sizes needed to fit seconds of one device as a line in the batch size


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The assumed durations of launches and runs, in seconds.

    A launch starts the machines of a cluster, and measures several runs on them. The defaults are
    for local hosts.
    """

    launch_s: float = 12.0  # start of a launch: machines, agents, torchrun, importing torch
    build_s: float = 0.5  # start of a run, before its first step
    steps: int = 15  # steps of a run: 1 trial, 2 warm-up, about 10 timed, 2 without communication
    train_most_s: float = 11.0  # the node ends a training run after about this time
    probe_s: float = 7.0  # a probe: a sweep of all-reduces
    core_step_s: float = 0.15  # a step with the minimum global batch on one core
    minimum_s: float = 0.0  # the minimum time billed for a launch; a minute on EC2

    def run_s(self, step_s: float) -> float:
        """Return the duration of a training run in seconds, if a step takes `step_s` seconds.

        The time to start the machines is not included.
        """
        return self.build_s + self.steps * step_s

    def billed_s(self, run_s: float) -> float:
        """Return the billed seconds of a launch whose runs take `run_s` seconds in total."""
        return max(self.minimum_s, self.launch_s + run_s)


# EC2 bills Linux machines by the second, but at least one minute. The start-up times are priors.
EC2_COSTS = Costs(launch_s=60.0, build_s=5.0, minimum_s=60.0)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that is planned but not yet measured.

    Attributes:
        kind: "train", "profile", "probe", "learn" or "elastic" (see tasks/node/record.py).
        members: the instance type of each machine of the run, in rank order.
        nodes: the indices of these machines among the machines of the launch.
        devices: the number of devices used on each machine; empty means one on each machine.
        batches: for a profile, the batch sizes to time. For all other kinds, the samples per device
            on each machine.
        message_bytes: the message sizes of a probe (a sweep of all-reduces).
        est_s: the estimated duration in seconds.
        reason: a text for the user that says why the run is planned.
        seed: the random seed of a "learn" run, which checks convergence.

    An "elastic" run stops a machine on purpose to measure the cost of its loss. It has further
    attributes:
        steps: the number of steps.
        checkpoint_every: the number of steps between two checkpoints.
        wait_s: seconds that the other machines wait for a replacement of the stopped machine.
        lose_after_s: seconds from the first step until the last machine is stopped; None means that
            no machine is stopped.
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
    est_s: float
    reason: str = ""
    seed: int = 0
    steps: int = 0
    checkpoint_every: int = 0
    wait_s: float = 2.0
    lose_after_s: float | None = None

    @property
    def trained(self) -> Trained:
        return self.workload, self.mode

    @property
    def cluster(self) -> str:
        return cluster_name(self.members)

    @cached_property
    def key(self) -> Key:
        """The key of the setup; see `domain.setup_table.setup_key`."""
        return row_key(self.row(), {})

    @cached_property
    def features(self) -> list[int]:
        return features_of(self.key)

    def row(self) -> dict[str, object]:
        """Return the columns of a measurement row that are known before the run.

        They are the kind of run and the setup. For a profile, the column `batch_per_device` lists
        all batch sizes to time.
        """
        profiled = ", ".join(map(str, self.batches))
        return {
            "kind": self.kind,
            "workload": self.workload,
            "cluster": self.cluster,
            "layout": join_numbers(self.devices or (1,)),
            "batch_per_device": profiled if self.kind == "profile" else join_numbers(self.batches),
            "accumulation_steps": self.accumulation_steps,
            **self.mode._asdict(),
        }


def features_of(key: Key) -> list[int]:
    """Return a hash of each of the four features that `run_value.py` defines.

    Hashes are faster dictionary keys than the features, which are nested tuples.
    """
    workload, mode, machines, steps = key
    cluster = tuple(name for name, _, _ in machines)
    batch = steps * sum(count * share for _, count, share in machines)
    # There are few clusters of equal machines, so they are counted separately from mixed clusters.
    mixture = len(cluster), len(set(cluster))
    return [
        hash(feature)
        for feature in (
            ("cluster", cluster),
            ("workload and cluster", workload, mode, cluster),
            ("workload and mixture", workload, mode, mixture),
            ("workload and batch", workload, mode, batch, steps),
        )
    ]


@lru_cache(maxsize=4096)  # 16 machines have 65,535 subsets
def sub_clusters(names: tuple[str, ...]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the subsets of a cluster's machines, as {instance types: positions in `names`}.

    `names` has the instance type of each machine. Of several subsets with the same instance types
    in the same order, only the first is returned. For example, `("a", "a")` gives
    `{("a",): (0,), ("a", "a"): (0, 1)}`.
    """
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    for size in range(1, len(names) + 1):
        for nodes in combinations(range(len(names)), size):
            found.setdefault(tuple(names[node] for node in nodes), nodes)
    return found


class Model(NamedTuple):
    """The parts of the step-time model in use that are needed to plan a campaign.

    Attributes:
        choice_set: {workload: the setups that may be the best choice for one of its goals}.
        joint: a function that returns the joint distribution of the log step times of setups.
        workloads: the (workload, mode) pairs that the model was trained on.
        types: the instance types that the model can predict.
        fresh: rows of measured runs that the model was not trained on, with a column `step_s`.
        predict: a function that returns the predicted step times of setups, in a column `step_s`.
    """

    choice_set: Mapping[str, ChoiceSet]
    joint: Joint
    workloads: frozenset[Trained]
    types: frozenset[str]
    fresh: pd.DataFrame
    predict: Callable[[pd.DataFrame], pd.DataFrame]

    def knows(self, trained: Trained, members: Sequence[str]) -> bool:
        """Return True if the model can predict a workload in a mode on all given instance types.

        trained: the pair (workload, mode).
        members: the names of the instance types.
        """
        return trained in self.workloads and self.types.issuperset(members)


def profile_of(
    workload: Workload, mode: Mode, instance_type: InstanceType, costs: Costs
) -> PlannedRun:
    """Return a run that profiles the workload on one device of `instance_type`.

    The run uses `mode.alone`, the equivalent of `mode` on one device. It times up to four batch
    sizes, from an eighth of the workload's minimum global batch to its maximum global batch.
    """
    least = max(1, workload.global_batch_least // 8)
    sizes = np.geomspace(least, workload.global_batch_most, PROFILE_BATCHES)
    step_s = costs.core_step_s * sizes / workload.global_batch_least / instance_type.cores
    # node/profiler.py uses the same durations.
    steps_s = np.maximum(1.0, 4 * step_s).sum() + max(1.0, 5 * step_s[len(sizes) // 2])
    return PlannedRun(
        kind="profile",
        workload=workload.name,
        mode=mode.alone,
        members=(instance_type.name,),
        batches=tuple(sorted({round(size) for size in sizes})),
        est_s=costs.build_s + float(steps_s) + PROFILE_BATCHES * prior_s(mode.alone),
    )


def learning_runs(
    workload: Workload, mode: Mode, seeds: Iterable[int], pair: Cluster, costs: Costs
) -> list[PlannedRun]:
    """Return runs that compare the convergence of `mode` with the convergence of DDP.

    For each seed, there is a run in `mode` and a run in the corresponding DDP mode (`mode.dense`).
    Each run uses both machines of `pair`, which are equal. The list is empty in two cases:

    - `pair` cannot train in `mode`.
    - The minimum global batch has fewer samples than `pair` has devices.
    """
    kind = pair.members[0].instance_type
    share = workload.global_batch_least // (2 * kind.devices)
    if share < 1 or not _trains([kind, kind], mode):
        return []
    train_s = min(LEARNING_STEPS * costs.core_step_s / kind.cores, LEARNING_MOST_S)
    return [
        PlannedRun(
            kind="learn",
            workload=workload.name,
            mode=shown,
            members=pair.type_names,
            devices=(kind.devices, kind.devices),
            batches=(share, share),
            est_s=costs.build_s + train_s + prior_s(shown),
            reason=f"checks if other strategies converge like {mode.dense.strategy}",
            seed=seed,
        )
        for shown in (mode.dense, mode)
        for seed in seeds
    ]


def training_runs(
    workloads: Sequence[Workload],
    clusters: Sequence[Cluster],
    profiles: pd.DataFrame,
    *,
    model: Model | None = None,
    costs: Costs,
) -> list[PlannedRun]:
    """Return the training runs of every workload on every cluster.

    Each workload is measured in all its modes that the cluster supports, with these global batches:

    - the workload's minimum global batch, its doublings, and the maximum global batch
    - half the minimum
    - the minimum in two accumulation steps

    A single machine with several devices also gets runs on only one device, if the mode permits
    this. These runs show how much devices slow each other down. Unequal machines share the batch so
    that they finish together.

    profiles: measured seconds of single devices, which determine the speeds of machines. If any
        machine of a cluster has no profile, the numbers of cores determine the speeds instead.
    model: predicts step times, from which the durations of the runs are estimated.
    costs: assumed durations, such as the seconds to start a launch.
    """
    lines = profiled_lines(profiles)
    found = {
        setup_key(setup): (setup, _prior_step_s(setup, workload, costs))
        for workload in workloads
        for mode, cluster in product(workload.modes, clusters)
        for setup in _setups(workload, mode, cluster, lines)
    }
    setups = [setup for setup, _ in found.values()]
    step_s = np.array([prior for _, prior in found.values()])
    if model is not None:
        known = [
            model.knows((setup.workload, setup.mode), setup.cluster.type_names) for setup in setups
        ]
        if any(known):
            rows = pd.DataFrame([setup.row() for setup in setups])
            step_s[known] = model.predict(rows[known])["step_s"]
    return [training_run(*pair, costs) for pair in zip(setups, step_s.tolist(), strict=True)]


def training_run(setup: Setup, step_s: float, costs: Costs) -> PlannedRun:
    """Return a run that measures `setup`, whose expected step time is `step_s` seconds."""
    return PlannedRun(
        kind="train",
        workload=setup.workload,
        mode=setup.mode,
        members=setup.cluster.type_names,
        devices=setup.layout,
        batches=setup.batch_per_device,
        accumulation_steps=setup.accumulation_steps,
        est_s=min(costs.run_s(step_s), costs.train_most_s) + prior_s(setup.mode),
    )


def _trains(types: Sequence[InstanceType], mode: Mode) -> bool:
    """Return True if a cluster can train in `mode`.

    The result depends on the kind and the number of devices of each machine.

    types: the instance type of each machine of the cluster.
    """
    computing = all(computes(instance_type.device, mode) for instance_type in types)
    return computing and runs_on([instance_type.devices for instance_type in types], mode)


def profiled_lines(profiles: pd.DataFrame) -> Lines:
    """Return {(workload, mode, instance type): (a, k)}, fitted to profiles.

    The line (a, k) means that a device needs a + k b seconds for the forward and backward pass of b
    samples. A combination of workload, mode and instance type is left out in two cases: fewer than
    three batch sizes were profiled, or the fitted k is not above 0.
    """
    if not len(profiles):
        return {}
    timed = profiles.assign(
        mode=pd.Series(modes_of(profiles), profiles.index),
        seconds=profiles["forward_s"] + profiles["backward_s"],
    ).dropna(subset="seconds")
    lines: dict[Any, Line] = {}
    for key, rows in timed.groupby(["workload", "mode", "instance_type"]):
        if rows["batch"].nunique() >= _LEAST_PROFILED:
            seconds = rows["seconds"].to_numpy(float)
            slope, intercept = np.polyfit(rows["batch"], seconds, 1, w=1 / seconds)
            if slope > 1e-12:  # equal seconds give a slope of rounding error
                lines[key] = (max(intercept, 0.0), slope)
    return lines


def _setups(workload: Workload, mode: Mode, cluster: Cluster, lines: Lines) -> Iterator[Setup]:
    """Yield the setups in which `training_runs` measures a workload in one mode on one cluster.

    lines: the result of `profiled_lines`, which determines the speeds of machines.
    """
    types = [offer.instance_type for offer in cluster.members]
    whole = tuple(instance_type.devices for instance_type in types)
    if not _trains(types, mode):
        return
    totals = list(global_batches(workload.global_batch_least, workload.global_batch_most))
    sizes = [*((total, 1) for total in totals), (totals[0] // 2, 1), (totals[0], 2)]
    layouts = [whole]
    if len(whole) == 1 and whole[0] > 1 and not mode.of_several:
        layouts.append((1,))
    keys = [(workload.name, mode.alone, instance_type.name) for instance_type in types]
    speeds = [(0.0, instance_type.devices / instance_type.cores) for instance_type in types]
    if lines.keys() >= set(keys):
        speeds = [lines[key] for key in keys]
    for (total, steps), layout in product(sizes, layouts):
        samples = total * sum(layout) // sum(whole)
        if samples < 1 or samples % steps:
            continue
        shares = finish_together(speeds, samples // steps, layout)
        if shares is None or (mode.of_equal_batches and len(set(shares)) > 1):
            continue
        yield Setup(
            workload=workload.name,
            mode=mode,
            cluster=cluster,
            layout=layout,
            batch_per_device=shares,
            accumulation_steps=steps,
        )


def _prior_step_s(setup: Setup, workload: Workload, costs: Costs) -> float:
    """Return a rough estimate of the seconds per step, for setups that no model can predict.

    Computation and communication overlap, so the longer of the two is the estimate. All cores share
    the computation equally. The communication is a ring all-reduce of the gradients over the
    slowest network link.
    """
    types = [offer.instance_type for offer in setup.cluster.members]
    used = zip(types, setup.layout, strict=True)
    cores = sum(
        instance_type.cores * count / instance_type.devices for instance_type, count in used
    )
    compute_s = costs.core_step_s * setup.global_batch / workload.global_batch_least / cores
    gbps = min(instance_type.bandwidth_gbps for instance_type in types)
    ring_s = 2 * (1 - 1 / len(types)) * 8e-9 * (workload.gradient_bytes or 0) / gbps
    return max(compute_s, ring_s)


class Schedule:
    """The time that the runs of a launch take on each machine of its cluster.

    Runs on a single machine take place first, in parallel on different machines. Then each run on
    several machines takes place alone.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.names = cluster.type_names
        self.alone_s = [0.0] * len(self.names)
        self.together_s = 0.0

    @property
    def seconds(self) -> float:
        """The seconds from the start of the first run to the end of the last run."""
        return max(self.alone_s) + self.together_s

    def seconds_with(self, run: PlannedRun) -> float:
        """Return the value that `seconds` would have after `add(run)`."""
        if len(run.members) > 1:
            return self.seconds + run.est_s
        return max(self.seconds, self.alone_s[self._idlest(run)] + run.est_s + self.together_s)

    def add(self, run: PlannedRun) -> tuple[int, ...]:
        """Add `run` to the schedule and return the indices of the machines that it uses."""
        if len(run.members) > 1:
            self.together_s += run.est_s
            return sub_clusters(self.names)[run.members]
        node = self._idlest(run)
        self.alone_s[node] += run.est_s
        return (node,)

    def _idlest(self, run: PlannedRun) -> int:
        """Return the index of the least busy machine that has the instance type of `run`."""
        nodes = (node for node, name in enumerate(self.names) if name == run.members[0])
        return min(nodes, key=self.alone_s.__getitem__)
