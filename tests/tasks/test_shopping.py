"""What a refresh would buy: within the caps, with reasons, and without starting or writing anything."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from models.campaign import STOPS, Launch, Wanted
from models.judging.holdout import key
from models.workload import Workload
from tasks import shopping
from tasks.facts import with_facts
from tasks.installation import Installation
from tasks.registry import Champion
from tasks.tally import Tally
from tasks.trial import keys_of
from tests.installed import NOON, DescribedMachines, champion, install, measured, model
from tests.warehouse.builders import body, setup
from warehouse import reads
from warehouse.append import append_records

FRAMES = {name: getattr(measured(), name) for name in ("runs", "profiles", "buckets", "probes", "workloads")}


@pytest.fixture
def here(tmp_path: Path) -> Installation:
    return install(tmp_path)


def shop(here: Installation, max_usd: float | None, asked: Champion | None = None, past: bool = True) -> list[Launch]:
    frames = FRAMES if past else {name: pd.DataFrame() for name in reads.TRAINING_FRAMES}
    return shopping.shop.fn(here, here.provider.offers(NOON), frames, asked, max_usd)


def test_nothing_is_bought_for_nothing(here: Installation) -> None:
    assert shop(here, 0.0) == []


def test_the_caps_hold_and_every_line_says_why(here: Installation) -> None:
    launches = shop(here, 0.002, past=False)
    assert launches and sum(launch.est_usd for launch in launches) <= 0.002
    uncapped = shop(here, None, past=False)
    assert len(uncapped) > len(launches)
    assert sum(launch.est_s for launch in uncapped) <= here.settings.campaign.max_minutes * 60
    assert sum(launch.est_usd for launch in uncapped) <= here.settings.campaign.max_usd
    assert all(item.reason for launch in uncapped for item in launch.items)
    assert {offer.market for launch in uncapped for offer in launch.cluster.members} == {"spot"}


def test_the_first_thing_bought_is_a_profile_of_what_is_unknown(here: Installation, tmp_path: Path) -> None:
    first = shop(here, None, past=False)[0]
    assert {item.kind for item in first.items} >= {"profile"}
    assert not [item for launch in shop(here, None) for item in launch.items if item.kind == "profile"]


def test_a_champion_that_has_not_met_a_workload_does_not_stop_its_being_bought(tmp_path: Path) -> None:
    here = install(tmp_path, "conv", "newcomer")
    launches = shop(here, None, asked=champion())
    assert "newcomer" in {item.workload for launch in launches for item in launch.items}


def test_a_dry_run_writes_nothing_and_works_before_the_first_refresh(
    here: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.home / "warehouse.duckdb").unlink()
    monkeypatch.setattr(shopping, "open_installation", lambda provider: here)
    launches = shopping.dry_run("local", None)
    again = shopping.dry_run("local", None)
    assert [one.items for one in launches] == [one.items for one in again] != []
    assert list(here.home.rglob("*")) == []


def test_each_lease_has_a_seed_of_its_own_the_same_everywhere() -> None:
    assert shopping.launch_seed(1, "a-00") == 2_011_533_044
    assert len({shopping.launch_seed(seed, lease) for seed in (1, 2) for lease in ("a-00", "a-01")}) == 4


def failed(here: Installation, run_id: str, kind: str, **changes: Any) -> dict[str, Any]:
    (conv, _) = here.workloads
    told = body(run_id, kind=kind, status="failed", reason="no", values={}, workload_digest=conv.digest)
    told["setup"] = setup(workload=conv.name, workload_digest=conv.digest)
    return {key: value for key, value in (told | changes).items() if value is not None}


def test_only_what_a_node_told_of_counts_against_a_workload_and_probes_count_too(here: Installation) -> None:
    bodies = [
        failed(here, "a", "train"),
        failed(here, "b", "train", attempt=None),  # a row of the controller's: the mailbox was full, say
        failed(here, "c", "train", workload_digest="its file was another then"),
        failed(here, "d", "probe", workload_digest="", setup=setup(workload=None, workload_digest=None)),
    ]
    with here.warehouse.transact() as connection:
        append_records(connection, bodies, refresh_id="r", loaded_at=NOON)
    assert shopping._failures(here)["run_id"].tolist() == ["a", "d"]


def test_a_dry_run_after_an_edit_lists_by_the_file_as_it_is(
    here: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, pd.DataFrame] = {}
    monkeypatch.setattr(shopping, "open_installation", lambda provider: here)
    monkeypatch.setattr(shopping.shop, "fn", lambda here, offers, frames, *rest: seen.update(frames) or [])
    (_, lm) = here.workloads
    noted = pd.DataFrame({"workload": ["conv", "lm"], "digest": ["before the edit", lm.digest]})
    runs = pd.DataFrame({"workload": ["conv", "conv", "lm"], "source": ["srift", "import", "srift"]})
    profiles = pd.DataFrame({"workload": ["conv", "lm"]})
    past = {"workloads": noted, "runs": runs, "profiles": profiles, "probes": pd.DataFrame()}
    monkeypatch.setattr(shopping.reads, "training_frames", lambda *_: past)
    shopping.dry_run("local", None)
    assert seen["runs"].values.tolist() == [["conv", "import"], ["lm", "srift"]]
    assert seen["profiles"]["workload"].tolist() == ["lm"]
    assert len(runs) == 3, "the frames themselves were changed"


def test_a_dry_run_says_why_it_can_buy_nothing(
    here: Installation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shopping, "open_installation", lambda provider: here)
    machines = here.provider
    assert isinstance(machines, DescribedMachines)
    shopping.dry_run("local", None)
    assert capsys.readouterr().err == ""
    machines.unpriced = frozenset(one.name for one in machines.instance_types())
    assert shopping.dry_run("local", None) == []
    assert "no instance type has a price on the spot market" in capsys.readouterr().err


def test_a_champion_that_has_not_met_a_type_or_its_new_definition_does_not_stop_its_being_bought(
    here: Installation,
) -> None:
    old, *_ = met = here.provider.offers(NOON)
    for stranger in (replace(old.instance_type, name="x.new"), replace(old.instance_type, bandwidth_gbps=7.0)):
        others = [one for one in met if one.instance_type.name != stranger.name]
        offers = [*others, replace(old, instance_type=stranger, market="spot", usd_per_hour=0.001)]
        launches = shopping.shop.fn(here, offers, dict(FRAMES), champion(), None)
        bought = {offer.instance_type for launch in launches for offer in launch.cluster.members}
        assert stranger in bought


def test_expectations_are_of_the_definitions_of_today(here: Installation) -> None:
    setups = pd.DataFrame({"workload": ["conv", "lm"], "cluster": ["1xs.whole", "1xs.small"], "batch_per_device": 8})
    conv, lm = here.workloads
    types = here.provider.instance_types()
    expected = shopping._expected(model(), [conv, lm], types, setups)
    assert expected["step_s"].notna().all()
    edited = shopping._expected(model(), [replace(conv, digest="edited"), lm], types, setups)
    assert list(edited["step_s"].notna()) == [False, True]
    slower = [replace(one, cores=0.1) if one.name == "s.small" else one for one in types]
    assert list(shopping._expected(model(), [conv, lm], slower, setups)["step_s"].notna()) == [True, False]


def test_the_measured_size_of_a_gradient_reaches_the_planning(
    here: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Workload] = []
    monkeypatch.setattr(shopping, "shopping_list", lambda workloads, *rest, **named: seen.extend(workloads) or [])
    shop(here, None)
    facts = measured().workloads.set_index("workload")["gradient_bytes"]
    assert {one.name: one.gradient_bytes for one in seen} == dict(facts)
    assert with_facts([replace(seen[0], digest="edited", gradient_bytes=None)], measured().workloads)[0] != seen[0]


def test_what_a_lost_launch_did_not_measure_is_asked_for_again(
    here: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = {name: pd.DataFrame() for name in reads.TRAINING_FRAMES}
    monkeypatch.setattr(shopping, "shop", shopping.shop.fn)
    monkeypatch.setattr(shopping, "current_offers", lambda here: here.provider.offers(NOON))
    monkeypatch.setattr(reads, "training_frames", lambda *_: empty)
    tally = Tally(cap_usd=0.004, stop_at=time.monotonic() + 1000.0)
    asked = list(shopping.within(here, None, tally))  # nothing comes home: the same list, a bounded number of times
    assert sum(launch == asked[0] for launch in asked) == shopping.MOST_LISTS > 1
    tally.usd = tally.cap_usd
    assert list(shopping.within(here, None, tally)) == []


def test_what_was_measured_too_long_ago_may_be_measured_again(here: Installation) -> None:
    def repeated(here: Installation) -> int:
        return sum(
            key(i.workload, [launch.cluster.members[n].instance_type.name for n in i.nodes], i.batches) in keys_of(runs)
            and i.accumulation_steps == 1
            for launch in shop(here, None)
            for i in launch.items
            if i.kind == "train"
        )

    runs = FRAMES["runs"].query("accumulation_steps == 1")
    campaign = here.settings.campaign.model_copy(update={"stale_after_days": 1e-6})
    stale = replace(here, settings=here.settings.model_copy(update={"campaign": campaign}))
    assert repeated(here) == 0 < repeated(stale)


def test_with_a_champion_a_run_is_bought_for_the_choice_that_it_may_change(here: Installation) -> None:
    launches = shop(here, None, asked=champion())
    items = [item for launch in launches for item in launch.items]
    assert items and all("expected to change the choice of" in item.reason for item in items)
    assert not {key_of(item, launch) for launch in launches for item in launch.items} & keys_of(FRAMES["runs"])
    assert shop(here, None, asked=champion()) == launches
    runs = FRAMES["runs"]
    told = pd.concat([runs, runs.assign(run_id=[f"new-{one}" for one in range(len(runs))])])
    again = shopping.shop.fn(here, here.provider.offers(NOON), dict(FRAMES) | {"runs": told}, champion(), None)
    assert again != launches, "what was measured since the champion was fitted changed nothing"


def key_of(item: Wanted, launch: Launch) -> object:
    return key(item.workload, [launch.cluster.members[n].instance_type.name for n in item.nodes], item.batches)


def test_a_campaign_that_stops_with_money_left_says_why(
    here: Installation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shopping, "shop", lambda *_: [])
    monkeypatch.setattr(shopping, "current_offers", lambda here: here.provider.offers(NOON))
    monkeypatch.setattr(reads, "training_frames", lambda *_: FRAMES)
    for asked, usd, said in ((champion(), 1.0, True), (champion(), 0.0, False), (None, 1.0, False)):
        assert list(shopping.within(here, asked, Tally(cap_usd=usd, stop_at=time.monotonic() + 100.0))) == []
        assert (STOPS in capsys.readouterr().err) == said


def test_with_a_champion_every_launch_is_chosen_by_what_the_last_one_measured(
    here: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = shop(here, None, asked=champion())[:1] * 2
    lists: list[int] = []

    def shopped(*_: object) -> list[Launch]:
        lists.append(tally.runs)
        return planned if len(lists) <= 6 else []

    monkeypatch.setattr(shopping, "shop", shopped)
    monkeypatch.setattr(shopping, "current_offers", lambda here: here.provider.offers(NOON))
    monkeypatch.setattr(reads, "training_frames", lambda *_: FRAMES)
    tally = Tally(cap_usd=1.0, stop_at=time.monotonic() + 1000.0)
    for _ in shopping.within(here, champion(), tally):
        tally.runs += 1
    assert lists == [0, 1, 2, 3, 4, 5, 6], "a list for each launch, as long as runs come home"
    lists.clear()
    tally.runs = 0
    assert len(list(shopping.within(here, champion(), tally))) == shopping.MOST_LISTS  # nothing comes home
