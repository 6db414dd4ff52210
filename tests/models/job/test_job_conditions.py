"""Conditions of clusters: only spot machines are lost, all machines must start."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from models.domain.cluster import Cluster, bucket_hazard
from models.job.capacity import fit_availability, fit_startup
from models.job.interruption_rates import fit_hazard
from models.job.job_conditions import STATED, JobConditions, pools_of
from models.job.restarts import fit_restarts
from tests.models.planning import offer

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
HAZARD = fit_hazard(WINDOWS, advised={"small": bucket_hazard(1)})
LEARNED = JobConditions(startup=fit_startup(LAUNCHES), hazard=HAZARD)
SMALL, SPOT, LARGE = offer("small"), offer("small", "spot"), offer("large", "spot")


def availability(refusals):
    rows = [("small", "spot", "local-a", False)] * refusals
    columns = ["instance_type", "market", "zone", "granted"]
    return replace(LEARNED, availability=fit_availability(pd.DataFrame(rows, columns=columns)))


def of(known, *clusters, state_bytes=0.0):
    return known.gangs(*pools_of(clusters), state_bytes)


def test_an_on_demand_cluster_is_not_interrupted():
    found = of(LEARNED, Cluster.of((3, SMALL)), state_bytes=1e9)
    assert found.hazard_per_hour[0] == 0 and found.doubt[0] == 0
    assert found.startup_s[0] == pytest.approx(30, rel=0.2)
    mean_s = 23.6 * np.exp(found.checkpoint_log_sd[0] ** 2 / 2)
    assert found.checkpoint_s[0] == pytest.approx(mean_s)


def test_a_cluster_starts_as_its_slowest_type_and_loses_the_others_too():
    both = of(LEARNED, Cluster.of((1, SPOT), (1, LARGE)))
    assert both.startup_s[0] > 350 and both.replacement_s[0] < 200  # small machines are lost


def test_observed_replacements_shorten_what_a_loss_takes():
    two = Cluster.of((1, SPOT), (1, LARGE))

    def replacement_s(known):
        return float(of(known, two, state_bytes=1e8).replacement_s[0])

    seen = pd.DataFrame({"instance_type": ["small", "large"] * 9, "seconds": 33.0})
    fewer = replace(LEARNED, restarts=fit_restarts(seen.assign(outcome="fewer")))
    replaced = replace(LEARNED, restarts=fit_restarts(seen.assign(outcome="replaced")))
    assert replacement_s(fewer) == replacement_s(LEARNED)
    assert replacement_s(replaced) == pytest.approx(33 + 5.6, abs=2)


@pytest.mark.parametrize("known", [LEARNED, availability(0), STATED])
def test_clusters_together_have_the_conditions_of_each_alone(known):
    clusters = [
        Cluster.of((2, SPOT), (1, LARGE)),
        Cluster.of((1, offer("large")), (3, SMALL)),
        Cluster.of((5, offer("medium", "spot"))),
    ]
    together = of(known, *clusters, state_bytes=1e9)
    for at, cluster in enumerate(clusters):
        alone = of(known, cluster, state_bytes=1e9)
        for expected, found in zip(alone, together, strict=True):
            assert found[at] == pytest.approx(expected[0], rel=1e-12)


def test_refused_requests_delay_the_start_and_make_it_less_certain():
    plain, waited = (of(known, Cluster.of((2, SPOT))) for known in (LEARNED, availability(20)))
    assert waited.startup_s[0] > plain.startup_s[0] + 120
    assert waited.startup_log_sd[0] > 2 * plain.startup_log_sd[0]
    assert waited.replacement_s[0] > plain.replacement_s[0] + 60
