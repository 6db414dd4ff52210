"""What a refresh buys: within the caps, and without starting or writing anything in a dry run."""

import time
from dataclasses import replace

import pandas as pd

from models.domain.cluster import Cluster
from models.domain.workload import Mode
from tasks.campaign import campaign, dry_run
from tasks.campaign.spending import Tally
from tasks.execution.collect import Collected
from tasks.execution.job import Served
from tasks.workspace.workspace import Workspace
from tests.installed import NOON, DescribedMachines, champion, changed, measured, model
from tests.warehouse.builders import body, load, recommendation, setup
from warehouse import reads

FRAMES = {name: getattr(measured(), name) for name in reads.TRAINING_FRAMES}
NOTHING = {name: pd.DataFrame() for name in reads.TRAINING_FRAMES}
SPARSE = Mode(strategy="ddp-mstopk")


def reading(monkeypatch, frames=NOTHING):
    """A campaign reads the offers of noon and these frames of the past."""
    monkeypatch.setattr(campaign, "current_offers", lambda here: here.provider.offers(NOON))
    monkeypatch.setattr(reads, "training_frames", lambda *_: frames)


def shop(here, *, known=None, frames=NOTHING):
    return campaign.shop(here, here.provider.offers(NOON), frames, known, Tally.of(here, None, "r"))


def types_of(launch):
    return {offer.instance_type.name for offer in launch.cluster.members}


def tally(cap_usd=1.0, seconds=1000.0):
    return Tally(cap_usd=cap_usd, stop_at=time.monotonic() + seconds)


def test_a_compressed_strategy_is_shown_to_learn_once(here, monkeypatch):
    conv, lm = here.workloads
    sparse = {"conv": replace(conv, modes=(Mode(), SPARSE)), "lm": lm}
    monkeypatch.setattr(campaign, "with_facts", lambda workload, _: sparse[workload.name])
    launch = shop(here)[0]
    assert [(item.kind, item.mode, item.seed) for item in launch.items] == [
        ("learn", mode, seed) for mode in (Mode(), SPARSE) for seed in (1, 2)
    ]
    failed = {"workload": "conv", "workload_digest": conv.digest, **SPARSE._asdict()}
    failed |= {"status": "failed", "cause": "", "cluster": "", "layout": "", "batch_per_device": ""}
    known = {"learning": pd.DataFrame([failed] * 6)}
    stored = Workspace.mart
    monkeypatch.setattr(
        Workspace,
        "mart",
        lambda here, name, **equal: known[name] if name in known else stored(here, name, **equal),
    )
    assert "learn" not in {item.kind for launch in shop(here) for item in launch.items}


def test_a_dry_run_without_prices_says_why_it_plans_nothing(here, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "open_workspace", lambda provider: here)
    machines = here.provider
    machines.unpriced = frozenset(kind.name for kind in machines.instance_types())
    assert dry_run.dry_run("local", None) == [] and capsys.readouterr().err


def test_only_failures_of_the_run_itself_count(here):
    conv, _ = here.workloads

    def failed(run_id, **changes):
        of = setup(workload="conv", workload_digest=conv.digest)
        row = body(run_id, of=of, status="failed", reason="no", values={})
        row |= {"workload_digest": conv.digest} | changes
        return {key: value for key, value in row.items() if value is not None}

    probe = setup(workload=None, workload_digest=None)
    load(
        here.warehouse,
        failed("counts"),
        failed("probe", kind="probe", workload_digest="", setup=probe),
        failed("of the controller", attempt=None),
        failed("of another file", workload_digest="another"),
        failed("machine", cause="machine"),
    )
    assert set(campaign._failures(here)["run_id"]) == {"counts", "probe"}


def test_a_dry_run_forgets_measurements_of_an_edited_workload(here):
    _, lm = here.workloads
    past = {
        "workloads": pd.DataFrame({"workload": ["conv", "lm"], "digest": ["old", lm.digest]}),
        "runs": pd.DataFrame({"workload": ["conv", "lm"]}),
        "profiles": pd.DataFrame({"workload": ["conv"]}),
        "probes": pd.DataFrame({"cluster": ["2xs.small"]}),
    }
    today = campaign._of_today(past, here.workloads)
    assert today["runs"]["workload"].tolist() == ["lm"] and len(today["probes"]) == 1


def test_the_model_knows_measured_modes_and_types_as_they_are_defined_today(here):
    conv, lm = here.workloads
    offers = here.provider.offers(NOON)

    def known(workloads, sold):
        return campaign._model(here, model(), workloads, sold, measured().runs)

    # a mode that physics alone predicts was never measured
    today = known([replace(conv, modes=(Mode(), SPARSE)), lm], offers)
    assert today.workloads == {("conv", Mode()), ("lm", Mode())}
    assert today.choice_set.keys() == {"conv", "lm"}
    slower = [
        replace(offer, instance_type=replace(offer.instance_type, cores=0.1))
        if offer.instance_type.name == "s.small"
        else offer
        for offer in offers
    ]
    later = known([replace(conv, digest="edited"), lm], slower)
    assert later.workloads == {("lm", Mode())} and later.types == today.types - {"s.small"}


