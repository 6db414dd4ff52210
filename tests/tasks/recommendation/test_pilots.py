"""Pilots of new, guessed and open choices."""

from dataclasses import asdict, dataclass, replace
from functools import cache

import pandas as pd

from models.domain.workload import Goal, Workload
from models.planner.planner import Recommendation
from models.step_time.model import fit
from tasks.market.offers import with_facts
from tasks.recommendation.answer import _by_gpu
from tasks.recommendation.case import Case
from tasks.recommendation.pilots import measure_first, pilots_for
from tasks.training.registry import Champion
from tasks.workspace.settings import IMPORTED
from tests.benchmarks import synthetic_market as synthetic
from tests.installed import NOON, DescribedMachines, champion, install
from tests.models.guessing import data
from tests.models.planning import NOTHING
from tests.warehouse.builders import write
from warehouse.append import note_workloads

NONE = NOTHING.reindex(columns=["workload", "measured_at"])


def case_of(here, champion, workload, sold=None, runs=NONE):
    known = with_facts(workload, here.mart("workloads"))
    return Case.of(here, champion, known, sold or here.provider.offers(NOON), runs)


def pilots_of(here, champion, workload, *, sold=None):
    case = case_of(here, champion, workload, sold)
    return pilots_for(case, case.plan(), buyable=case.offers, count=3)


DEADLINE = (Goal(goal="cheapest_within_deadline", hours=1.5),)


def test_a_new_workload_has_no_pilots(tmp_path):
    here = install(tmp_path, "conv", "new_workload")
    found = pilots_of(here, champion(), replace(here.workloads[1], goals=DEADLINE))
    assert (found["settled"], found["regret"], found["runs"]) == (None, None, [])
    assert "never measured" in found["reason"]


def test_without_an_offer_that_has_a_price_there_are_no_pilots(tmp_path):
    names = frozenset(kind.name for kind in DescribedMachines().instance_types())
    here = install(tmp_path, "conv", "new_workload", provider=DescribedMachines(unpriced=names))
    for workload in here.workloads:
        found = pilots_of(here, champion(), replace(workload, goals=DEADLINE))
        assert (found["settled"], found["regret"], found["runs"]) == (None, None, [])
        assert "price" in found["reason"]


FACTS = {"workload": "new", "digest": "", "parameters": 50_000_000, "gradient_bytes": 200_000_000}
FACTS |= {"flops_per_sample": 1.5e10}
TYPES = synthetic.types()[:4]  # two with one device, one with four, one with eight


@dataclass
class Gpus(DescribedMachines):
    """Of EC2, four at once."""

    name: str = "ec2"

    def instance_types(self):
        return TYPES

    def offers(self, now):
        return [replace(offer, price_as_of=now) for offer in synthetic.offers(TYPES)]

    def fits(self, cluster):
        return "" if len(cluster.members) <= 4 else "too many"


@cache
def model():
    types = pd.DataFrame([asdict(kind) | {"digest": kind.digest} for kind in TYPES])
    return Champion(version=1, model=fit(replace(data(), instance_types=types), seed=1))


def new_workload(*, hours=48.0, p_required=None, samples=20_000_000):
    goal = Goal(goal="cheapest_within_deadline", hours=hours, p_required=p_required)
    return Workload(
        name="new",
        digest=IMPORTED,
        samples=samples,
        global_batch_least=256,
        global_batch_most=256,
        goals=(goal,),
    )


def home(folder):
    """Where the facts of a network were imported, and no measurement of it."""
    here = install(folder, "conv", provider=Gpus())
    write(here.warehouse, note_workloads, [FACTS], provider="ec2", noted_at=NOON)
    return here


def test_a_guessed_workload_gets_pilots_that_share_its_doubt(tmp_path):
    here = home(tmp_path)
    found = pilots_of(here, model(), new_workload())
    assert found["settled"] is False and len(found["runs"]) == 3
    after = [run["regret_after"] for run in found["runs"]]
    assert found["regret"] > max(after) and after[0] < 0.8 * found["regret"]
    assert {run["kind"] for run in found["runs"]} == {"train"}
    cheap = pilots_of(here, model(), new_workload(samples=100_000))
    assert not cheap["runs"] and "expected to save" in cheap["reason"] and cheap["regret"] > 0


def test_a_deadline_in_doubt_has_pilots_and_a_hopeless_deadline_none(tmp_path):
    here = home(tmp_path)
    fastest = replace(new_workload(), goals=(Goal(goal="fastest"),))
    hours = case_of(here, model(), fastest).plan().rows[0]["hours"]
    doubtful = pilots_of(here, model(), new_workload(hours=hours * 1.05, p_required=0.9))
    assert doubtful["runs"] and doubtful["settled"] is False
    for p_required in (0.9, None):
        hopeless = pilots_of(here, model(), new_workload(hours=0.01, p_required=p_required))
        assert not hopeless["runs"] and hopeless["settled"] is None and hopeless["reason"]


def test_without_a_price_in_the_campaigns_market_the_other_counts(tmp_path):
    """Without an AWS account list prices are known and spot prices are not."""
    here = home(tmp_path)
    sold = [
        offer if offer.market == "on-demand" else replace(offer, usd_per_hour=None)
        for offer in here.provider.offers(NOON)
    ]
    found = pilots_of(here, model(), new_workload(), sold=sold)
    assert found["runs"]
    assert all(run["market"] == "on-demand" and run["usd"] > 0 for run in found["runs"])


def test_a_choice_in_doubt_says_what_to_measure_first(tmp_path):
    here = home(tmp_path)
    row = case_of(here, model(), new_workload()).plan().rows[0] | {"p_best": 0.0}
    found = pilots_of(here, model(), new_workload())
    doubtful = measure_first(row, found)
    assert (row["status"], doubtful["status"]) == ("recommended", "measure_first")
    assert doubtful["reason"].startswith(f"measure {found['runs'][0]['cluster']}")
    assert measure_first(row, found | {"regret": 0.04}) == row
    sure = row | {"p_best": 0.6}
    assert measure_first(sure, found) == sure
    assert measure_first(row, found | {"runs": []}) == row


def test_runs_that_the_model_does_not_know_need_a_fit_and_no_pilot(tmp_path):
    here, runs = home(tmp_path), pd.DataFrame({"workload": ["new"], "measured_at": [NOON]})
    case = case_of(here, model(), new_workload(), runs=runs)
    found = pilots_for(case, Recommendation(rows=[]), buyable=case.offers, count=1)
    assert not found["runs"] and "srift refresh" in found["reason"] and "older" in case.notes[0]


def test_the_best_cluster_of_each_kind_of_gpu_is_compared(tmp_path):
    here = home(tmp_path)
    case = case_of(here, model(), new_workload())
    offers = case.offers
    rows = _by_gpu(case)
    best = {row["device"]: row for row in rows}
    assert best.keys() == {offer.instance_type.device for offer in offers}
    assert [row["rank"] for row in rows] == list(range(1, len(best) + 1))
    assert rows[0]["cluster"] == case.plan(top=1).rows[0]["cluster"]
    for device in best:
        alone = [offer for offer in offers if offer.instance_type.device == device]
        (row, *_) = replace(case, offers=alone, known=alone).plan(top=1).rows
        assert best[device]["cluster"] == row["cluster"]
