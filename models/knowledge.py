"""The value of a run given all that is known: what past runs and the launches already chosen tell."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache

import pandas as pd

from .appraisal import Appraisal
from .cloud import parse_cluster
from .identity import Key, row_key, rows_of
from .moments import after, older
from .wants import Want
from .workload import Workload

_STEADY = 0.1  # interquartile range over median of the steps, below which one run says what there is to say
_ENOUGH_FAILURES = 2
_ENOUGH_RUNS = 3  # of an unsteady setup: more would repeat the noise
_RARELY_NAMED = 0.7  # worth of a run off the global batch or with accumulation, which recommendations seldom name
_KNOWN_WIDTH = 0.1  # relative width of an interval at which a run is worth its plain value
_DRIFTED = 4.0  # worth of a run on a drifting machine, whose predictions are wrong however narrow
_WEIGHTS = {
    "cluster": 0.75,
    "workload and cluster": 1.0,
    "workload and mixture": 1.5,  # how many machines of how many types: uniform clusters are few among the mixed
    "workload and batch": 1.0,
    "workload and machine": 1.0,  # shared among a cluster's types, so that more types are not worth more
}
_PROBED_SIZES = 4  # message sizes that make a sweep
_REGRET_WORTH = 100.0  # a run that saves 1 % of regret is worth as much as one new feature: pilots of a new workload,
# of which some ten bring its regret of tens of per cent down, then compete with what betters known choices


@dataclass(slots=True, kw_only=True)
class Knowledge:
    """What past runs and the launches already chosen tell: how often each feature was seen, and what is settled."""

    settled: set[Key]
    profiled: set[tuple[str, str]]
    probed: set[tuple[str, ...]]
    workloads: tuple[str, ...]
    seen: Counter[tuple[str, ...]] = field(default_factory=Counter)
    seed: int = 0
    drifting: Mapping[str, datetime] = field(default_factory=dict)
    appraisal: Appraisal | None = None

    @classmethod
    def of(
        cls,
        workloads: Sequence[Workload],
        runs: pd.DataFrame,
        profiles: pd.DataFrame,
        probes: pd.DataFrame,
        *,
        devices: Mapping[str, int],
        stale_before: datetime | None,
        seed: int,
        drifting: Mapping[str, datetime],
    ) -> Knowledge:
        """What the marts hold. Runs that are unsteady, or older than `stale_before`, may be repeated.

        Runs on a `drifting` instance type up to the time given for it are as if they had not been.
        """
        seen: Counter[tuple[str, ...]] = Counter()
        settled: set[Key] = set()
        times: Counter[Key] = Counter()
        for row in rows_of(runs):
            key = row_key(row, devices)
            workload, machines, steps, *_ = key
            if any(name in drifting and not after(row.get("measured_at"), drifting[name]) for name, _, _ in machines):
                continue
            times[key] += 1
            batch = steps * sum(count * share for _, count, share in machines)
            seen.update(_features(workload, tuple(name for name, _, _ in machines), batch, steps))
            unsteady = float(row.get("step_spread") or 0.0) > _STEADY  # NaN: unknown, taken for steady
            stale = stale_before is not None and older(row.get("measured_at"), stale_before)
            if not stale and (not unsteady or times[key] >= _ENOUGH_RUNS):
                settled.add(key)
        sweeps = probes.groupby("cluster")["bytes"].nunique() if len(probes) else pd.Series(dtype=int)
        return cls(
            settled=settled,
            profiled={(str(row["workload"]), str(row["instance_type"])) for row in rows_of(profiles)},
            probed={parse_cluster(str(name)) for name, sizes in sweeps.items() if sizes >= _PROBED_SIZES},
            workloads=tuple(workload.name for workload in workloads),
            seen=seen,
            seed=seed,
            drifting=drifting,
        )

    def give_up(self, failures: pd.DataFrame, devices: Mapping[str, int]) -> None:
        """Settle what has failed `_ENOUGH_FAILURES` times: it would again, and its time is another run's."""
        runs: Counter[Key] = Counter()
        profiles: Counter[tuple[str, str]] = Counter()
        probes: Counter[tuple[str, ...]] = Counter()
        for row in rows_of(failures):
            if row["kind"] == "train":
                runs[row_key(row, devices)] += 1
            elif row["kind"] == "profile":
                profiles[str(row["workload"]), parse_cluster(str(row["cluster"]))[0]] += 1
            elif row["kind"] == "probe":
                probes[parse_cluster(str(row["cluster"]))] += 1
        self.settled |= {key for key, times in runs.items() if times >= _ENOUGH_FAILURES}
        self.profiled |= {pair for pair, times in profiles.items() if times >= _ENOUGH_FAILURES}
        self.probed |= {members for members, times in probes.items() if times >= _ENOUGH_FAILURES}

    def unprofiled(self, instance_types: set[str]) -> list[tuple[str, str]]:
        """(workload, instance type) without a profile, in an order in which each step brings another of both."""
        names = sorted(instance_types)
        pairs = [(w, t) for w in range(len(self.workloads)) for t in range(len(names))]
        pairs.sort(key=lambda pair: ((pair[0] - pair[1]) % len(self.workloads), pair[1]))
        return [(self.workloads[w], names[t]) for w, t in pairs if (self.workloads[w], names[t]) not in self.profiled]

    def explores(self, members: tuple[str, ...]) -> bool:
        """Is there a model yet, and does it know these instance types? Else collectives are timed on them."""
        return self.appraisal is None or not self.appraisal.covers(members)

    def value(self, want: Want) -> float:
        """Worth of a training run beside all that is known: by the choices it may change, where the model knows it.

        Else by how new its features are, at most the sum of the weights times its uncertainty.
        """
        if self.appraisal is not None and self.appraisal.judges(want):
            return _REGRET_WORTH * self.appraisal.value(want)
        features = _features(want.workload, want.members, want.global_batch, want.accumulation_steps)
        types = len(set(want.members))
        shared = {"workload and machine": 1 / types}
        worth = sum(_WEIGHTS[one[0]] * shared.get(one[0], 1.0) / (1 + self.seen[one]) for one in features)
        if not want.exact or want.accumulation_steps > 1:
            worth *= _RARELY_NAMED
        if not self.drifting.keys().isdisjoint(want.members):
            worth *= _DRIFTED
        elif want.width is not None:
            worth *= min(max(want.width / _KNOWN_WIDTH, 0.25), 4.0)
        return worth * (1 + 0.01 * _tie(self.seed, want))

    def add(self, want: Want) -> None:
        """Count a chosen run as if it were measured."""
        if want.kind == "train":
            self.seen.update(_features(want.workload, want.members, want.global_batch, want.accumulation_steps))
            if self.appraisal is not None and self.appraisal.judges(want):
                self.appraisal.add(want)
        elif want.kind == "profile":
            self.profiled.add((want.workload, want.members[0]))
        else:
            self.probed.add(want.members)

    def copy(self) -> Knowledge:
        """An independent copy to try a launch on."""
        return Knowledge(
            settled=self.settled,
            profiled=set(self.profiled),
            probed=set(self.probed),
            workloads=self.workloads,
            seen=self.seen.copy(),
            seed=self.seed,
            drifting=self.drifting,
            appraisal=None if self.appraisal is None else self.appraisal.copy(),
        )

    def reason(self, want: Want) -> str:
        """Why to measure this, for a person."""
        if want.kind == "profile":
            return f"{want.workload} was never profiled on {want.members[0]}"
        if want.kind == "probe":
            return f"no collective was ever timed on {want.cluster}"
        where = f"{want.workload} on {want.cluster} at global batch {want.global_batch}"
        if want.devices == (1,):
            where += " with one device"
        if want.accumulation_steps > 1:
            where += f" in {want.accumulation_steps} accumulation steps"
        if self.appraisal is not None and self.appraisal.judges(want):
            return f"{where}: {self.appraisal.reason(want)}"
        tail = "" if want.exact else ", off its own batch for variety"
        if drifted := sorted(self.drifting.keys() & set(want.members)):
            return f"{where}: {' and '.join(drifted)} drifted, recent runs lay outside their intervals{tail}"
        if want.width is not None:
            return f"{where}: predicted only within {want.width / 2:.0%} either way{tail}"
        if not self.seen["workload and cluster", want.workload, want.cluster]:
            return f"{where}: never run on this cluster{tail}"
        return f"{where}: not known well at this split{tail}"


def _features(workload: str, members: tuple[str, ...], batch: int, steps: int) -> list[tuple[str, ...]]:
    cluster = "+".join(sorted(members))
    return [
        ("cluster", cluster),
        ("workload and cluster", workload, cluster),
        ("workload and mixture", workload, str(len(members)), str(len(set(members)))),
        ("workload and batch", workload, str(batch), str(steps)),
        *(("workload and machine", workload, name) for name in sorted(set(members))),
    ]


@lru_cache(maxsize=65536)
def _tie(seed: int, want: Want) -> float:
    """A number in [0, 1) by which equals are told apart; another seed, another order."""
    return zlib.crc32(f"{seed} {want}".encode()) / 2**32