def test_with_a_champion_every_launch_is_chosen_anew(here, monkeypatch):
    planned = shop(here, known=champion(), frames=FRAMES)[:1] * 2
    lists = []

    def shopped(*_):
        lists.append(spent.runs)
        return planned if len(lists) <= 6 else []

    reading(monkeypatch, FRAMES)
    monkeypatch.setattr(campaign, "shop", shopped)
    spent = tally()
    for _ in campaign.within(here, champion(), spent):
        spent.runs += 1
    assert lists == list(range(7))


def test_when_the_campaigns_time_is_up_one_note_says_so(here):
    over = tally(seconds=-1.0)
    launches = shop(here)
    assert len(launches) > 1 and not list(campaign.affordable(here, launches, over))
    assert len(over.notes) == 1 and not over.notes[0].startswith(launches[0].cluster.name)


def test_an_image_of_another_torch_is_warned_about(here, monkeypatch):
    ec2 = replace(here, provider=DescribedMachines(name="ec2"))
    lines = pd.DataFrame({"torch_line": ["2.13"], "runs": [2]})
    monkeypatch.setattr(Workspace, "mart", lambda *_: lines)
    assert campaign.torch_mismatch(ec2) == ""
    parameter = ec2.settings.ec2.ami_parameter.replace("pytorch-2.13", "pytorch-2.14")
    other = changed(ec2, "ec2", ami_parameter=parameter)
    assert "2 runs with torch 2.13" in campaign.torch_mismatch(other)
    assert campaign.torch_mismatch(replace(other, provider=DescribedMachines())) == ""


def test_a_workload_without_its_data_costs_no_machine_and_is_not_bought_again(here, monkeypatch):
    reading(monkeypatch)
    image = here.settings.root / "images/1.jpg"
    image.parent.mkdir()
    image.touch()
    conv = here.settings.workloads["conv"].model_copy(update={"data": "images"})
    settings = here.settings.model_copy(update={"workloads": {"conv": conv}})
    here = replace(here, settings=settings)
    assert here.settings.workload("conv").digest
    image.unlink()
    spent, served = tally(), []
    for launch in campaign.within(here, None, spent):  # acquiring a machine would raise
        needing = replace(launch, items=tuple(item for item in launch.items if item.workload))
        served.append(campaign.serve_launch(here, needing, "r-00", spent))
        spent.add(served[-1], Collected(), launch.cluster)
    assert [cluster.mailbox for cluster in served] == [None] and set(spent.lacking) == {"conv"}


def bought(here, monkeypatch, refuse):
    """Launches in order, where machines are refused as `refuse` says and no run is measured."""
    reading(monkeypatch)
    spent, launches = tally(0.004), []
    for launch in campaign.within(here, None, spent):
        launches.append(launch)
        served = Served(lease_id="r-00", unavailable=refuse(launch))
        spent.add(served, Collected(), launch.cluster)
    return launches


def test_lost_launches_are_bought_again_and_refused_ones_only_if_there_is_nothing_else(
    here, monkeypatch
):
    first, *_ = lost = bought(here, monkeypatch, lambda launch: False)
    assert lost.count(first) == campaign.MOST_LISTS
    others = bought(here, monkeypatch, lambda launch: launch.cluster == first.cluster)[1:]
    assert not any(campaign.just_refused(other.cluster, [first.cluster]) for other in others)
    assert any(types_of(other) != types_of(first) for other in others)

    def shopped(*words):
        return [] if campaign.just_refused(first.cluster, words[-1].refused) else [first, first]

    monkeypatch.setattr(campaign, "shop", shopped)
    launches = bought(here, monkeypatch, lambda launch: True)
    assert len(launches) == campaign.MOST_LISTS / 2  # every other list, and once of each


def test_what_holds_a_refused_cluster_is_refused(here):
    offers = here.provider.offers(NOON)
    offer = offers[0]
    other = next(o for o in offers if o.instance_type != offer.instance_type)
    two = Cluster.of((2, offer))
    larger = Cluster.of((3, replace(offer, zone="elsewhere")), (1, other))
    assert campaign.just_refused(larger, [two])
    assert not campaign.just_refused(Cluster.of((1, offer), (3, other)), [two])
    assert not campaign.just_refused(Cluster.of((2, replace(offer, region="far"))), [two])


def test_the_rest_of_the_caps_pays_for_elastic_runs_if_wanted(here, monkeypatch):
    reading(monkeypatch)
    monkeypatch.setattr(campaign, "shop", lambda *_: [])
    conv, _ = here.workloads
    row = recommendation(workload="conv", cluster="2xs.small")
    elastic = changed(here, "campaign", elastic_runs=True)

    def launches(*statuses, workspace=elastic, seconds=400.0):
        runs = {"workload": "conv", "workload_digest": conv.digest, "status": list(statuses)}
        marts = {"recommendations": pd.DataFrame([row]), "elastic_runs": pd.DataFrame(runs)}
        marts["learning"] = pd.DataFrame({"workload": []})
        stored = lambda _, name, workload="conv": marts[name].query("workload == @workload")  # noqa: E731
        monkeypatch.setattr(Workspace, "mart", stored)
        return list(campaign.within(workspace, None, tally(1.0, seconds)))

    [launch] = launches()
    assert [(item.kind, item.nodes) for item in launch.items] == [("elastic", (0, 1))]
    assert launches(workspace=here) == launches(seconds=30.0) == launches("measured") == []
    assert len(launches("failed", "failed")) == 1 and launches(*["failed"] * 3) == []
