"""What drifts, runs slowly or breaks a promise is stored once and reaches status, the table and the next campaign."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from models.domain.cluster import InstanceType
from models.step_time.dataset import TrainingData
from models.step_time.model import fit
from tasks.campaign import campaign
from tasks.market.offers import snapshot_offers
from tasks.monitoring import status
from tasks.monitoring.checks import (
    drifting_types,
    judge_promises,
    ledger_sentence,
    note_alarms,
    note_drift,
    noted,
)
from tasks.providers.base import ProviderError
from tasks.recommendation.publication import export_copies, store_publication
from tasks.recommendation.recommend import recommend_all
from tasks.reporting.tables import print_status
from tasks.training.registry import Champion
from tasks.workspace.workspace import Workspace
from tests.installed import NOON, DescribedMachines, champion, install, measured
from tests.warehouse.builders import record, setup
from warehouse import reads
from warehouse.append import append, append_records, note_instance_types, note_workloads
from warehouse.reads import mart

LATER = pd.Timestamp(NOON).tz_localize(None) + pd.Timedelta(days=1)


@cache
def half_fitted() -> Champion:
    """One that has not seen the runs of the next day."""
    runs = measured().runs
    return Champion(
        version=3, model=fit(replace(measured(), runs=runs[runs.index % 2 == 0]), seed=1)
    )


def frames(slow: str = "", times: float = 1.4) -> dict[str, pd.DataFrame]:
    """Every second run was measured the next day, when machines called `slow` took so many times as long."""
    runs = measured().runs
    fresh = runs.index % 2 == 1
    touched = fresh & runs["cluster"].str.contains(slow or "nothing is called that", regex=False)
    step = runs["step_s"].where(~touched, times * runs["step_s"])
    at = runs["measured_at"].where(~fresh, LATER + pd.to_timedelta(runs.index, unit="min"))
    data: TrainingData = replace(
        measured(), runs=runs.assign(step_s=step, measured_at=at, zone="a")
    )
    return {name: getattr(data, name) for name in reads.TRAINING_FRAMES}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    made = install(tmp_path)
    monkeypatch.setattr(status, "open_workspace", lambda provider: made)
    return made


def test_without_a_champion_nothing_is_judged(here: Workspace) -> None:
    assert note_drift(here, frames("n.medium"), None, "r1", NOON) == []
    assert mart(here.warehouse, "drift").empty


def test_runs_as_predicted_are_no_drift_and_are_judged_all_the_same(here: Workspace) -> None:
    assert note_drift(here, frames(), half_fitted(), "r1", NOON) == []
    judged = mart(here.warehouse, "drift")
    assert len(judged) and not judged["drifting"].any() and set(judged["model_version"]) == {"3"}
    assert drifting_types(here) == {}


def test_a_slow_type_is_named_kept_until_measured_again_and_over_when_it_is_learned(
    here: Workspace,
) -> None:
    (said,) = note_drift(here, frames("n.medium"), half_fitted(), "r1", NOON)
    assert said.startswith("drift: n.medium in a runs slower than predicted since 2026-11-21")
    assert list(drifting_types(here)) == ["n.medium"] and drifting_types(here)["n.medium"] > LATER
    again = note_drift(here, frames("n.medium"), half_fitted(), "r1", NOON)
    assert again == [said] and mart(here.warehouse, "drift")["refresh_id"].unique().tolist() == [
        "r1"
    ]
    nothing_new = {
        **frames("n.medium"),
        "runs": frames("n.medium")["runs"].query("measured_at < @LATER"),
    }
    assert note_drift(here, nothing_new, half_fitted(), "r2", NOON) == [said], (
        "it ended although nothing was measured"
    )
    assert note_drift(here, frames(), half_fitted(), "r3", NOON) == []
    assert drifting_types(here) == {}


def test_the_next_campaign_buys_it_first_and_says_why(here: Workspace) -> None:
    past = frames("n.medium")
    note_drift(here, past, half_fitted(), "r1", NOON)
    launches = campaign.shop(here, here.provider.offers(NOON), past, half_fitted(), None)
    first = launches[0]
    assert "n.medium" in {offer.instance_type.name for offer in first.cluster.members}
    assert any("n.medium drifted" in item.reason for item in first.items)


def test_where_everything_drifts_every_type_is_measured_again_and_a_type_that_is_gone_is_not_spoken_of(
    here: Workspace,
) -> None:
    gone = {
        "scope": "type",
        "instance_type": "s.gone",
        "zone": "",
        "drifting": True,
        "direction": "slower",
        "runs": 9,
    }
    gone |= {
        "outside": 6,
        "median_ratio": 1.2,
        "chance": 1e-5,
        "since": NOON,
        "newest_measured_at": NOON,
    }
    whole = gone | {"scope": "provider", "instance_type": "", "model_version": "1"}
    with here.warehouse.transact() as connection:
        rows = [gone | {"model_version": "1"}, whole]
        append(connection, "raw_drift", rows, provider="local", refresh_id="r0", judged_at=NOON)
    (said,) = note_drift(here, frames(), None, "r1", NOON)
    assert said.startswith("drift: everything runs slower")
    assert set(drifting_types(here)) == {one.name for one in here.provider.instance_types()} | {
        "s.gone"
    }


class Silent(DescribedMachines):
    """A provider that does not say what it offers: no credentials, say."""

    def instance_types(self) -> list[InstanceType]:
        raise ProviderError("no credentials")


def test_a_provider_that_does_not_answer_silences_no_drift_and_stops_nothing(
    here: Workspace,
) -> None:
    noted = note_drift(here, frames("n.medium"), half_fitted(), "r1", NOON)
    assert len(noted) == 1
    silent = replace(here, provider=Silent())
    assert note_drift(silent, frames("n.medium"), half_fitted(), "r2", NOON) == noted
    assert set(drifting_types(silent)) == {"n.medium"}


@pytest.fixture
def defined(here: Workspace) -> Workspace:
    with here.warehouse.transact() as connection:
        note_workloads(
            connection, [{"workload": "conv", "digest": "w1"}], provider="local", noted_at=NOON
        )
        types = [asdict(one) | {"digest": one.digest} for one in here.provider.instance_types()]
        note_instance_types(connection, types, noted_at=NOON)
    return here


def ran(
    here: Workspace,
    run_id: str,
    step_s: float,
    *,
    hours: float = 0.0,
    lease_id: str = "lease",
    **values: Any,
) -> None:
    """Two small machines, as the warehouse has it when a launch came home."""
    digests = {one.name: one.digest for one in here.provider.instance_types()}
    whole = {"instance_types": ["s.small"] * 2, "instance_digests": [digests["s.small"]] * 2}
    body = record(run_id, ended_unix=(NOON + timedelta(hours=hours)).timestamp(), lease_id=lease_id)
    body["setup"] = setup(
        workload="conv", cluster="2xs.small", batch_per_device="8", zone="a", **whole
    )
    body["item"] = {"nodes": [0, 1]}
    body["values"] = (
        body["values"] | {"step_s": step_s, "sync_s": 0.01, "rank_compute_s": [0.1, 0.1]} | values
    )
    with here.warehouse.transact() as connection:
        append_records(connection, [body], refresh_id="r1", loaded_at=NOON)


def note(here: Workspace, refresh_id: str = "r1") -> list[str]:
    frames = {name: getattr(measured(), name) for name in reads.TRAINING_FRAMES}
    return note_alarms(here, frames, champion(), refresh_id, NOON)


def test_a_slow_run_is_said_once_stored_and_over_when_a_later_one_is_not_slow(
    defined: Workspace,
) -> None:
    ran(defined, "usual", 0.0001)
    assert note(defined) == [] and mart(defined.warehouse, "alarms").empty
    ran(defined, "slow", 60.0, hours=1, rank_compute_s=[30.0, 60.0])
    (said,) = note(defined)
    assert (
        "conv on 2xs.small in a took 60 s a step" in said
        and "node 1 (s.small) computes 100% slower" in said
    )
    assert note(defined, "r2") == [said]
    assert mart(defined.warehouse, "alarms")["refresh_id"].tolist() == ["r1"]
    export_copies(defined)
    assert status.status_of("local")["alarms"] == [said]
    ran(defined, "usual-again", 0.0001, hours=2)
    assert mart(defined.warehouse, "alarms").empty


def test_without_a_champion_or_of_machines_that_it_has_not_met_nothing_is_judged(
    defined: Workspace,
) -> None:
    assert note(defined) == []
    ran(defined, "slow", 60.0)
    assert note_alarms(defined, {}, None, "r1", NOON) == []


def test_only_the_first_of_a_goal_and_only_of_machines_like_its_own_has_a_note(
    defined: Workspace,
) -> None:
    ran(defined, "slow", 60.0, rank_compute_s=[30.0, 60.0])
    note(defined)

    def row(name: str, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "workload": "conv",
            "cluster_offers": [{"instance_type": name}],
            "reason": "cheapest",
        }

    empty = {"rank": 1, "workload": "conv", "cluster_offers": None, "reason": "nothing fits"}
    first, second, other, nothing = noted(
        defined, [row("s.small", 1), row("s.small", 2), row("s.large", 1), empty]
    )
    assert first["reason"].startswith("cheapest; note: slow run: conv on 2xs.small")
    assert [one["reason"] for one in (second, other, nothing)] == [
        "cheapest",
        "cheapest",
        "nothing fits",
    ]


def test_what_a_host_took_is_said_and_is_no_note_on_a_type(defined: Workspace) -> None:
    ran(defined, "slow", 60.0, rank_compute_s=[30.0, 60.0], taken_share=0.43)
    (said,) = note(defined)
    assert "43%" in said and "slower than its equals" not in said
    assert mart(defined.warehouse, "alarms")["cause"].tolist() == ["host"]
    row = {
        "rank": 1,
        "workload": "conv",
        "cluster_offers": [{"instance_type": "s.small"}],
        "reason": "cheapest",
    }
    assert noted(defined, [row]) == [row], "it was the moment's"


def test_a_slow_machine_is_distinguished_from_slow_code_and_said_even_where_nobody_predicts(
    defined: Workspace,
) -> None:
    for at in range(8):
        ran(defined, f"usual-{at}", 0.0001, hours=at, reference_s=[0.1, 0.1])
    ran(defined, "slow", 60.0, hours=9, lease_id="later", reference_s=[0.15, 0.2])
    (without,) = note_alarms(defined, {}, None, "r1", NOON)
    alarm, machine = note(defined)
    assert without == machine and "later" in machine and "2 of 4" in machine and "73%" in alarm
    assert note(defined, "r2") == [alarm], "a machine is named by the refresh that had it"
    assert mart(defined.warehouse, "alarms")["cause"].tolist() == ["speed"]
    row = {
        "rank": 1,
        "workload": "conv",
        "cluster_offers": [{"instance_type": "s.small"}],
        "reason": "cheapest",
    }
    assert noted(defined, [row]) == [row], "it was the hour's"


DAY = timedelta(days=1)


@pytest.fixture
def published(here: Workspace) -> Workspace:
    snapshot_offers(here, "refresh-1", NOON)  # how often spot machines are interrupted
    rows = recommend_all(here, champion(), here.provider.offers(NOON), measured().runs)
    store_publication(here, rows, champion(), "refresh-1", NOON)
    export_copies(here)
    return here


def measure(here: Workspace, ranks: tuple[int, ...], times: float) -> dict[str, pd.DataFrame]:
    """What the ranks of every goal of conv took the next day: so many times what was promised."""
    table = mart(here.warehouse, "recommendations", workload="conv").query(
        "rank in @ranks and cluster.notna()"
    )
    named = table.drop_duplicates(["cluster", "batch_per_device", "accumulation_steps"])
    columns = [
        "workload",
        "cluster",
        "layout",
        "batch_per_device",
        "accumulation_steps",
        "strategy",
        "precision",
        "switches",
    ]
    rows = []
    for number, row in enumerate(named.to_dict("records")):
        values = {name: row[name] for name in columns} | {"step_s": times * row["step_s"]}
        values |= {"accumulation_steps": int(row["accumulation_steps"]), "measured_at": NOON + DAY}
        one = f"{ranks} {number}"
        rows.append(values | {"row_digest": one, "row_number": number, "provider": "local"})
    with here.warehouse.transact() as connection:
        append(
            connection, "raw_imports", rows, file_digest="d", import_id="d", loaded_at=NOON + DAY
        )
    return reads.training_frames(here.warehouse, "local")


def test_what_was_promised_and_measured_since_is_judged_once(published: Workspace) -> None:
    nothing = reads.training_frames(published.warehouse, "local")
    assert judge_promises(published, nothing, "refresh-2", NOON + DAY) == 0
    frames = measure(published, (1, 2, 3), 1.0)
    new = judge_promises(published, frames, "refresh-2", NOON + DAY)
    assert new == 4, "conv has four goals"
    assert judge_promises(published, frames, "refresh-3", NOON + 2 * DAY) == 0
    ledger = mart(published.warehouse, "regret_ledger")
    assert set(ledger["verdict"]) == {"compared"} and set(ledger["publication_id"]) == {"refresh-1"}
    assert ledger["measured_hours"].tolist() == pytest.approx(
        ledger["promised_hours"].tolist(), rel=1e-6
    )
    assert ledger["measured_usd"].tolist() == pytest.approx(
        ledger["promised_usd"].tolist(), rel=1e-6
    )
    assert ledger["regret"].max() < 0.01 and ledger["within_interval"].all()


def test_the_ledger_is_published_and_status_tells_of_it(
    published: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    before = status.status_of("local")
    assert before["ledger"]["measured"] == 0 and before["ledger_sentence"] == ""
    frames = measure(published, (1,), 100.0)
    judge_promises(published, frames, "refresh-2", NOON + DAY)
    export_copies(published)
    status_now = status.status_of("local")
    assert status_now["ledger"]["failures"] == 2, "a deadline and a budget"
    print_status(status_now)
    shown = capsys.readouterr().out
    assert "4 published choices measured since, 0% within the promised interval" in shown
    assert (
        "2 missed their constraint" in shown and "no rival of one that held was measured" in shown
    )


def test_one_choice_is_one_choice() -> None:
    one = pd.DataFrame({"verdict": ["compared"], "regret": [0.02], "within_interval": [True]})
    assert ledger_sentence(one) == (
        "ledger: 1 published choice measured since, 100% within the promised interval; "
        "mean regret 2.0% over 1 compared with rivals; 0 missed their constraint"
    )
