"""Check the invariants that must hold after every scenario."""

import json
from collections import defaultdict

from tests.chaos.world import sound

TAKEN = "Server.SpotInstanceTermination"
THROTTLED = {"throttling", "a launch of many tries"}  # their refusals use up the same few tries
ROUNDING_USD = 0.005  # AWS states whole seconds


class Checks:
    """The invariants of a scenario. Each check yields a sentence per violation.

    `runs` and `of_lease` are the rows of raw_runs by run id and by lease id. `ledger` has the rows
    of raw_leases by lease id.
    """

    def __init__(self, campaigns):
        self.campaigns, self.world = campaigns, campaigns.world
        self.runs = defaultdict(list)
        self.of_lease = defaultdict(list)
        for row in campaigns.warehouse.select("raw_runs").to_dict("records"):
            self.runs[row["run_id"]].append(row)
            self.of_lease[row["lease_id"]].append(row)
        self.ledger = defaultdict(list)
        for lease in campaigns.warehouse.select("raw_leases").to_dict("records"):
            self.ledger[lease["lease_id"]].append(lease)

    def complaints(self):
        """Return a sentence for each broken invariant."""
        checks = (self.machines, self.records, self.money, self.outcomes, self.rows, self.leftovers)
        return [*self.campaigns.wrong, *(sentence for check in checks for sentence in check())]

    def machines(self):
        """Check that no machine outlived its deadline or the last run of the reaper."""
        if self.world.overdue:
            yield f"alive past the deadline: {', '.join(sorted(self.world.overdue))}"
        if alive := self.world.alive():
            yield f"alive after the last reaping: {', '.join(node.instance_id for node in alive)}"

    def records(self):
        """Check that the warehouse has each uploaded record exactly once and unchanged.

        A broken record must have a row whose status is not "measured".
        """
        for (lease_id, run_id), contents in self.world.uploaded().items():
            found = self.runs.get(run_id, [])
            if len(found) != 1:
                yield f"record {run_id} of {lease_id} is {len(found)} times in the warehouse"
                continue
            status, ended = found[0]["status"], round(found[0]["measured_at"].timestamp(), 3)
            bodies = [json.loads(content) for content in contents if sound(content)]
            whole = [(body["status"], round(body["ended_unix"], 3)) for body in bodies]
            if whole and (status, ended) not in whole:
                yield f"record {run_id} is {status} in the warehouse: {found[0]['reason']}"
            if not whole and status == "measured":
                yield f"garbage of {run_id} was taken for a measurement"
        for name, rows in [*self.runs.items(), *self.ledger.items()]:
            if len(rows) > 1:
                yield f"{name} is {len(rows)} times in the warehouse"

    def money(self):
        """Check that spending was within the caps, and that the warehouse has all of it.

        `ChaosAws.bills` computes the spending from the lifetimes of the machines.
        """
        bills, month_usd = self.world.bills(), self.world.month_usd
        for refresh_id, cap_usd in self.campaigns.caps.items():
            spent = sum(usd for name, usd in bills.items() if name.startswith(f"{refresh_id}-"))
            if spent > cap_usd:
                yield f"{refresh_id} spent ${spent:.3f} of ${cap_usd:.3f}"
        if sum(bills.values()) > month_usd:
            yield f"the month spent ${sum(bills.values()):.3f} of ${month_usd:.3f}"
        for lease_id, usd in bills.items():
            recorded = [lease["usd"] for lease in self.ledger[lease_id]] or [0.0]
            if not recorded[0] >= usd - ROUNDING_USD:
                yield f"lease {lease_id} cost ${usd:.4f}, and the ledger says {recorded[0]}"

    def outcomes(self):
        """Check that rows explain each refused launch, and each loss of runs or machines."""
        throttled = THROTTLED & {*self.world.kinds}
        for lease_id, (launch, outcome) in self.campaigns.served.items():
            rows = self.of_lease[lease_id]
            if "NotFound" in outcome.rpartition("(")[2] and not throttled:
                yield f"{lease_id} was given up for what it had only just made: {outcome}"
            out_of_time = outcome.startswith("time")
            planned = {f"{lease_id}-{number:03d}" for number in range(len(launch.items))}
            measured = {row["run_id"] for row in rows if row["status"] == "measured"}
            others = {row["status"] for row in rows} - {"measured"}
            if not planned <= measured and not others and not out_of_time:
                yield f"{lease_id} ended {outcome!r}: {planned - measured} are not explained"
            # A machine that was taken before it ran is in the row of its rung.
            before = any(TAKEN in row["reason"] for row in rows if row["status"] == "refused")
            taken = any(machine.reason == TAKEN for machine in self._machines_of(lease_id))
            unexplained = planned - {row["run_id"] for row in rows}
            explained = before or out_of_time or "interrupted" in others
            if taken and unexplained and not explained:
                yield f"{lease_id} lost a machine to the spot market, and no row says so"
        for lease_id in self.world.refused:
            if not {"refused", "failed"} & {row["status"] for row in self.of_lease[lease_id]}:
                yield f"{lease_id} was refused, and no row says so"
        for lease_id in self.campaigns.started.keys() - self.campaigns.served.keys():
            if self._machines_of(lease_id) and lease_id not in self.ledger:
                yield f"{lease_id} had machines when its controller was killed, and has no row"

    def rows(self):
        """Check that each run without a measurement has a reason, and that the reason is true."""
        dumb = {"hangs", "mute", "uploads fail"} & {
            trouble.kind
            for trouble in self.world.troubles
            if trouble.machine < len(self.world.nodes)
        }
        for run_id, (row, *_) in self.runs.items():
            if row["status"] != "measured" and not row["reason"]:
                yield f"{run_id} is {row['status']} without a reason"
            if "fell silent" in row["reason"] and not dumb:
                yield f"{run_id}: {row['reason']}, and every machine had spoken"

    def leftovers(self):
        provider, account = self.campaigns.home.provider, self.world.account
        if left := [lease.lease_id for lease in (*provider.leases(), *provider.ended())]:
            yield f"leases that are not loaded and forgotten: {left}"
        if account.templates or account.groups or account.placements:
            yield "groups or templates were left in the account"

    def _machines_of(self, lease_id):
        machines = self.world.instances.values()
        return [machine for machine in machines if machine.tags["srift:lease"] == lease_id]
