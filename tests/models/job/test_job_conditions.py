"""What a cluster meets by what was learned: only spot machines are lost, all must start, and the planner takes heed."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.cluster import Cluster, bucket_hazard
from models.domain.workload import Setup
from models.job.capacity import fit_availability, fit_startup
from models.job.cost import outlook
from models.job.duration import prior_checkpoints
from models.job.interruptions import fit_hazard
from models.job.job_conditions import Circumstances, Gangs, Learned, Stated, joined_gangs, pools_of
from models.planner.ranking import recommend
from tests.models.planning import LineModel, frame, offer, workload

LAUNCHES = pd.DataFrame(
    [("small", "spot", 120.0)] * 20 + [("small", "on-demand", 30.0)] * 20 + [("large", "spot", 400.0)] * 20,
    columns=["instance_type", "market", "seconds"],
)
WINDOWS = pd.DataFrame(
    [("small", "local-a", 24.0, 1)] * 20 + [("large", "local-a", 24.0, 0)] * 20,
    columns=["instance_type", "zone", "hours", "interruptions"],
)
LEARNED = Learned(
    startup=fit_startup(LAUNCHES),
    checkpoint=prior_checkpoints(),
    hazard=fit_hazard(WINDOWS, advised={"small": bucket_hazard(1)}),
)


def test_an_on_demand_cluster_is_not_interrupted() -> None:
    conditions = LEARNED.gangs(*pools_of([Cluster.of((3, offer("small")))]), 1e9)
    assert conditions.hazard_per_hour[0] == 0 and conditions.doubt[0] == 0
    assert conditions.startup_s[0] == pytest.approx(30, rel=0.2)
    assert conditions.checkpoint_s[0] == pytest.approx(23.6)


def test_a_mixed_cluster_is_lost_as_its_spot_machines_are_and_starts_as_its_slowest() -> None:
    spot = LEARNED.gangs(*pools_of([Cluster.of((2, offer("small", "spot")))]), 0.0)
    mixed = LEARNED.gangs(*pools_of([Cluster.of((2, offer("small", "spot")), (2, offer("small")))]), 0.0)
    assert mixed.hazard_per_hour[0] == spot.hazard_per_hour[0] > 0
    assert mixed.startup_s[0] == pytest.approx(spot.startup_s[0], rel=0.01)
    assert mixed.replacement_s[0] == spot.replacement_s[0]


def test_what_is_replaced_is_what_is_lost() -> None:
    both = Cluster.of((1, offer("small", "spot")), (1, offer("large", "spot")))
    conditions = LEARNED.gangs(*pools_of([both]), 0.0)
    assert conditions.startup_s[0] > 350  # waits for the large one
    assert conditions.replacement_s[0] < 200  # which is hardly ever the one to go


def test_clusters_asked_about_together_meet_what_they_meet_alone() -> None:
    clusters = [
        Cluster.of((2, offer("small", "spot")), (1, offer("large"))),
        Cluster.of((1, offer("large", "spot")), (3, offer("small"))),
        Cluster.of((5, offer("medium", "spot"))),
        Cluster.of((1, offer("whole"))),
    ]
    requests = pd.DataFrame({"instance_type": [], "market": [], "zone": [], "granted": []})
    known: list[Circumstances] = [LEARNED, replace(LEARNED, availability=fit_availability(requests)), Stated()]
    for conditions in known:
        together = conditions.gangs(*pools_of(clusters), 1e9)
        apart = joined_gangs([conditions.gangs(*pools_of([one]), 1e9) for one in clusters])
        for column in fields(Gangs):
            assert getattr(together, column.name) == pytest.approx(getattr(apart, column.name), rel=1e-12)
    assert len(joined_gangs([]).startup_s) == len(LEARNED.gangs(*pools_of([]), 1e9).startup_s) == 0


def test_as_stated_all_clusters_take_the_same_seconds_and_only_spot_machines_are_lost() -> None:
    mixed, safe = Cluster.of((3, offer("small", "spot")), (1, offer("small"))), Cluster.of((4, offer("small")))
    conditions = Stated(startup_s=7.0, replacement_s=8.0).gangs(*pools_of([mixed, safe]), 1e9)
    assert conditions.hazard_per_hour.tolist() == pytest.approx([3 * 0.3, 0.0])
    assert conditions.startup_s.tolist() == [7.0, 7.0] and conditions.replacement_s.tolist() == [8.0, 8.0]
    assert conditions.checkpoint_s.tolist() == pytest.approx([23.6, 23.6])


def test_a_type_that_was_never_seen_is_lost_as_often_as_is_advised_and_never_where_that_is_never() -> None:
    often, never = offer("whole", "spot", interruptions_per_hour=0.7), offer("net", "spot", interruptions_per_hour=0.0)
    unseen = replace(LEARNED, hazard=fit_hazard(WINDOWS.iloc[:0]))
    conditions = unseen.gangs(*pools_of([Cluster.of((1, one)) for one in (often, never)]), 0.0)
    assert conditions.hazard_per_hour.tolist() == pytest.approx([0.7, 0.0])
    assert conditions.doubt[0] > 1
    beside = unseen.gangs(*pools_of([Cluster.of((1, never), (3, offer("large")))]), 0.0)
    assert beside.replacement_s[0] == conditions.replacement_s[1] > 0, "what is replaced is a spot machine all the same"


def test_who_must_wait_for_machines_starts_later_and_less_surely() -> None:
    pool = ("small", "spot", "local-a")
    asked = pd.DataFrame([(*pool, False)] * 20, columns=["instance_type", "market", "zone", "granted"])
    scarce = replace(LEARNED, availability=fit_availability(asked))
    cluster = [Cluster.of((2, offer("small", "spot")))]
    plain, waited = (one.gangs(*pools_of(cluster), 0.0) for one in (LEARNED, scarce))
    assert waited.startup_s[0] > plain.startup_s[0] + 120 and waited.startup_log_sd[0] > 2 * plain.startup_log_sd[0]
    assert waited.replacement_s[0] > plain.replacement_s[0] + 60


@given(few=st.integers(1, 6), more=st.integers(1, 6))
def test_a_larger_gang_is_never_easier_to_get(few: int, more: int) -> None:
    model = fit_availability(pd.DataFrame({"instance_type": [], "market": [], "zone": [], "granted": []}))
    large, small = model.gangs([("a", "spot", "z")], np.array([[few + more], [few]], dtype=float))
    assert 0 < large < small < 1


def test_refusals_lower_the_chance_and_grants_raise_it() -> None:
    asked = [("a", "spot", "x", True)] * 30 + [("a", "spot", "y", False)] * 30
    model = fit_availability(pd.DataFrame(asked, columns=["instance_type", "market", "zone", "granted"]))
    assert model.one(("a", "spot", "y")) < 0.2 < 0.85 < model.one(("a", "spot", "x"))
    with pytest.raises(ValueError, match="market"):
        model.one(("a", "reserved", "x"))


def test_what_was_learned_decides_between_spot_and_on_demand() -> None:
    """At a fifth off, spot is worth it where it is seldom lost, and not where every day brings many losses."""
    spot, safe = offer("small", "spot", usd_per_hour=0.024), offer("small", usd_per_hour=0.030)
    setups = [
        Setup(workload="mlp", cluster=Cluster.of((1, one)), layout=(1,), batch_per_device=(64,)) for one in (spot, safe)
    ]
    rows = frame(setups)
    model = LineModel()
    for lost, market in ((0, "spot"), (60, "on-demand")):
        seen = pd.DataFrame([("small", "local-a", 24.0, lost)] * 30, columns=WINDOWS.columns)
        learned = Learned(
            startup=fit_startup(LAUNCHES.assign(seconds=600.0)), checkpoint=LEARNED.checkpoint, hazard=fit_hazard(seen)
        )
        draws = model.draws(rows, count=200, seed=1)
        job = workload("mlp", 64, samples=20_000_000)
        found = recommend(job, setups, model.predict(rows), draws, conditions=learned)
        cheapest = next(row for row in found if row["goal"] == "cheapest")
        assert {one["market"] for one in cheapest["cluster_offers"]} == {market}


def test_bunching_and_doubt_widen_what_the_planner_says() -> None:
    """The same mean; with bunching more jobs are left alone, and the few that are not are hit harder."""
    setup = Setup(workload="mlp", cluster=Cluster.of((1, offer("small", "spot"))), layout=(1,), batch_per_device=(64,))
    rows, model, job = frame([setup]), LineModel(), workload("mlp", 64, samples=200_000_000)
    hazard = LEARNED.hazard
    assert hazard is not None
    calm = replace(LEARNED, hazard=replace(hazard, shock=0.0, drift=0.0))
    views = [
        outlook(
            job,
            [setup],
            model.predict(rows),
            np.repeat(model.predict(rows)["step_s"].to_numpy()[:, None], 2000, axis=1),
            measured_runs=[0],
            conditions=one,
            seed=1,
        )
        for one in (calm, replace(LEARNED, hazard=replace(hazard, shock=3.0, drift=3.0)))
    ]
    assert views[0].hours[0] == views[1].hours[0] > 5
    assert views[1].sampled_hours.std() > 1.5 * views[0].sampled_hours.std()
