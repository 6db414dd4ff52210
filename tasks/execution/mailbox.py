"""Exchange files with the machines of a launch through the mailbox (a folder or S3 prefix).

`tasks/node/record.py` describes the files.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from models.domain.cluster import Cluster, Offer

from ..node.data_paths import DATA_FILE, FAILED, READY, Download
from ..node.record import Plan, WorkloadFile, write_file, write_json
from ..providers.base import Lease, read_object
from ..workspace.sources import Source
from .outcomes import Row


class WorkloadChanged(Exception):
    """The code of a workload changed after the launch was planned."""


@dataclass(frozen=True, kw_only=True)
class Mailbox:
    """The folder through which this process exchanges files with the machines of a launch.

    `nodes` is the number of machines.
    """

    path: Path
    nodes: int

    def put_workloads(self, files: Iterable[tuple[WorkloadFile, Source]]) -> None:
        """Write each workload's code to the path that its `WorkloadFile` names.

        Raises WorkloadChanged if a workload's code no longer has the planned digest.
        """
        for spec, source in files:
            contents = source.read()
            call = (contents, spec.function, spec.arguments)
            if source.digest(*call, env=spec.env, data=spec.data_digest) != spec.digest:
                raise WorkloadChanged(
                    f"the code of workload {spec.name} changed during the refresh: refresh again"
                )
            if not (self.path / spec.file).exists():  # workloads may share their code
                write_file(self.path / spec.file, source.travels_as(contents))

    def put_setups(self, run_setups: Mapping[str, Any]) -> None:
        """Write the setups of the launch's runs to a file.

        The records of the launch can be loaded into the warehouse only with this file.

        run_setups: {run id: setup}. A setup is {column: value}, such as the run's cluster.
        """
        write_json(self.path / "controller" / "envelopes.json", run_setups)

    def put_plan(self, plan: Plan) -> None:
        """Write the plan of an attempt for the machines. A new attempt number restarts torchrun."""
        write_json(self.path / "plan.json", plan)

    def put_data(self, downloads: Mapping[str, Download]) -> None:
        """Tell machines which data to download, as {digest of the data: download}."""
        if downloads:
            write_json(self.path / DATA_FILE, {"data": downloads})

    def fetched(self, node: int) -> set[str]:
        """Return the digests of the data that machine `node` has downloaded or failed to download.

        For each digest, the machine reports a state, such as
        {"state": "failed", "reason": "the disk is full"}.
        """
        states = self._read(node, DATA_FILE).items()
        return {
            name
            for name, state in states
            if isinstance(state, dict) and state.get("state") in (READY, FAILED)
        }

    def go(self, attempt: int, order: Sequence[int], why: str) -> None:
        """Let the waiting workers of `attempt` start.

        order: the nodes in rank order; empty for the order in the plan.
        why: the reason for the order, for the nodes' logs.
        """
        body = {"attempt": attempt, "order": order, "why": why}
        write_json(self.path / f"go-{attempt}.json", body)

    def done(self) -> None:
        """Tell the agents on the machines to exit."""
        write_json(self.path / "done.json", {})

    def ready_of(self, node: int) -> float:
        """Return the Unix time at which machine `node` reported that it had started.

        The computer or S3 service that stores the mailbox sets the time. Raises OSError if the
        machine has not reported.
        """
        return (self._node(node) / "ready.json").stat().st_mtime

    def has_started(self, node: int, address: str) -> bool:
        """Return True if machine `node` has reported from `address` that it started.

        A report from another address is from a machine that was replaced.
        """
        body = read_object(self._node(node) / "ready.json")
        return body is not None and body.get("address", address) == address

    def armed(self, attempt: int) -> set[int]:
        """Return the nodes whose workers have joined the process group of `attempt`."""
        files = self.path.glob(f"node-*/armed-{attempt}.json")
        return {int(file.parent.name.removeprefix("node-")) for file in files}

    def pairs(self, attempt: int, node: int) -> Any:
        """Return the links between machines as measured in `attempt`, or None without a report.

        The result has the JSON form of `rank_order._Pairs`, and is not validated.

        node: index of the machine with rank 0 in `attempt`. Only this machine reports links.
        """
        return self._read(node, f"armed-{attempt}.json").get("pairs")

    def finished(self, attempt: int) -> list[Row]:
        """Return a report from each machine whose torchrun has ended.

        A report is the content of finished-<attempt>.json, and the index of the machine as `node`.
        """
        reports = [
            (node, self._read(node, f"finished-{attempt}.json")) for node in range(self.nodes)
        ]
        return [{**body, "node": node} for node, body in reports if body]

    def silent(self, since_unix: float) -> set[int]:
        """Return the nodes whose last heartbeat was sent before `since_unix`.

        Nodes that never sent a heartbeat are left out.

        since_unix: a Unix time, by the clock of the computer or S3 service that stores the mailbox.
        """
        return {
            int(file.parent.name.removeprefix("node-"))
            for file in self.path.glob("node-*/heartbeat.json")
            if file.stat().st_mtime < since_unix
        }

    def under_way(self, attempt: int) -> set[str]:
        """Return the ids of the runs that machines report as current in `attempt`."""
        states = [self._read(node, "progress.json") for node in range(self.nodes)]
        return {str(body.get("run_id")) for body in states if body.get("attempt") == attempt}

    def recorded(self) -> set[str]:
        """Return the ids of the runs that have a record file, valid or not."""
        return {file.stem for file in self.path.glob("node-*/records/*.json")}

    def _node(self, node: int) -> Path:
        return self.path / f"node-{node}"

    def _read(self, node: int, name: str) -> Row:
        return read_object(self._node(node) / name) or {}


_FILE = Path("controller") / "machines.json"


class MachineLog:
    """The times at which each machine of a launch was requested, became ready and was lost.

    Times are seconds since the launch began. Start-up times are logged once, in the first attempt.
    A machine that is requested later has no start-up time. If the log cannot be written, no error
    is raised.
    """

    def __init__(self, mailbox: Mailbox, cluster: Cluster) -> None:
        self._mailbox = mailbox
        self._rows = [_row(node, 0, offer, 0.0) for node, offer in enumerate(cluster.members)]

    def write(self) -> None:
        """Write the log to disk, so that it is kept if this process is killed."""
        with suppress(OSError):
            write_json(self._mailbox.path / _FILE, {"machines": self._rows})

    def at_work(self, startup_s: float) -> None:
        """Log the start-up time of each machine. Call this method once, when all workers are ready.

        startup_s: seconds from the request for the machines until now.
        """
        ready = {}
        for row in self._rows:
            with suppress(OSError):
                ready[row["node"]] = self._mailbox.ready_of(row["node"])
        for node, moment in ready.items():
            # the wait for the slowest machine does not count as start-up time
            row = self._newest(node)
            seconds = startup_s - row["from_s"] - max(ready.values()) + moment
            row["startup_s"] = seconds if seconds > 0 else None
        self.write()

    def lost(self, node: int, after_s: float, *, interrupted: bool) -> None:
        """Log that machine `node` was lost `after_s` seconds after the launch began.

        interrupted: True if the provider interrupted the machine.
        """
        self._newest(node).update(interrupted=interrupted, after_s=after_s)
        self.write()

    def ordered(self, node: int, offer: Offer, after_s: float) -> None:
        """Log that a new machine was requested to replace the machine with the index `node`.

        offer: the offer of the new machine.
        after_s: seconds from the start of the launch to the request.
        """
        self._rows.append(_row(node, self._newest(node)["number"] + 1, offer, after_s))
        self.write()

    def _newest(self, node: int) -> Row:
        return next(row for row in reversed(self._rows) if row["node"] == node)


def machine_rows(lease: Lease, provider: str) -> list[Row]:
    """Return a row of the table raw_machines, without `refresh_id`, for each machine of a launch.

    lease: the record of an ended launch.
    """
    rows: list[Row] = (read_object(lease.mailbox / _FILE) or {}).get("machines", [])
    assert lease.ended_at is not None
    whole_s = (lease.ended_at - lease.started_at).total_seconds()
    for row in rows:
        from_s, after_s = row.pop("from_s"), row.pop("after_s")
        until_s = whole_s if after_s is None else min(after_s, whole_s)
        row |= {"lease_id": lease.lease_id, "provider": provider}
        row["asked_at"] = lease.started_at + timedelta(seconds=from_s)
        row["hours"] = max(until_s - from_s, 0.0) / 3600
    return rows


def _row(node: int, number: int, offer: Offer, from_s: float) -> Row:
    return {
        "node": node,
        "number": number,
        "instance_type": offer.instance_type.name,
        "market": offer.market,
        "zone": offer.zone,
        "from_s": from_s,
        "startup_s": None,
        "after_s": None,
        "interrupted": False,
    }
