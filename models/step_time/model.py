"""Predict step seconds with 90 % intervals and joint draws, for one provider.

The same data and the same seed give the same model.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import pandas as pd

from ..domain.cluster import InstanceType
from ..domain.numeric import FloatArray
from ..domain.setup_table import column, require_known, types_of
from ..domain.workload import MODE_COLUMNS, MODES, Mode, Workload
from .dataset import (
    TrainingData,
    at_nominal_speed,
    definition_digests,
    facts_of,
    pool_runs,
    profile_rows,
    single_device_rows,
    single_provider,
    valid_runs,
    workload_facts,
)
from .field_terms import field_terms
from .input import Loaders, separate_loading
from .machine_specs import Machine, device_kind, read_machines, sheet_of
from .memory import MemoryModel, fit_memory
from .nearest import doublings
from .posterior import Beliefs, Posterior, interval
from .rows import PROBE, Cell, SetupFacts, WorkloadFacts, code_of
from .setup_arrays import SetupArrays, read_setups

__all__ = ["StepTimeModel", "TrainingData", "fit"]

# Communication, stragglers or data loading can be the bottleneck if they take more than this
# fraction of the step.
_LIMITED = 0.2
# Maximum number of setups in a chunk of `predict`, and in a chunk of `formula_seconds`.
_CHUNK, _WIDE_CHUNK = 2500, 200_000


def bottlenecks(
    exposed: FloatArray,
    uneven: FloatArray,
    *,
    loading: FloatArray,
    machines: FloatArray,
) -> np.ndarray[tuple[int, ...], np.dtype[np.str_]]:
    """Return the bottleneck of each setup, as a (rows,) array of labels.

    A label is "compute", "stragglers", "input", "communication inside a node" or "communication
    between nodes".

    Args:
        exposed: (rows,) fraction of the step spent on communication while nothing is computed.
        uneven: (rows,) fraction of the step that an average rank waits for the slowest rank.
        loading: (rows,) fraction of the step spent waiting for the data loader.
        machines: (rows,) number of machines.
    """
    across = np.where(machines > 1, "communication between nodes", "communication inside a node")
    limits = [
        (loading > _LIMITED) & (loading >= exposed),
        (exposed > _LIMITED) & (exposed >= uneven),
        uneven > _LIMITED,
    ]
    return np.select(limits, ["input", across, "stragglers"], "compute")


@dataclass(frozen=True, kw_only=True)
class StepTimeModel:
    """Predicts step seconds, intervals, joint draws and peak memory for one provider.

    A mode is a combination of precision, strategy and switches. A setup is a workload in a mode on
    a cluster, with the batch of each device.

    Attributes:
        trained: the (workload, mode) pairs that can be predicted: measured pairs, and pairs that
            `introduce_all` or `with_compressed` added.
        guessed: workloads that are predicted from facts such as FLOPs, without measurements.
        measured: the measured setups.
        measured_types: the instance types with a measured run or profile.
        run_sd: {code of a kind of device (`rows.code_of`): standard deviation of log seconds
            between runs of the same setup at different times}. The key 0 is for unmeasured kinds.
        trained_on: ids of the runs to which the model was fitted.
        workload_digests, type_digests: {name of a workload or instance type: digest of its
            definition at the time of the fit}.
    """

    provider: str
    facts: SetupFacts
    posterior: Posterior
    measured: SetupArrays
    run_sd: dict[float, float]
    trained: frozenset[tuple[str, Mode]]
    measured_types: frozenset[str]
    memory: MemoryModel
    loaders: Loaders
    guessed: frozenset[str]
    trained_on: tuple[str, ...]
    workload_digests: dict[str, str]
    type_digests: dict[str, str]

    @property
    def machines(self) -> dict[str, Machine]:
        return self.facts.machines

    @property
    def workloads(self) -> tuple[str, ...]:
        return tuple(sorted({workload for workload, _ in self.trained}))

    @property
    def instance_types(self) -> tuple[str, ...]:
        return tuple(sorted(self.machines))

    def can_guess(self, instance_type: str) -> bool:
        """Return True if workloads without measurements can be predicted on the instance type.

        The type must have an accelerator with a known peak rate (TFLOP/s).
        """
        machine = self.machines[instance_type]
        sheet = sheet_of(device_kind(instance_type, machine), "fp32", self.machines)
        return machine.has_accelerator and sheet.confidence > 0

    def modes_of(self, workload: str) -> tuple[Mode, ...]:
        """Return the modes in which `workload` can be predicted."""
        return tuple(mode for mode in MODES if (workload, mode) in self.trained)

    def met_workload(self, workload: Workload) -> bool:
        """Return True if the model can predict the workload.

        At least one of its modes must be predictable, and its definition must not have changed
        since the fit.
        """
        modes = self.as_measured(workload).modes
        return bool(modes) and self.workload_digests.get(workload.name) == workload.digest

    def as_measured(self, workload: Workload) -> Workload:
        """Return the workload with only the modes in which it can be predicted."""
        known = (mode for mode in workload.modes if (workload.name, mode) in self.trained)
        return replace(workload, modes=tuple(known))

    def met_type(self, instance_type: InstanceType) -> bool:
        """Return True if the model can predict step times on the instance type.

        The definition of the type must not have changed since the fit.
        """
        name = instance_type.name
        return name in self.machines and self.type_digests.get(name) == instance_type.digest

    def predict(self, setups: pd.DataFrame) -> pd.DataFrame:
        """Predict the step seconds of setups.

        Args:
            setups: a frame with the columns of a file of measurements (docs/data-files.md). The
                columns workload, cluster and batch_per_device are required.

        Returns:
            A frame with the index of `setups` and these columns:

            - step_s: predicted seconds of a step
            - step_low_s, step_high_s: the 90 % interval of a new measurement
            - samples_per_s: predicted samples per second
            - compute_s: compute seconds of the slowest rank
            - communication_s: seconds of all collectives
            - exposed_communication_s: seconds of collectives during which nothing is computed
            - bottleneck: a label of `bottlenecks`
            - input_s: seconds that waiting for batches adds to the step
            - input_by: what would shorten the wait: more "loader workers" or "processors" (CPU
              cores). The text is empty if the step does not wait.
            - nearest_doublings: distance to the nearest measured setup, in factors of two
              (nearest.py); NaN if the workload has no runs in this mode

        Raises:
            ValueError: if a workload, instance type or mode is unknown, if a setup belongs to
                another provider, or if a value of a column cannot be parsed.
        """
        return self.predict_arrays(self.read(setups)).set_index(setups.index)

    def predict_arrays(self, arrays: SetupArrays) -> pd.DataFrame:
        """Return the same frame as `predict` for setups given as arrays. The index starts at 0."""
        chunks = [self._predict(chunk) for chunk in arrays.chunks(_CHUNK)]
        found = pd.concat(chunks, ignore_index=True)
        return found.assign(nearest_doublings=doublings(self.measured, arrays))

    def _predict(self, arrays: SetupArrays) -> pd.DataFrame:
        mean, variance, noise, times = self._beliefs(arrays)
        rest, compute_share = np.exp(mean), times.compute_share
        wait = self.loaders.wait(arrays, self.machines)
        step = wait.step_s(rest, compute_share)
        by_rest, by_load = wait.slopes(rest, compute_share)
        variance = (variance + noise) * by_rest**2 + (by_load * wait.log_sd) ** 2
        low, high = interval(step, variance)
        share = rest / step
        uneven = (times.compute_s - times.mean_compute_s) / times.step_s * share
        exposed, loading = (1 - compute_share) * share, 1 - share
        labels = bottlenecks(exposed, uneven, loading=loading, machines=arrays.instances)
        return pd.DataFrame(
            {
                "step_s": step,
                "step_low_s": low,
                "step_high_s": high,
                "samples_per_s": arrays.samples / step,
                "compute_s": compute_share * rest,
                "communication_s": times.communication_s / times.step_s * rest,
                "exposed_communication_s": (1 - compute_share) * rest,
                "bottleneck": labels,
                "input_s": step - rest,
                "input_by": wait.helped_by(rest, compute_share),
            }
        )

    def field_terms(self, setups: pd.DataFrame, step_s: FloatArray) -> pd.DataFrame:
        """Return tokens per second, FLOPs utilisation and memory of setups (see field_terms.py).

        `step_s` is a (rows,) array of step seconds.

        Raises:
            ValueError: in the same cases as `predict`.
        """
        found = field_terms(self.read(setups), step_s, self.facts, self.memory)
        return found.set_index(setups.index)

    def formula_seconds(self, arrays: SetupArrays) -> FloatArray:
        """Return a (rows,) array: step seconds from the learned formula alone.

        This method is faster than `predict_arrays`, but less accurate near measured setups.
        """
        found = []
        for chunk in arrays.chunks(_WIDE_CHUNK):
            times = self.posterior.times(self.facts.lay_out(chunk))
            wait = self.loaders.wait(chunk, self.machines)
            found.append(wait.step_s(times.step_s, times.compute_share))
        return np.concatenate(found)

    def joint(self, setups: pd.DataFrame) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the joint normal distribution of log step seconds as three arrays.

        1. (setups,) mean
        2. (setups, setups) covariance without the noise between runs
        3. (setups,) variance of the noise between runs

        Raises:
            ValueError: in the same cases as `predict`.
        """
        return self._joint(self.read(setups))

    def _joint(self, arrays: SetupArrays) -> tuple[FloatArray, FloatArray, FloatArray]:
        mean, covariance, noise, times = self._beliefs(arrays, covariance=True)
        wait = self.loaders.wait(arrays, self.machines)
        return wait.joint(mean, covariance, noise, times.compute_share)

    def draw_arrays(self, arrays: SetupArrays, *, count: int, seed: int) -> FloatArray:
        """Return a (rows, count) array: random draws of the step seconds of new runs.

        A column is one joint draw for all setups. Draws are antithetic: columns come in pairs whose
        logs are symmetric about the mean log.
        """
        mean, covariance, noise = self._joint(arrays)
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        random, half = np.random.default_rng(seed), (count + 1) // 2
        off = root @ random.standard_normal((len(mean), half))
        off += np.sqrt(noise)[:, None] * random.standard_normal((len(mean), half))
        paired = np.stack([off, -off], axis=2).reshape(len(mean), -1)[:, :count]
        draws: FloatArray = np.exp(mean[:, None] + paired)
        return draws

    def compute_lines(self, workload: str, types: Sequence[str], mode: Mode) -> FloatArray:
        """Fit a line to the predicted forward and backward seconds of one device of each type.

        Returns a (types, 2) array of pairs (a, k). Both passes together take about a + k * batch
        seconds.
        """
        least, _, most = self.facts.octaves.get((workload, mode.alone), np.zeros(3))
        batches = 2.0 ** np.linspace(least, max(most, least + 1), 8)
        kinds, which = np.unique(self.facts.kinds(types), return_inverse=True)
        cells = [(workload, mode.alone, kind) for kind in kinds.tolist()]
        cell, batch = np.indices((len(cells), len(batches))).reshape(2, -1)
        points = self.facts.points(cells, cell, batches[batch])
        seconds = np.exp(self.posterior.log_single_device_s(points)).reshape(len(kinds), -1)
        fits = [np.polyfit(batches, each, 1, w=1 / each) for each in seconds]
        slope, intercept = np.transpose(fits)
        slope = np.maximum(slope, 0.05 * (seconds / batches).min(axis=1))
        return np.column_stack([np.maximum(intercept, 0.0), slope])[which]

    def _beliefs(self, arrays: SetupArrays, *, covariance: bool = False) -> Beliefs:
        rows = self.facts.lay_out(arrays)
        found = self.posterior.beliefs(rows, covariance=covariance)
        run_sd = np.array([self.run_sd.get(kind, self.run_sd[0.0]) for kind in rows.kind.tolist()])
        return found._replace(noise=np.maximum(found.noise, run_sd**2))

    def read(self, setups: pd.DataFrame) -> SetupArrays:
        """Convert a frame of setups to arrays.

        Raises:
            ValueError: in the same cases as `predict`.
        """
        providers = set(column(setups, "provider", "")) - {""}
        require_known(providers, [self.provider], "provider")
        arrays = read_setups(setups, {name: each.devices for name, each in self.machines.items()})
        require_known(arrays.workloads, self.workloads, "workload")
        require_known(arrays.names, self.instance_types, "instance type")
        for workload, mode, _ in arrays.groups():
            if (workload, mode) not in self.trained:
                known = ", ".join(map(str, self.modes_of(workload)))
                raise ValueError(
                    f"workload {workload!r} cannot be predicted in {mode}; it can be predicted in:"
                    f" {known}"
                )
            if workload in self.guessed and not all(map(self.can_guess, arrays.names)):
                raise ValueError(
                    f"workload {workload!r} was never measured, so its step times can be predicted"
                    " only on GPUs with known peak TFLOP/s"
                )
        return arrays


