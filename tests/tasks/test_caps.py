"""What was spent this month, what others hold, and what that leaves for the next launch."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from models.campaign import Launch, Wanted
from models.caps import billed_s
from models.cloud import Cluster
from tasks import caps, serve, shopping
from tasks.installation import Installation
from tasks.prices import note_definitions, snapshot_offers
from tasks.providers.base import EndedLease, Lease
from tasks.providers.ec2_ladder import SPOT_MARGIN
from tasks.tally import Tally
from tests.installed import NOON, DescribedMachines, install
from warehouse.append import append_leases, append_records

PRICE = 0.125  # of s.large on demand, which bounds its price on the spot market
BESIDE = 100 * 0.15 / 730 + 0.005  # an hour of 100 GiB and a public address
LAUNCHED = "refresh-1-00"


@pytest.fixture
def here(tmp_path: Path) -> Installation:
    made = install(tmp_path, provider=DescribedMachines(name="ec2"))
    note_definitions.fn(made, NOON)
    snapshot_offers.fn(made, "refresh-1", NOON)
    return made


def machines(here: Installation) -> DescribedMachines:
    assert isinstance(here.provider, DescribedMachines)
    return here.provider


def launch(here: Installation, est_s: float = 600.0) -> Launch:
    spot = next(o for o in here.provider.offers(NOON) if o.instance_type.name == "s.large" and o.market == "spot")
    item = Wanted(kind="profile", workload="conv", nodes=(0,), batches=(8,), accumulation_steps=1, message_bytes=(),
                  reason="unknown", est_s=est_s)  # fmt: skip
    return Launch(cluster=Cluster.of((2, spot)), items=(item,), est_s=est_s, est_usd=0.001, reason="unknown")


def tally(cap_usd: float = 1.0, spent: float = 0.0) -> Tally:
    return Tally(cap_usd=cap_usd, stop_at=time.monotonic() + 1e6, refresh_id="refresh-1", usd=spent)


def monthly(here: Installation, usd: float) -> Installation:
    ec2 = here.settings.ec2.model_copy(update={"max_usd_per_month": usd})
    return replace(here, settings=here.settings.model_copy(update={"ec2": ec2}))


def spent(here: Installation, usd: float | None, ended_at: datetime, lease_id: str = "old-00", **told: Any) -> None:
    row = {"lease_id": lease_id, "provider": "ec2", "cluster": "1xs.large", "market": "spot",
           "started_at": ended_at - timedelta(hours=1), "ended_at": ended_at, "usd": usd,
           "refresh_id": lease_id.rpartition("-")[0], "outcome": "released"}  # fmt: skip
    with here.warehouse.transact() as connection:
        append_leases(connection, [row | told])


def held(lease_id: str = "other-00", hours: float = 2.0, usd_per_hour: float | None = 5.0, **told: Any) -> Lease:
    words: dict[str, Any] = {"lease_id": lease_id, "provider": "ec2", "cluster": "1xstranger", "controller_pid": 1,
                             "usd_per_hour": usd_per_hour, "started_at": NOON, "controller_alive": True,
                             "deadline_at": NOON + timedelta(hours=hours)}  # fmt: skip
    return Lease(**words | told)


def at_worst(usd_per_hour: float, deadline_s: float, machines: int = 1) -> float:
    return machines * (usd_per_hour + BESIDE) * billed_s(deadline_s, caps.LATE_S) / 3600


def refusal(here: Installation, of: Tally | None = None, now: datetime = NOON) -> str:
    return caps.allowance(here, launch(here), of or tally(), now).refusal


def test_a_launch_lasts_as_long_as_it_wishes_where_money_is_plenty(here: Installation) -> None:
    allowed = caps.allowance(here, launch(here), tally(), NOON)
    assert allowed.refusal == "" and allowed.deadline_s == 2 * 600.0 + caps.EC2_START_UP_S
    assert allowed.worst_usd == pytest.approx(at_worst(PRICE, allowed.deadline_s, machines=2))


def test_patience_is_part_of_what_a_launch_takes_and_ends_in_time(
    here: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_s = 2 * 600.0 + caps.EC2_START_UP_S
    assert caps.patience_s(here, launch(here), tally(), whole_s) == 150.0, "a quarter of what it takes"
    assert caps.patience_s(here, launch(here), tally(), whole_s - 500.0) == 100.0, "what the caps left of its deadline"
    assert caps.patience_s(here, launch(here), tally(), 600.0 + caps.EC2_LEAST_START_UP_S) == 0.0
    short = launch(here, 60.0)
    for left_s, patient_s in ((1000.0, 15.0), (65.0, 5.0), (50.0, 0.0)):
        late = replace(tally(), stop_at=time.monotonic() + left_s)
        assert caps.patience_s(here, short, late, whole_s) == pytest.approx(patient_s, abs=1.0), "the campaign's end"
    monkeypatch.setattr(here.provider, "name", "local")
    deadline_s = caps.allowance(here, launch(here), tally(), NOON).deadline_s
    assert caps.patience_s(here, launch(here), tally(), deadline_s) == 600.0
    late = replace(tally(), stop_at=time.monotonic() + 1300.0)
    assert caps.patience_s(here, launch(here), late, deadline_s) == pytest.approx(1300.0 / 3, abs=1.0), "a third"
    assert deadline_s == 3 * 600.0 + caps.START_UP_S, "with room for the patience beside the time that was there before"


def test_the_campaigns_cap_counts_what_it_has_spent(here: Installation) -> None:
    assert refusal(here, tally(0.20)) == ""
    assert "this campaign's cap 0.20 (0.10 spent" in refusal(here, tally(0.20, spent=0.10))


def test_the_months_cap_counts_the_ledger_of_this_month_and_no_other_provider(here: Installation) -> None:
    here = monthly(here, 10.0)
    spent(here, 9.95, NOON.replace(day=1, hour=0, minute=0), "a-00")
    assert "max_usd_per_month 10.00 (9.95 spent" in refusal(here)
    assert refusal(here, now=datetime(2026, 12, 1, tzinfo=UTC)) == "", "a new month"


def test_last_month_and_other_providers_are_not_this_months_spending(here: Installation) -> None:
    here = monthly(here, 10.0)
    spent(here, 9.95, datetime(2026, 10, 31, 23, 59, tzinfo=UTC), "a-00")
    spent(here, 9.95, NOON, "b-00", provider="local")
    assert refusal(here) == ""


def test_a_lease_that_began_last_month_and_ended_in_this_one_counts(here: Installation) -> None:
    here = monthly(here, 10.0)
    spent(here, 9.95, datetime(2026, 11, 1, 0, 1, tzinfo=UTC), "a-00")
    assert "9.95 spent" in refusal(here)


def test_machines_that_another_controller_holds_count_to_their_deadline(here: Installation) -> None:
    here = monthly(here, 11.4)
    machines(here).held = [held()]
    expected = at_worst(5.0, 7200.0)
    assert f"({0:.2f} spent, {expected:.2f} committed)" in refusal(here)
    machines(here).held = [held(hours=0.5)]
    assert refusal(here) == ""


def test_this_campaigns_own_machines_that_would_not_end_count_against_its_cap_too(here: Installation) -> None:
    machines(here).held = [held(LAUNCHED, hours=0.1)]
    assert "this campaign's cap" in refusal(here, tally(0.5))
    machines(here).held = [held("other-00", hours=0.1)]
    assert refusal(here, tally(0.5)) == "", "another campaign's cap is its own"


def test_a_held_lease_counts_at_the_highest_price_of_its_types(here: Installation) -> None:
    here = monthly(here, 0.30)
    machines(here).held = [held(cluster="1xs.large", usd_per_hour=0.01, hours=1.0)]
    assert f"{at_worst(PRICE, 3600.0):.2f} committed" in refusal(here)


def test_what_ended_and_is_not_in_the_ledger_yet_counts(here: Installation, tmp_path: Path) -> None:
    here = monthly(here, 10.0)
    over = EndedLease(lease_id="o-00", cluster="1xs.large", market="spot", started_at=NOON, ended_at=NOON, usd=9.95,
                      outcome="reaped", mailbox=tmp_path)  # fmt: skip
    machines(here).over = [over]
    assert "9.95 committed" in refusal(here)
    machines(here).over = [replace(over, usd=None)]
    assert "nobody knows" in refusal(here)


def test_where_spending_is_not_known_nothing_more_is_spent(here: Installation) -> None:
    spent(here, None, NOON, "a-00")
    assert "refresh a spent this month is not known" in refusal(here)
    machines(here).held = [held(usd_per_hour=None)]
    assert refusal(here) != ""


def test_spot_alone_is_bound_by_what_is_bid_and_so_are_machines_that_are_held(here: Installation) -> None:
    ec2 = here.settings.ec2.model_copy(update={"markets": ("spot",)})
    here = replace(here, settings=here.settings.model_copy(update={"ec2": ec2}))
    offers = [one for one in here.provider.offers(NOON) if one.market == "spot"]
    dearest = max(o.usd_per_hour or 0.0 for o in offers if o.instance_type.name == "s.large")
    allowed = caps.allowance(here, launch(here), tally(), NOON, offers)
    assert allowed.refusal == ""
    assert allowed.worst_usd == pytest.approx(at_worst(SPOT_MARGIN * dearest, allowed.deadline_s, machines=2))
    machines(here).held = [held(cluster="1xs.large", usd_per_hour=dearest)]
    (_, month), _ = caps.caps_of(here, tally(), NOON, offers)
    assert month.committed_usd == pytest.approx(at_worst(SPOT_MARGIN * dearest, 7200.0))


def test_a_type_without_a_price_is_not_launched(here: Installation) -> None:
    machines(here).unpriced = frozenset({"s.large"})
    snapshot_offers.fn(here, "refresh-2", NOON)
    assert "not known" in refusal(here)


def test_before_the_first_refresh_nothing_was_spent(here: Installation) -> None:
    (here.home / "warehouse.duckdb").unlink()
    assert caps.spent_this_month(here, NOON) == (0.0, "")


def test_money_on_this_machine_is_illustrative(tmp_path: Path) -> None:
    made = install(tmp_path)
    made = monthly(made, 0.0)
    assert caps.allowance(made, launch(made), tally(0.0), NOON).refusal == ""


def test_a_launch_that_does_not_fit_asks_for_no_machine_and_leaves_a_row(here: Installation) -> None:
    served = serve.serve_launch.fn(here, launch(here), LAUNCHED, tally(0.05))  # acquiring would raise AssertionError
    assert served.outcome.startswith("refused: at worst it would cost")
    (row,) = served.rows
    assert row["status"] == "refused" and "this campaign's cap" in row["reason"]
    with here.warehouse.transact() as connection:
        body = row | {"ended_unix": NOON.timestamp()}
        assert append_records(connection, [body], refresh_id="refresh-1", loaded_at=NOON) == 1


def test_the_deadline_that_the_caps_allow_is_the_one_that_machines_get(
    here: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float]] = []
    monkeypatch.setattr(serve, "serve", lambda provider, job, **_: seen.append((job.deadline_s, job.patience_s)))
    serve.serve_launch.fn(here, launch(here), LAUNCHED, tally(1.0))
    serve.serve_launch.fn(here, launch(here), LAUNCHED, tally(0.20))
    (longest_s, patience_s), (deadline_s, less_s) = seen
    assert patience_s == 150.0 and less_s == caps.patience_s(here, launch(here), tally(0.20), deadline_s) < 150.0
    assert longest_s == 2 * 600.0 + caps.EC2_START_UP_S
    assert 600.0 + caps.EC2_LEAST_START_UP_S <= deadline_s < 2 * 600.0 + caps.EC2_START_UP_S
    assert at_worst(PRICE, deadline_s, machines=2) <= 0.20


def test_a_list_that_no_cap_can_pay_ends_with_the_reason_and_a_smaller_launch_is_still_made(
    here: Installation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lists: list[list[Launch]] = []
    monkeypatch.setattr(shopping, "shop", lambda *_: lists.pop(0) if lists else [])
    large, small = launch(here, 6000.0), launch(here, 30.0)
    lists[:] = [[large, small]]
    assert list(shopping.within(here, None, tally(0.20))) == [small]
    lists[:] = [[large], [small]]
    assert list(shopping.within(here, None, tally(0.20))) == []
    assert "not launched: at worst it would cost" in capsys.readouterr().err


def test_a_lease_that_is_over_counts_before_what_it_measured_is_here(here: Installation, tmp_path: Path) -> None:
    class Slow(DescribedMachines):
        def closed(self) -> list[EndedLease]:
            return [EndedLease(lease_id="o-00", cluster="1xs.large", market="spot", started_at=NOON, ended_at=NOON,
                               usd=9.95, outcome="released", mailbox=tmp_path)]  # fmt: skip

    here = replace(monthly(here, 10.0), provider=Slow(name="ec2"))
    assert "9.95 committed" in refusal(here)
