"""What a refresh would buy: within the caps, with reasons, and without starting or writing anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from models.campaign.campaign import STOPS, PlannedLaunch, PlannedRun
from models.domain.cluster import Cluster, Offer
from models.domain.workload import Mode, Workload
from tasks.campaign import campaign
from tasks.campaign.budget import Tally
from tasks.execution.collect import Collected
from tasks.execution.job import Served, job_of
from tasks.execution.record_loader import EndedLaunch, load_mailbox
from tasks.market.offers import note_definitions, with_facts
from tasks.node import device_check
from tasks.node.record import Devices, Item, Plan
from tasks.providers.ec2.settings import Ec2
from tasks.training.registry import Champion
from tasks.workspace.settings import SettingsError
from tasks.workspace.workspace import Workspace
from tests.benchmarks.hosts import key, keys_of
from tests.installed import NOON, DescribedMachines, champion, install, measured, model
from tests.warehouse.builders import body, setup
from warehouse import reads
from warehouse.append import append_records

FRAMES = {
    name: getattr(measured(), name)
    for name in ("runs", "profiles", "buckets", "probes", "workloads")
}


@pytest.fixture
def here(tmp_path: Path) -> Workspace:
    return install(tmp_path)


def reading(monkeypatch: pytest.MonkeyPatch, frames: dict[str, pd.DataFrame] | None = None) -> None:
    """A campaign reads the offers of noon and these frames of the past, none by default."""
    past = frames or {name: pd.DataFrame() for name in reads.TRAINING_FRAMES}
    monkeypatch.setattr(campaign, "current_offers", lambda here: here.provider.offers(NOON))
    monkeypatch.setattr(reads, "training_frames", lambda *_: past)


def shop(
    here: Workspace, max_usd: float | None, asked: Champion | None = None, past: bool = True
) -> list[PlannedLaunch]:
    frames = FRAMES if past else {name: pd.DataFrame() for name in reads.TRAINING_FRAMES}
    return campaign.shop(here, here.provider.offers(NOON), frames, asked, max_usd)


def test_the_caps_hold_and_every_line_says_why(here: Workspace) -> None:
    assert shop(here, 0.0) == []
    launches = shop(here, 0.002, past=False)
    assert launches and sum(launch.est_usd for launch in launches) <= 0.002
    uncapped = shop(here, None, past=False)
    assert len(uncapped) > len(launches)
    assert sum(launch.est_s for launch in uncapped) <= here.settings.campaign.max_minutes * 60
    assert sum(launch.est_usd for launch in uncapped) <= here.settings.campaign.max_usd
    assert all(item.reason for launch in uncapped for item in launch.items)
    assert "profile" in {item.kind for item in uncapped[0].items}
    assert "profile" not in {item.kind for launch in shop(here, None) for item in launch.items}, (
        "all is profiled"
    )
    assert {offer.market for launch in uncapped for offer in launch.cluster.members} == {"spot"}


def test_what_a_compressed_strategy_learns_is_shown_once_on_two_machines_of_a_type(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = Mode(strategy="ddp-mstopk")
    (conv, other) = here.workloads
    modes = {conv.name: (Mode(), sparse), other.name: (Mode(),)}
    monkeypatch.setattr(
        campaign,
        "with_facts",
        lambda known, _: [replace(one, modes=modes[one.name]) for one in known],
    )
    launches = shop(here, None, past=False)
    learn = [(launch, item) for launch in launches for item in launch.items if item.kind == "learn"]
    assert len({id(launch) for launch, _ in learn}) == 1
    assert [(*item.trained, item.seed) for _, item in learn] == [
        (conv.name, mode, seed) for mode in (Mode(), sparse) for seed in (1, 2)
    ]
    assert all(len(item.nodes) == len(item.batches) == 2 and item.reason for _, item in learn)
    assert sum(launch.est_s for launch in launches) <= here.settings.campaign.max_minutes * 60
    assert sum(launch.est_usd for launch in launches) <= here.settings.campaign.max_usd
    assert (
        len(learn[0][0].cluster.members) == 2
        and len({one.instance_type.name for one in learn[0][0].cluster.members}) == 1
    )
    tight = shop(here, 0.0005, past=False)
    assert sum(launch.est_usd for launch in tight) <= 0.0005

    job = job_of(learn[0][0], here.settings, lease_id="l-00", seed=9, deadline_s=60.0)
    items = [item for item in job.items if item.kind == "learn"]
    assert [(one.seed, one.most_steps, one.windows) for one in items] == [
        (1, 200, 40),
        (2, 200, 40),
    ] * 2
    values = {"losses": [3.0] * 4 + [0.5] * 4, "steps_a_window": 5, "diverged": False}
    rows = [
        body(
            one.run_id,
            of=dict(job.run_setups[one.run_id]),
            kind="learn",
            values=values,
            item=asdict(one),
        )
        for one in items
    ]
    rows = [one | {"workload_digest": conv.digest} for one in rows]
    with here.warehouse.transact() as connection:
        append_records(connection, rows, refresh_id="r", loaded_at=NOON)
    assert "learn" not in {
        item.kind for launch in shop(here, None, past=False) for item in launch.items
    }


def test_a_dry_run_writes_nothing_and_works_before_the_first_refresh(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.home / "warehouse.duckdb").unlink()
    monkeypatch.setattr(campaign, "open_workspace", lambda provider: here)
    launches = campaign.dry_run("local", None)
    again = campaign.dry_run("local", None)
    assert [one.items for one in launches] == [one.items for one in again] != []
    assert list(here.home.rglob("*")) == []


def test_each_lease_has_a_seed_of_its_own_the_same_everywhere() -> None:
    assert campaign.launch_seed(1, "a-00") == 2_011_533_044
    assert (
        len({campaign.launch_seed(seed, lease) for seed in (1, 2) for lease in ("a-00", "a-01")})
        == 4
    )


def failed(here: Workspace, run_id: str, kind: str, **changes: Any) -> dict[str, Any]:
    (conv, _) = here.workloads
    row = body(
        run_id, kind=kind, status="failed", reason="no", values={}, workload_digest=conv.digest
    )
    row["setup"] = setup(workload=conv.name, workload_digest=conv.digest)
    return {key: value for key, value in (row | changes).items() if value is not None}


def without_devices(here: Workspace, folder: Path, night: str) -> None:
    """A probe of one night: its machine lacks its devices, and the record that it leaves is loaded."""
    item = Item(run_id=f"{night}-000", kind="probe", nodes=[0], message_bytes=[1])
    expected = [Devices(name="H100", count=8)]
    plan = Plan(
        lease_id=night, attempt=1, addresses=["a"], expected=expected, workloads=[], items=[item]
    )
    device_check.write_failed_records(
        folder, plan, 0, "this machine was bought for 8 x H100, and torch can use no GPU"
    )
    run_setups = {item.run_id: setup(workload=None, workload_digest=None, cluster="1xp5.48xlarge")}
    loaded = load_mailbox(
        here.warehouse,
        EndedLaunch(mailbox=folder, run_setups=run_setups),
        refresh_id=night,
        now=NOON,
    )
    assert loaded.by_status == {"failed": 1}


def test_only_what_a_node_reported_counts_against_a_workload_and_a_machine_without_devices_against_nothing(
    here: Workspace, tmp_path: Path
) -> None:
    for night in ("x", "y"):
        without_devices(here, tmp_path / night, night)
    assert reads.mart(here.warehouse, "failed_runs").cause.tolist() == ["machine", "machine"]
    assert campaign._failures(here).empty
    bodies = [
        failed(here, "a", "train"),
        failed(
            here, "b", "train", attempt=None
        ),  # a row of the controller's: the mailbox was full, say
        failed(here, "c", "train", workload_digest="its file was another then"),
        failed(
            here, "d", "probe", workload_digest="", setup=setup(workload=None, workload_digest=None)
        ),
    ]
    with here.warehouse.transact() as connection:
        append_records(connection, bodies, refresh_id="r", loaded_at=NOON)
    assert campaign._failures(here)["run_id"].tolist() == ["a", "d"]
    with (
        here.warehouse.transact() as connection
    ):  # as a warehouse is that an older version opened last
        connection.execute(
            "create or replace view failed_runs as select * exclude (cause) from stg_records"
        )
    assert sorted(campaign._failures(here)["run_id"]) == ["a", "d", "x-000", "y-000"]


def test_a_dry_run_after_an_edit_lists_by_the_file_as_it_is(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, pd.DataFrame] = {}
    monkeypatch.setattr(campaign, "open_workspace", lambda provider: here)
    monkeypatch.setattr(
        campaign, "shop", lambda here, offers, frames, *rest: seen.update(frames) or []
    )
    (_, lm) = here.workloads
    noted = pd.DataFrame({"workload": ["conv", "lm"], "digest": ["before the edit", lm.digest]})
    runs = pd.DataFrame(
        {"workload": ["conv", "conv", "lm"], "source": ["srift", "import", "srift"]}
    )
    profiles = pd.DataFrame({"workload": ["conv", "lm"]})
    past = {"workloads": noted, "runs": runs, "profiles": profiles, "probes": pd.DataFrame()}
    monkeypatch.setattr(campaign.reads, "training_frames", lambda *_: past)
    campaign.dry_run("local", None)
    assert seen["runs"].values.tolist() == [["conv", "import"], ["lm", "srift"]]
    assert seen["profiles"]["workload"].tolist() == ["lm"]
    assert len(runs) == 3, "the frames themselves were changed"


def test_a_dry_run_says_why_it_can_buy_nothing(
    here: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "open_workspace", lambda provider: here)
    machines = here.provider
    assert isinstance(machines, DescribedMachines)
    campaign.dry_run("local", None)
    assert capsys.readouterr().err == ""
    machines.unpriced = frozenset(one.name for one in machines.instance_types())
    assert campaign.dry_run("local", None) == []
    assert "no instance type has a price on the spot market" in capsys.readouterr().err


def test_a_workload_whose_requirements_cannot_be_installed_is_said_and_not_bought_and_the_others_are(
    here: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        campaign, "not_installable", lambda settings: {"lm": "requirements of workload lm clash"}
    )
    able = campaign.with_requirements_installed(here)
    assert (
        "workload lm is not measured: requirements of workload lm clash" in capsys.readouterr().err
    )
    assert {
        item.workload
        for launch in shop(able, None, past=False)
        for item in launch.items
        if item.workload
    } == {"conv"}
    ec2 = replace(here, provider=DescribedMachines(name="ec2"))
    assert campaign.with_requirements_installed(ec2).settings == ec2.settings, (
        "its machines install on their own"
    )


def test_a_champion_that_has_not_met_a_workload_a_type_or_its_new_definition_does_not_stop_its_being_bought(
    here: Workspace, tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    launches = shop(install(tmp_path / "more", "conv", "new_workload"), None, asked=champion())
    assert "new_workload" in {item.workload for launch in launches for item in launch.items}
    old, *_ = met = here.provider.offers(NOON)
    for stranger in (
        replace(old.instance_type, name="x.new"),
        replace(old.instance_type, bandwidth_gbps=7.0),
    ):
        others = [one for one in met if one.instance_type.name != stranger.name]
        offers = [*others, replace(old, instance_type=stranger, market="spot", usd_per_hour=0.001)]
        launches = campaign.shop(here, offers, dict(FRAMES), champion(), None)
        bought = {offer.instance_type for launch in launches for offer in launch.cluster.members}
        assert stranger in bought


def test_a_mode_that_physics_alone_predicts_counts_as_never_measured(here: Workspace) -> None:
    conv = replace(here.workloads[0], modes=(Mode(), Mode(strategy="ddp-mstopk")))
    known = campaign._model(here, model(), [conv], here.provider.offers(NOON), measured().runs)
    assert known.workloads == {("conv", Mode())} and "conv" in known.choice_set


def test_expectations_are_of_the_definitions_of_today(here: Workspace) -> None:
    setups = pd.DataFrame(
        {"workload": ["conv", "lm"], "cluster": ["1xs.whole", "1xs.small"], "batch_per_device": 8}
    )
    conv, lm = here.workloads
    offers = here.provider.offers(NOON)

    def expected(workloads: Sequence[Workload], sold: Sequence[Offer] = offers) -> list[bool]:
        expects = campaign._model(here, model(), workloads, sold, measured().runs).expected_step
        assert expects is not None
        return list(expects(setups)["step_s"].notna())

    assert expected([conv, lm]) == [True, True]
    assert expected([replace(conv, digest="edited"), lm]) == [False, True]
    small = next(one.instance_type for one in offers if one.instance_type.name == "s.small")
    slower = replace(small, cores=0.1)
    sold = [
        replace(one, instance_type=slower) if one.instance_type == small else one for one in offers
    ]
    assert expected([conv, lm], sold) == [True, False]


def test_the_measured_size_of_a_gradient_reaches_the_planning(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Workload] = []
    monkeypatch.setattr(
        campaign, "shopping_list", lambda wanted, workloads, *_, **__: seen.extend(workloads) or []
    )
    shop(here, None)
    facts = measured().workloads.set_index("workload")["gradient_bytes"]
    assert {one.name: one.gradient_bytes for one in seen} == dict(facts)
    assert (
        with_facts([replace(seen[0], digest="edited", gradient_bytes=None)], measured().workloads)[
            0
        ]
        != seen[0]
    )


def test_what_a_lost_launch_did_not_measure_is_asked_for_again(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading(monkeypatch)
    monkeypatch.setattr(campaign, "shop", campaign.shop)
    tally = Tally(cap_usd=0.004, stop_at=time.monotonic() + 1000.0)
    asked = list(
        campaign.within(here, None, tally)
    )  # nothing comes home: the same list, a bounded number of times
    assert sum(launch == asked[0] for launch in asked) == campaign.MOST_LISTS > 1
    tally.usd = tally.cap_usd
    assert list(campaign.within(here, None, tally)) == []


def test_what_was_measured_too_long_ago_may_be_measured_again(here: Workspace) -> None:
    def repeated(here: Workspace) -> int:
        return sum(
            key(
                i.workload,
                [launch.cluster.members[n].instance_type.name for n in i.nodes],
                i.batches,
            )
            in keys_of(runs)
            and i.accumulation_steps == 1
            for launch in shop(here, None)
            for i in launch.items
            if i.kind == "train"
        )

    runs = FRAMES["runs"].query("accumulation_steps == 1")
    stale_soon = here.settings.campaign.model_copy(update={"stale_after_days": 1e-6})
    stale = replace(here, settings=here.settings.model_copy(update={"campaign": stale_soon}))
    assert repeated(here) == 0 < repeated(stale)


def test_with_a_champion_a_run_is_bought_for_the_choice_that_it_may_change(here: Workspace) -> None:
    launches = shop(here, None, asked=champion())
    items = [item for launch in launches for item in launch.items]
    assert items and all("expected to change the choice of" in item.reason for item in items)
    assert not {key_of(item, launch) for launch in launches for item in launch.items} & keys_of(
        FRAMES["runs"]
    )
    assert shop(here, None, asked=champion()) == launches
    runs = FRAMES["runs"]
    more = pd.concat([runs, runs.assign(run_id=[f"new-{one}" for one in range(len(runs))])])
    again = campaign.shop(
        here, here.provider.offers(NOON), dict(FRAMES) | {"runs": more}, champion(), None
    )
    assert again != launches, "what was measured since the champion was fitted changed nothing"


def key_of(item: PlannedRun, launch: PlannedLaunch) -> object:
    return key(
        item.workload,
        [launch.cluster.members[n].instance_type.name for n in item.nodes],
        item.batches,
    )


def test_a_campaign_that_stops_with_money_left_says_why(
    here: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading(monkeypatch, FRAMES)
    monkeypatch.setattr(campaign, "shop", lambda *_: [])
    for asked, usd, said in ((champion(), 1.0, True), (champion(), 0.0, False), (None, 1.0, False)):
        assert (
            list(campaign.within(here, asked, Tally(cap_usd=usd, stop_at=time.monotonic() + 100.0)))
            == []
        )
        assert (STOPS in capsys.readouterr().err) == said


def test_with_a_champion_every_launch_is_chosen_by_what_the_last_one_measured(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = shop(here, None, asked=champion())[:1] * 2
    lists: list[int] = []

    def shopped(*_: object) -> list[PlannedLaunch]:
        lists.append(tally.runs)
        return planned if len(lists) <= 6 else []

    reading(monkeypatch, FRAMES)
    monkeypatch.setattr(campaign, "shop", shopped)
    tally = Tally(cap_usd=1.0, stop_at=time.monotonic() + 1000.0)
    for _ in campaign.within(here, champion(), tally):
        tally.runs += 1
    assert lists == [0, 1, 2, 3, 4, 5, 6], "a list for each launch, as long as runs come home"
    lists.clear()
    tally.runs = 0
    assert (
        len(list(campaign.within(here, champion(), tally))) == campaign.MOST_LISTS
    )  # nothing comes home


def stored(here: Workspace, *versions: str) -> Workspace:
    """An installation of ec2 whose warehouse has a run of each version of torch, the last one the newest."""
    provider = DescribedMachines(name="ec2")
    ec2 = replace(
        here,
        provider=provider,
        settings=here.settings.model_copy(update={"ec2": Ec2(bucket="mailbox")}),
    )
    note_definitions(ec2, NOON)
    digests = {one.name: one.digest for one in provider.instance_types()}
    of = setup(
        provider="ec2", workload="conv", cluster="1xs.small", instance_types=["s.small"],
        instance_digests=[digests["s.small"]], workload_digest=here.settings.workload_digest("conv"),
    )  # fmt: skip
    bodies = [
        body(
            f"r{n}",
            of=of,
            workload_digest=of["workload_digest"],
            torch_version=one,
            ended_unix=NOON.timestamp() + n,
        )
        for n, one in enumerate(versions)
    ]
    with here.warehouse.transact() as connection:
        append_records(connection, bodies, refresh_id="r", loaded_at=NOON)
    return ec2


def imaged(here: Workspace, line: str) -> Workspace:
    parameter = here.settings.ec2.ami_parameter.replace("pytorch-2.13", line)
    changed = here.settings.ec2.model_copy(update={"ami_parameter": parameter})
    return replace(here, settings=here.settings.model_copy(update={"ec2": changed}))


def test_an_image_of_another_torch_is_warned_of_with_the_number_of_runs_it_makes_history(
    here: Workspace,
) -> None:
    assert campaign.outdating(replace(here, provider=DescribedMachines(name="ec2"))) == "", (
        "nothing is stored"
    )
    ec2 = stored(here, "2.13.0+cu130", "2.13.1+cu131")
    assert campaign.outdating(ec2) == "" == campaign.outdating(imaged(ec2, "own"))
    warning = campaign.outdating(imaged(ec2, "pytorch-2.14"))
    assert "has torch 2.14; 2 runs measured with torch 2.13 would become history" in warning
    assert (
        campaign.outdating(replace(imaged(ec2, "pytorch-2.14"), provider=DescribedMachines())) == ""
    )


def test_a_workload_whose_data_are_not_to_be_had_costs_no_machine_and_is_not_asked_for_again(
    here: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading(monkeypatch)
    monkeypatch.setattr(campaign, "shop", campaign.shop)
    (here.settings.root / "images").mkdir()
    (here.settings.root / "images" / "1.jpg").touch()
    spec = here.settings.workloads["conv"].model_copy(update={"data": "images"})
    workloads = here.settings.workloads | {"conv": spec}
    here = replace(here, settings=here.settings.model_copy(update={"workloads": workloads}))
    assert here.settings.workload("conv").digest
    (here.settings.root / "images" / "1.jpg").unlink()
    tally = Tally(cap_usd=1.0, stop_at=time.monotonic() + 1000.0)
    asked, alone = [], 0
    for launch in campaign.within(here, None, tally):
        names = {item.trained[0] for item in launch.items if item.workload}
        asked.append(names)
        if names == {"conv"}:  # no machine is asked for: this provider would raise
            alone += 1
            served = campaign.serve_launch(here, launch, f"r-{alone:02d}", tally)
            assert {row["status"] for row in served.rows} == {"failed"} and served.mailbox is None
            assert all("images is empty" in row["reason"] for row in served.rows)
            tally.add(served, Collected(), load_s=0.0)
            assert tally.by_status == {"failed": len(launch.items)}
        else:
            tally.lacking |= {"conv": "images is empty"} if "conv" in names else {}
        if len(asked) > 20:
            break
    assert "conv" in asked[0] and not any("conv" in names for names in asked[1:]), asked
    assert any(names == {"lm"} for names in asked)


def test_runs_without_data_have_rows_and_the_others_go_on(
    here: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    offer = here.provider.offers(NOON)[0]
    runs = [
        PlannedRun(kind="train", workload=name, nodes=(0,), batches=(8,), reason="r", est_s=1.0)
        for name in ("conv", "lm")
    ]
    launch = PlannedLaunch(
        cluster=Cluster.of((1, offer)), items=tuple(runs), est_s=2.0, est_usd=0.1, reason="r"
    )
    whole = campaign.job_of(launch, here.settings, lease_id="r-00", seed=1, deadline_s=9.0)
    job = campaign.without_data(whole, {"conv": "there is no bucket called mine-1"})
    assert [item.workload for item in job.items] == ["lm"] and [
        spec.name for spec, _ in job.files
    ] == ["lm"]
    [row] = job.rows
    assert (row["run_id"], row["status"], row["reason"]) == (
        "r-00-000",
        "failed",
        "there is no bucket called mine-1",
    )
    assert row["setup"]["workload"] == "conv"
    assert "conv is not measured: there is no bucket called mine-1" in capsys.readouterr().err
    assert campaign.without_data(whole, {}) == replace(whole, rows=())


@pytest.mark.parametrize("cause", ["data", "install"])
def test_what_a_machine_could_not_have_just_then_counts_against_no_workload(
    here: Workspace, cause: str
) -> None:
    bodies = [failed(here, "a", "train", cause=cause), failed(here, "b", "train")]
    with here.warehouse.transact() as connection:
        append_records(connection, bodies, refresh_id="r", loaded_at=NOON)
    assert campaign._failures(here)["run_id"].tolist() == ["b"]


def test_the_warning_comes_before_the_first_launch_and_in_a_dry_run(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        campaign, "reporter", lambda: SimpleNamespace(say=said.append, start=said.append, stop=list)
    )
    monkeypatch.setattr(campaign, "allowance", lambda *_: SimpleNamespace(refusal=""))
    ec2 = imaged(stored(here, "2.13.0"), "pytorch-2.14")
    offers = ec2.provider.offers(NOON)
    monkeypatch.setattr(campaign, "current_offers", lambda _: offers)
    tally = Tally(cap_usd=1.0, stop_at=time.monotonic() + 600.0, refresh_id="r")
    with monkeypatch.context() as patched:
        patched.setattr(campaign, "shop", campaign.shop)
        launches = campaign.within(ec2, None, tally)
        assert next(launches) and [one for one in said if "would become history" in str(one)]
        assert next(launches)
    assert len([one for one in said if "would become history" in str(one)]) == 1
    said.clear()
    assert campaign.list_of(ec2, offers, 1.0)
    assert len([one for one in said if "would become history" in str(one)]) == 1
    said.clear()
    assert not campaign.list_of(ec2, offers, 0.0) and not [
        one for one in said if "history" in str(one)
    ]


def refusing(
    here: Workspace, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[PlannedLaunch], bool]
) -> list[PlannedLaunch]:
    """What a campaign asks for, in order, where machines are refused as `refuse` says and no run comes home."""
    reading(monkeypatch)
    monkeypatch.setattr(campaign, "shop", getattr(campaign.shop, "fn", campaign.shop))
    tally, asked = Tally(cap_usd=0.004, stop_at=time.monotonic() + 1000.0), list[PlannedLaunch]()
    for launch in campaign.within(here, None, tally):
        asked.append(launch)
        outcome = "refused: no capacity" if refuse(launch) else "finished"
        tally.add(
            Served(lease_id="r-00", outcome=outcome),
            Collected(),
            load_s=0.0,
            cluster=launch.cluster,
        )
    return asked


def test_after_a_refusal_other_types_are_asked_for(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch is named by what it is of: nothing is measured under the name of the type that was refused."""
    [first, *_] = refusing(here, monkeypatch, lambda launch: False)
    asked = refusing(here, monkeypatch, lambda launch: launch.cluster == first.cluster)
    assert asked[0] == first and len(asked) > 1
    assert not any(campaign.just_refused(one.cluster, [first.cluster]) for one in asked[1:])
    assert any(set(_names(one)) != set(_names(first)) for one in asked[1:]), "of other types"
    nothing = {name: pd.DataFrame() for name in reads.TRAINING_FRAMES}
    anew = campaign.shop(
        here, here.provider.offers(NOON), nothing, None, None, None, [first.cluster]
    )
    assert anew and not any(campaign.just_refused(one.cluster, [first.cluster]) for one in anew)


