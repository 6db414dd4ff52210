"""The champion judges what it has not seen; what drifts reaches status and the next campaign."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from models.cloud import InstanceType
from models.learning import TrainingData
from models.step_time import fit
from tasks import shopping
from tasks.drift import drifting_types, note_drift
from tasks.installation import Installation
from tasks.providers.base import ProviderError
from tasks.registry import Champion
from tests.installed import NOON, DescribedMachines, install, measured
from warehouse import reads
from warehouse.append import append_drift
from warehouse.reads import mart

LATER = pd.Timestamp(NOON).tz_localize(None) + pd.Timedelta(days=1)


@cache
def champion() -> Champion:
    """One that has not seen the runs of the next day."""
    runs = measured().runs
    return Champion(version=3, model=fit(replace(measured(), runs=runs[runs.index % 2 == 0]), seed=1))


def frames(slow: str = "", times: float = 1.4) -> dict[str, pd.DataFrame]:
    """Every second run was measured the next day, when machines called `slow` took so many times as long."""
    runs = measured().runs
    fresh = runs.index % 2 == 1
    touched = fresh & runs["cluster"].str.contains(slow or "nothing is called that", regex=False)
    step = runs["step_s"].where(~touched, times * runs["step_s"])
    at = runs["measured_at"].where(~fresh, LATER + pd.to_timedelta(runs.index, unit="min"))
    data: TrainingData = replace(measured(), runs=runs.assign(step_s=step, measured_at=at, zone="a"))
    return {name: getattr(data, name) for name in reads.TRAINING_FRAMES}


@pytest.fixture
def here(tmp_path: Path) -> Installation:
    return install(tmp_path)


def test_without_a_champion_nothing_is_judged(here: Installation) -> None:
    assert note_drift.fn(here, frames("n.medium"), None, "r1", NOON) == []
    assert mart(here.warehouse, "drift").empty


def test_runs_as_predicted_are_no_drift_and_are_judged_all_the_same(here: Installation) -> None:
    assert note_drift.fn(here, frames(), champion(), "r1", NOON) == []
    judged = mart(here.warehouse, "drift")
    assert len(judged) and not judged["drifting"].any() and set(judged["model_version"]) == {"3"}
    assert drifting_types(here) == {}


def test_a_slow_type_is_named_kept_until_measured_again_and_over_when_it_is_learned(here: Installation) -> None:
    (said,) = note_drift.fn(here, frames("n.medium"), champion(), "r1", NOON)
    assert said.startswith("drift: n.medium in a runs slower than predicted since 2026-11-21")
    assert list(drifting_types(here)) == ["n.medium"] and drifting_types(here)["n.medium"] > LATER
    again = note_drift.fn(here, frames("n.medium"), champion(), "r1", NOON)
    assert again == [said] and mart(here.warehouse, "drift")["refresh_id"].unique().tolist() == ["r1"]
    nothing_new = {**frames("n.medium"), "runs": frames("n.medium")["runs"].query("measured_at < @LATER")}
    assert note_drift.fn(here, nothing_new, champion(), "r2", NOON) == [said], "it ended although nothing was measured"
    assert note_drift.fn(here, frames(), champion(), "r3", NOON) == []
    assert drifting_types(here) == {}


def test_the_next_campaign_buys_it_first_and_says_why(here: Installation) -> None:
    past = frames("n.medium")
    note_drift.fn(here, past, champion(), "r1", NOON)
    launches = shopping.shop.fn(here, here.provider.offers(NOON), past, champion(), None)
    first = launches[0]
    assert "n.medium" in {offer.instance_type.name for offer in first.cluster.members}
    assert any("n.medium drifted" in item.reason for item in first.items)


def test_where_everything_drifts_every_type_is_measured_again_and_a_type_that_is_gone_is_not_spoken_of(
    here: Installation,
) -> None:
    gone = {"scope": "type", "instance_type": "s.gone", "zone": "", "drifting": True, "direction": "slower", "runs": 9}
    gone |= {"outside": 6, "median_ratio": 1.2, "chance": 1e-5, "since": NOON, "newest_measured_at": NOON}
    whole = gone | {"scope": "provider", "instance_type": "", "model_version": "1"}
    with here.warehouse.transact() as connection:
        rows = [gone | {"model_version": "1"}, whole]
        append_drift(connection, rows, provider="local", refresh_id="r0", judged_at=NOON)
    (said,) = note_drift.fn(here, frames(), None, "r1", NOON)
    assert said.startswith("drift: everything runs slower")
    assert set(drifting_types(here)) == {one.name for one in here.provider.instance_types()} | {"s.gone"}


class Silent(DescribedMachines):
    """A provider that does not say what it offers: no credentials, say."""

    def instance_types(self) -> list[InstanceType]:
        raise ProviderError("no credentials")


def test_a_provider_that_does_not_answer_silences_no_drift_and_stops_nothing(here: Installation) -> None:
    told = note_drift.fn(here, frames("n.medium"), champion(), "r1", NOON)
    assert len(told) == 1
    silent = replace(here, provider=Silent())
    assert note_drift.fn(silent, frames("n.medium"), champion(), "r2", NOON) == told
    assert set(drifting_types(silent)) == {"n.medium"}