def fit(data: TrainingData, *, seed: int) -> StepTimeModel:
    """Fit a model to the measurements of one provider. Runs without a valid step time are ignored.

    Raises:
        ValueError: if the data has no profile and no valid run, or if it has measurements of
            several providers.
    """
    provider = single_provider(data)
    data = at_nominal_speed(data)
    data, probes = replace(data, runs=valid_runs(data.runs)), _probes(data.probes)
    clusters = {*column(data.runs, "cluster", ""), *probes["cluster"]}
    seen = {str(name) for name in data.profiles.get("instance_type", ())}
    seen |= {name for cluster in clusters for name in types_of(str(cluster))}
    machines = read_machines(data.instance_types, seen)
    data, loaders = separate_loading(data, machines)
    runs, profiles = data.runs, profile_rows(data.profiles, machines)
    setups = pool_runs(runs, machines)
    if not len(setups) + len(profiles):
        raise ValueError(
            "the model cannot be fitted: there is no profile, and no run has a positive step time"
        )
    alone = single_device_rows(setups, profiles)
    parts = [setups.assign(noise_sd=0.0, source="run"), alone, probes]
    frame = pd.concat(parts, ignore_index=True)
    source = frame["source"].to_numpy(str)
    arrays = read_setups(frame, {})

    def of(*sources: str) -> SetupArrays:
        return arrays.take(np.flatnonzero(np.isin(source, sources)))

    facts = _facts(data, machines, of("run", "profile", "several"), profiles)
    rows = facts.lay_out(arrays)
    rows.optimizer[source != "run"] = 0.0
    rows.noise_sd[:] = frame["noise_sd"]
    probe, size = source == "probe", probes["bytes"].to_numpy(float)
    rows.point[probe] = rows.middle[probe] = -1
    rows.gradient_bytes[probe], rows.features[probe, 0] = size, np.log2(size)
    from .regressor import StepTimeRegressor  # its import takes 0.7 s; predictions do not need it

    regressor = StepTimeRegressor(random_state=seed).fit(
        rows, frame["step_s"].to_numpy(float), frame["runs"].to_numpy(float)
    )
    measured = of("run")
    speed_sd = float(runs["speed_sd"].iloc[0]) if "speed_sd" in runs and len(runs) else 0.0
    run_sd = setups.groupby("kind")["run_sd"].first().map(partial(np.hypot, speed_sd))
    usual_sd = float(np.sqrt((run_sd**2).mean())) if len(run_sd) else speed_sd
    return StepTimeModel(
        provider=provider,
        facts=facts,
        posterior=regressor.posterior_,
        measured=measured,
        run_sd={0.0: usual_sd} | {code_of("kind", kind): float(sd) for kind, sd in run_sd.items()},
        trained=frozenset((workload, mode) for workload, mode, _ in of("run", "profile").groups()),
        measured_types=frozenset({*measured.type_names, *profiles["instance_type"]}),
        memory=fit_memory(data.profiles, measured, machines, facts.workloads),
        loaders=loaders,
        guessed=frozenset(),
        trained_on=tuple(str(name) for name in column(runs, "run_id", "") if str(name)),
        workload_digests=definition_digests(data.workloads, "workload"),
        type_digests=definition_digests(data.instance_types, "name"),
    )