def test_what_was_refused_comes_again_where_there_is_nothing_else_and_not_for_ever(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    [first, *_] = refusing(here, monkeypatch, lambda launch: False)
    monkeypatch.setattr(
        campaign,
        "shop",
        lambda *words: [] if campaign.just_refused(first.cluster, words[-1]) else [first, first],
    )
    tally, asked = Tally(cap_usd=1.0, stop_at=time.monotonic() + 1000.0), 0
    for launch in campaign.within(here, None, tally):
        asked += 1
        served = Served(lease_id="r-00", outcome="refused: no capacity")
        tally.add(served, Collected(), load_s=0.0, cluster=launch.cluster)
    assert asked == campaign.MOST_LISTS / 2, "every other list, and once of each"


class Choosy(DescribedMachines):
    """Advises about a type that it would not launch."""

    def launches(self, cluster: Cluster) -> str:
        return (
            "not this one"
            if any(one.instance_type.name == NEVER for one in cluster.members)
            else ""
        )


NEVER = "s.whole"


def test_what_an_installation_would_not_launch_is_not_bought_and_still_advised_about(
    here: Workspace,
) -> None:
    def bought(one: Workspace) -> set[str]:
        return {name for launch in shop(one, None, past=False) for name in _names(launch)}

    choosy = replace(here, provider=Choosy())
    assert NEVER in bought(here) and NEVER not in bought(choosy) != set()
    [offer, *_] = [one for one in choosy.provider.offers(NOON) if one.instance_type.name == NEVER]
    assert choosy.fits(Cluster.of((1, offer))) == here.fits(Cluster.of((1, offer)))


def test_what_holds_a_refused_cluster_is_refused_and_what_is_smaller_is_not(
    here: Workspace,
) -> None:
    sold = {(one.instance_type.name, one.market): one for one in here.provider.offers(NOON)}
    [(name, market), *_] = sold
    one = sold[name, market]
    other = next(
        offer for (named, where), offer in sold.items() if named != name and where == market
    )
    elsewhere = replace(one, zone="elsewhere")
    two = Cluster.of((2, one))
    assert "not to be had" in campaign.just_refused(Cluster.of((3, elsewhere), (1, other)), [two])
    assert campaign.just_refused(Cluster.of((1, one), (3, other)), [two]) == ""
    assert campaign.just_refused(Cluster.of((2, replace(one, region="far"))), [two]) == ""
    assert campaign.just_refused(two, []) == ""


def _names(launch: PlannedLaunch) -> list[str]:
    return [one.instance_type.name for one in launch.cluster.members]


def test_what_the_caps_leave_goes_to_a_run_that_loses_a_machine_where_it_is_asked_for(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading(monkeypatch)
    monkeypatch.setattr(campaign, "shop", lambda *_, **__: [])
    (conv, _) = here.workloads
    name = next(one.instance_type.name for one in here.provider.offers(NOON))
    row = {
        "workload": conv.name,
        "cluster": f"2x{name}",
        "layout": "1",
        "batch_per_device": "8",
        "step_s": 0.5,
    }
    row |= {"accumulation_steps": 1, "precision": "fp32", "strategy": "ddp", "switches": "none"}
    other = {"workload": "another", "workload_digest": "x", "status": "measured"}
    marts = {"recommendations": [row], "elastic_runs": [other]}
    monkeypatch.setattr(reads, "mart", lambda _, name, **__: pd.DataFrame(marts[name]))

    def launches(on: bool, seconds: float = 400.0) -> list[PlannedLaunch]:
        asked = here.settings.campaign.model_copy(update={"elastic_runs": on})
        installation = replace(here, settings=here.settings.model_copy(update={"campaign": asked}))
        return list(
            campaign.within(
                installation, None, Tally(cap_usd=1.0, stop_at=time.monotonic() + seconds)
            )
        )

    (launch,) = launches(on=True)
    job = job_of(launch, here.settings, lease_id="l-00", seed=9, deadline_s=60.0)
    (item,) = job.items
    assert (item.kind, item.nodes, item.most_steps, item.checkpoint_every) == (
        "elastic",
        [0, 1],
        60,
        6,
    )
    assert job.lose_after_s == {item.run_id: 12.0}
    assert launches(on=False) == [] == launches(on=True, seconds=30.0)
    mine = {"workload": conv.name, "workload_digest": conv.digest}
    marts["elastic_runs"] = [mine | {"status": "measured"}]
    assert launches(on=True) == [], "once for each definition of a workload"
    marts["elastic_runs"] = [mine | {"status": "failed"}] * 2
    assert len(launches(on=True)) == 1
    marts["elastic_runs"] = [mine | {"status": "failed"}] * 3
    assert launches(on=True) == [], "what failed three times is not bought again"


def test_an_elastic_run_is_refused_where_it_cannot_be(here: Workspace) -> None:
    offers = {
        one.market: replace(one, interruptions_per_hour=0.5) for one in here.provider.offers(NOON)
    }
    run = PlannedRun(
        kind="elastic", workload=here.workloads[0].name, nodes=(0, 1), batches=(8, 8), est_s=60.0
    )

    def refused(*members: Offer) -> str:
        launch = PlannedLaunch(
            cluster=Cluster(members=members), items=(run,), est_s=90.0, est_usd=0.1, reason="r"
        )
        with pytest.raises(SettingsError) as told:
            job_of(launch, here.settings, lease_id="l-00", seed=9, deadline_s=60.0)
        return str(told.value)

    assert "buy it on demand" in refused(offers["spot"], offers["spot"])
    rented = replace(
        offers["spot"], instance_type=replace(offers["spot"].instance_type, provider="ec2")
    )
    assert "take local hosts" in refused(rented, rented)
