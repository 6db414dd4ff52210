"""What a cluster meets by what was learned: only spot machines are lost, all must start, and the planner takes heed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from models.domain.cluster import Cluster, bucket_hazard
from models.domain.workload import Setup
from models.job.capacity import fit_availability, fit_startup
from models.job.checkpoints import fit_restores
from models.job.cost import job_costs
from models.job.duration import Conditions
from models.job.interruption_rates import fit_hazard
from models.job.job_conditions import JobConditions, Learned, Stated, pools_of
from models.job.restarts import fit_restarts
from models.planner.ranking import recommend
from tests.models.planning import LineModel, frame, offer, workload

LAUNCHES = pd.DataFrame(
    [("small", "spot", 120.0)] * 20
    + [("small", "on-demand", 30.0)] * 20
    + [("large", "spot", 400.0)] * 20,
    columns=["instance_type", "market", "seconds"],
).assign(machines=1)
WINDOWS = pd.DataFrame(
    [("small", "local-a", 24.0, 1)] * 20 + [("large", "local-a", 24.0, 0)] * 20,
    columns=["instance_type", "zone", "hours", "interruptions"],
)
LEARNED = Learned(
    startup=fit_startup(LAUNCHES),
    hazard=fit_hazard(WINDOWS, advised={"small": bucket_hazard(1)}),
)


def asked(*rows: tuple[str, str, str, bool]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["instance_type", "market", "zone", "granted"])


def met(job_conditions: JobConditions, *clusters: Cluster, state_bytes: float = 0.0) -> Conditions:
    return job_conditions.gangs(*pools_of(clusters), state_bytes)


def test_an_on_demand_cluster_is_not_interrupted() -> None:
    conditions = met(LEARNED, Cluster.of((3, offer("small"))), state_bytes=1e9)
    assert conditions.hazard_per_hour[0] == 0 and conditions.doubt[0] == 0
    assert conditions.startup_s[0] == pytest.approx(30, rel=0.2)
    assert conditions.checkpoint_s[0] == pytest.approx(23.6)


def test_a_mixed_cluster_is_lost_as_its_spot_machines_are_and_starts_as_its_slowest() -> None:
    spot = met(LEARNED, Cluster.of((2, offer("small", "spot"))))
    mixed = met(LEARNED, Cluster.of((2, offer("small", "spot")), (2, offer("small"))))
    assert mixed.hazard_per_hour[0] == spot.hazard_per_hour[0] > 0
    alike = met(LEARNED, Cluster.of((4, offer("small", "spot"))))
    assert mixed.startup_s[0] == pytest.approx(alike.startup_s[0], rel=0.01)
    assert mixed.replacement_s[0] == spot.replacement_s[0]


def test_what_was_measured_of_replacing_and_reading_takes_the_place_of_what_is_stated() -> None:
    two = Cluster.of((1, offer("small", "spot")), (1, offer("large", "spot")))
    stated = met(LEARNED, two, state_bytes=1e8)
    read = pd.DataFrame(
        {"workload": "tiny", "instance_type": "small", "bytes": [10**8] * 9, "seconds": 0.5}
    )
    seen = pd.DataFrame(
        {"outcome": "replaced", "instance_type": ["small", "large"] * 9, "seconds": 33.0}
    )
    known = replace(LEARNED, restores=fit_restores(read))
    faster = met(known, two, state_bytes=1e8)
    assert stated.replacement_s[0] - faster.replacement_s[0] == pytest.approx(5.6 - 0.5, abs=1.5), (
        "of writing: 5.6 s"
    )
    fewer = replace(known, restarts=fit_restarts(seen.assign(outcome="fewer")))
    assert met(fewer, two, state_bytes=1e8).replacement_s[0] == faster.replacement_s[0], (
        "tells of no replacement"
    )
    both = met(replace(known, restarts=fit_restarts(seen)), two, state_bytes=1e8)
    assert both.replacement_s[0] == pytest.approx(33.5, abs=2)
    assert both.startup_s[0] == stated.startup_s[0]


def test_what_is_replaced_is_what_is_lost() -> None:
    conditions = met(LEARNED, Cluster.of((1, offer("small", "spot")), (1, offer("large", "spot"))))
    assert conditions.startup_s[0] > 350  # waits for the large one
    assert conditions.replacement_s[0] < 200  # which is hardly ever the one to go


def test_clusters_asked_about_together_meet_what_they_meet_alone() -> None:
    clusters = [
        Cluster.of((2, offer("small", "spot")), (1, offer("large"))),
        Cluster.of((1, offer("large", "spot")), (3, offer("small"))),
        Cluster.of((5, offer("medium", "spot"))),
        Cluster.of((1, offer("whole"))),
    ]
    known: list[JobConditions] = [
        LEARNED,
        replace(LEARNED, availability=fit_availability(asked())),
        Stated(),
    ]
    for job_conditions in known:
        together = met(job_conditions, *clusters, state_bytes=1e9)
        for at, cluster in enumerate(clusters):
            for name in Conditions.__slots__:
                alone = getattr(met(job_conditions, cluster, state_bytes=1e9), name)
                assert getattr(together, name)[at] == pytest.approx(alone[0], rel=1e-12)
    assert len(Conditions.joined([]).startup_s) == len(met(LEARNED).startup_s) == 0


def test_as_stated_all_clusters_take_the_same_seconds_and_only_spot_machines_are_lost() -> None:
    mixed, safe = (
        Cluster.of((3, offer("small", "spot")), (1, offer("small"))),
        Cluster.of((4, offer("small"))),
    )
    conditions = met(Stated(startup_s=7.0, replacement_s=8.0), mixed, safe, state_bytes=1e9)
    assert conditions.hazard_per_hour.tolist() == pytest.approx([3 * 0.3, 0.0])
    assert conditions.startup_s.tolist() == [7.0, 7.0] and conditions.replacement_s.tolist() == [
        8.0,
        8.0,
    ]
    assert conditions.checkpoint_s.tolist() == pytest.approx([23.6, 23.6])


def test_a_type_that_was_never_seen_is_lost_as_often_as_is_advised_and_never_where_that_is_never() -> (
    None
):
    often, never = (
        offer("whole", "spot", interruptions_per_hour=0.7),
        offer("net", "spot", interruptions_per_hour=0.0),
    )
    unseen = replace(LEARNED, hazard=fit_hazard(WINDOWS.iloc[:0]))
    conditions = met(unseen, Cluster.of((1, often)), Cluster.of((1, never)))
    assert conditions.hazard_per_hour.tolist() == pytest.approx([0.7, 0.0])
    assert conditions.doubt[0] > 1
    beside = met(unseen, Cluster.of((1, never), (3, offer("large"))))
    assert beside.replacement_s[0] == conditions.replacement_s[1] > 0, (
        "what is replaced is a spot machine all the same"
    )


def test_who_must_wait_for_machines_starts_later_and_less_surely() -> None:
    scarce = replace(
        LEARNED, availability=fit_availability(asked(*[("small", "spot", "local-a", False)] * 20))
    )
    plain, waited = (met(one, Cluster.of((2, offer("small", "spot")))) for one in (LEARNED, scarce))
    assert (
        waited.startup_s[0] > plain.startup_s[0] + 120
        and waited.startup_log_sd[0] > 2 * plain.startup_log_sd[0]
    )
    assert waited.replacement_s[0] > plain.replacement_s[0] + 60


def test_what_was_learned_decides_between_spot_and_on_demand() -> None:
    """At a fifth off, spot is worth it where it is seldom lost, and not where every day brings many losses."""
    spot, safe = offer("small", "spot", usd_per_hour=0.024), offer("small", usd_per_hour=0.030)
    setups = [
        Setup(workload="mlp", cluster=Cluster.of((1, one)), layout=(1,), batch_per_device=(64,))
        for one in (spot, safe)
    ]
    rows = frame(setups)
    model = LineModel()
    for lost, market in ((0, "spot"), (60, "on-demand")):
        seen = pd.DataFrame([("small", "local-a", 24.0, lost)] * 30, columns=WINDOWS.columns)
        learned = Learned(
            startup=fit_startup(LAUNCHES.assign(seconds=600.0)), hazard=fit_hazard(seen)
        )
        draws = model.draws(rows, count=200, seed=1)
        job = workload("mlp", 64, samples=20_000_000)
        found = recommend(
            job, job_costs(job, setups, model.predict(rows), draws, job_conditions=learned)
        )
        cheapest = next(row for row in found if row["goal"] == "cheapest")
        assert {one["market"] for one in cheapest["cluster_offers"]} == {market}


def test_bunching_and_doubt_widen_what_the_planner_says() -> None:
    """The same mean; with bunching more jobs are left alone, and the few that are not are hit harder."""
    setup = Setup(
        workload="mlp",
        cluster=Cluster.of((1, offer("small", "spot"))),
        layout=(1,),
        batch_per_device=(64,),
    )
    rows, model, job = frame([setup]), LineModel(), workload("mlp", 64, samples=200_000_000)
    hazard = LEARNED.hazard
    assert hazard is not None
    calm = replace(LEARNED, hazard=replace(hazard, shock=0.0, drift=0.0))
    predicted = model.predict(rows)
    draws = np.repeat(predicted["step_s"].to_numpy()[:, None], 2000, axis=1)
    known = calm, replace(LEARNED, hazard=replace(hazard, shock=3.0, drift=3.0))
    calmer, wilder = (
        job_costs(job, [setup], predicted, draws, job_conditions=one, seed=1) for one in known
    )
    assert calmer.hours[0] == wilder.hours[0] > 5
    assert wilder.sampled_hours.std() > 1.5 * calmer.sampled_hours.std()
