"""A line of the shopping list becomes items with run ids, files with digests, and envelopes that say where from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from models.campaign import Launch, Wanted
from models.cloud import Cluster
from tasks.envelopes import as_got
from tasks.installation import Installation
from tasks.jobs import START_UP_S, job_of
from tasks.settings import SettingsError
from tests.installed import NOON, DescribedMachines, install


def wanted(kind: str, workload: str, nodes: tuple[int, ...], batches: tuple[int, ...]) -> Wanted:
    sizes = (4096,) if kind == "probe" else ()
    return Wanted(
        kind=kind,
        workload=workload,
        nodes=nodes,
        batches=batches,
        accumulation_steps=2 if kind == "train" else 1,
        message_bytes=sizes,
        reason=f"a {kind}",
        est_s=1.0,
    )


@pytest.fixture
def here(tmp_path: Path) -> Installation:
    return install(tmp_path, provider=DescribedMachines(unpriced=frozenset({"n.medium"})))


def launch(here: Installation) -> Launch:
    offers = {o.instance_type.name: o for o in here.provider.offers(NOON) if o.market == "spot"}
    cluster = Cluster.of((1, offers["s.large"]), (2, offers["s.small"]), (1, offers["n.medium"]))
    items = (
        wanted("train", "conv", (0, 1, 2), (32, 8, 8)),
        wanted("profile", "lm", (1,), (2, 4, 8)),
        wanted("probe", "", (0, 3), ()),
    )
    return Launch(cluster=cluster, items=items, est_s=10.0, est_usd=0.1, reason="three runs")


def test_items_are_numbered_within_the_lease_and_carry_what_nodes_need(here: Installation) -> None:
    job = job_of(launch(here), here.settings, lease_id="L-00", seed=5, deadline_s=60.0)
    assert [item.run_id for item in job.items] == ["L-00-000", "L-00-001", "L-00-002"]
    assert [item.nodes for item in job.items] == [[0, 1, 2], [1], [0, 3]]
    assert job.items[0].batches == [32, 8, 8] and job.items[0].accumulation_steps == 2
    assert job.items[2].message_bytes == [4096] and job.items[2].workload == ""
    assert {item.seed for item in job.items} == {5}
    assert job.deadline_s == 60.0 + START_UP_S


def test_each_workload_travels_once_as_it_is_now(here: Installation) -> None:
    before = job_of(launch(here), here.settings, lease_id="L", seed=5, deadline_s=60.0)
    assert {spec.name: path.name for spec, path in before.files} == {"conv": "work.py", "lm": "work.py"}
    assert {spec.function for spec, _ in before.files} == {"build"}
    (here.settings.root / "work.py").write_text("def build(): ...\n")
    after = job_of(launch(here), here.settings, lease_id="L", seed=5, deadline_s=60.0)
    assert {spec.digest for spec, _ in before.files}.isdisjoint(spec.digest for spec, _ in after.files)
    assert after.envelopes["L-000"]["workload_digest"] == {s.name: s.digest for s, _ in after.files}["conv"]


def test_envelopes_describe_the_hosts_that_take_part_and_no_others(here: Installation) -> None:
    envelopes = job_of(launch(here), here.settings, lease_id="L", seed=5, deadline_s=60.0).envelopes
    train, profile, probe = (envelopes[f"L-00{n}"] for n in range(3))
    assert (train["cluster"], train["batch_per_device"], train["layout"]) == ("1xs.large+2xs.small", "32+8+8", "1")
    assert train["instance_types"] == ["s.large", "s.small", "s.small"]
    digests = {one.name: one.digest for one in here.provider.instance_types()}
    assert train["instance_digests"] == [digests[name] for name in train["instance_types"]]
    assert (train["market"], train["zone"], train["region"]) == ("spot", "a", "here")
    assert train["usd_per_hour"] == pytest.approx(0.4 * (0.125 + 2 * 0.030))
    assert (profile["cluster"], profile["batch_per_device"]) == ("1xs.small", None)
    assert probe["cluster"] == "1xs.large+1xn.medium" and probe["workload"] is None
    assert probe["usd_per_hour"] is None, "one unknown price makes the whole unknown"
    assert {one["reason_wanted"] for one in envelopes.values()} == {"a train", "a profile", "a probe"}


def test_a_file_that_is_gone_is_named_before_anything_starts(here: Installation) -> None:
    (here.settings.root / "work.py").unlink()
    with pytest.raises(SettingsError, match=r"no file .*work\.py"):
        job_of(launch(here), here.settings, lease_id="L", seed=5, deadline_s=60.0)


def test_devices_travel_to_the_nodes_and_stand_in_the_layout(here: Installation) -> None:
    whole = launch(here)
    run = replace(wanted("train", "conv", (0, 1), (32, 8)), devices=(4, 1))
    job = job_of(replace(whole, items=(run,)), here.settings, lease_id="L", seed=5, deadline_s=60.0)
    assert job.items[0].devices == [4, 1] and job.items[0].used == [4, 1]
    assert job.envelopes["L-000"]["layout"] == "4+1"


def test_an_envelope_is_rewritten_by_the_machines_that_were_really_got(here: Installation) -> None:
    job = job_of(launch(here), here.settings, lease_id="L", seed=5, deadline_s=60.0)
    dearer = tuple(replace(one, market="on-demand", zone="b", usd_per_hour=1.0) for one in job.cluster.members)
    got = as_got(job.envelopes, job.items, Cluster(members=(job.cluster.members[0], *dearer[1:])))
    assert (got["L-001"]["market"], got["L-001"]["zone"], got["L-001"]["usd_per_hour"]) == ("on-demand", "b", 1.0)
    assert got["L-000"]["market"] == "on-demand+spot" and got["L-000"]["usd_per_hour"] == pytest.approx(2.05)
    same = {name: value for name, value in got["L-001"].items() if name not in ("market", "zone", "usd_per_hour")}
    assert same.items() <= job.envelopes["L-001"].items()
    assert as_got(job.envelopes, job.items, job.cluster) == job.envelopes