def _facts(
    data: TrainingData,
    machines: dict[str, Machine],
    arrays: SetupArrays,
    profiles: pd.DataFrame,
) -> SetupFacts:
    """Collect the facts that are needed to convert setups to inputs of the regression.

    arrays: the setups of all runs and profiles.
    profiles: a row for each workload, mode, instance type and batch (`dataset.profile_rows`).
    """
    batches: defaultdict[tuple[str, Mode], set[float]] = defaultdict(set)
    for workload, mode, rows in arrays.groups():
        batches[workload, mode.alone].update(arrays.batch[rows, 0].tolist())
    optimizer: dict[Cell, float] = {}
    for key, rows_ in profiles.groupby(["workload", *MODE_COLUMNS, "kind"]):
        cell = str(key[0]), Mode(*map(str, key[1:-1])), str(key[-1])
        middle = rows_.sort_values("batch").iloc[len(rows_) // 2]
        optimizer[cell] = float(rows_["optimizer_s"].median() / middle["step_s"])
    return SetupFacts(
        machines=machines,
        workloads=workload_facts(data),
        octaves={
            key: np.quantile(np.log2([*sizes]), (0, 0.5, 1)) for key, sizes in batches.items()
        },
        optimizer_part=optimizer,
    )


def _probes(probes: pd.DataFrame) -> pd.DataFrame:
    """Pool measured all-reduces between machines: a row for each cluster and message size.

    The column `step_s` has the median seconds. The rows have the columns of a setup, with the
    placeholder PROBE as workload.
    """
    frame = probes.reindex(columns=["cluster", "bytes", "seconds"])
    rows = frame.groupby(["cluster", "bytes"], as_index=False).median()
    return rows.rename(columns={"seconds": "step_s"}).assign(
        workload=PROBE, batch_per_device="1", runs=1.0, noise_sd=0.0, source="probe"
    )


def introduce(model: StepTimeModel, workload: Workload) -> StepTimeModel | None:
    """Return a model that also predicts the unmeasured `workload` (see `introduce_all`).

    Returns None if the workload's FLOPs are unknown, or if the model has measurements of a workload
    with the same name.
    """
    frame = pd.DataFrame([asdict(workload) | {"workload": workload.name}])
    found = introduce_all(model, facts_of(frame))
    return found if workload.name in found.guessed else None


def introduce_all(model: StepTimeModel, facts: Mapping[str, WorkloadFacts]) -> StepTimeModel:
    """Return a model that also predicts workloads without measurements, from their FLOPs.

    Such a workload can be predicted only on accelerators with a known peak rate
    (`StepTimeModel.can_guess`).

    facts: {workload: its facts}. Workloads with unknown FLOPs are left out.
    """
    new = {
        name: known
        for name, known in facts.items()
        if known.flops > 0 and name not in model.workloads
    }
    workloads = model.facts.workloads | new
    return replace(
        model,
        facts=replace(model.facts, workloads=workloads),
        memory=replace(model.memory, workloads=workloads),
        guessed=model.guessed | set(new),
        trained=model.trained | set(product(new, MODES)),
    )


def with_compressed(model: StepTimeModel, workload: Workload) -> StepTimeModel:
    """Return a model that also predicts `workload` in modes without measurements.

    The candidates are the workload's modes with compressed gradients, Adasum, tensor parallelism or
    parameter servers. The model must already predict the workload in some mode with the same
    precision and the same switches. Offload may differ. For tensor parallelism, the layer sizes
    must also be known.
    """
    alone = {(name, mode.alone) for name, mode in model.trained}
    divided = model.facts.of(workload.name).divided.known
    new = {
        (workload.name, mode)
        for mode in workload.modes
        if mode.sends_otherwise
        and (workload.name, mode.alone) in alone
        and (divided or not mode.divided)
    }
    return replace(model, trained=model.trained | new)
