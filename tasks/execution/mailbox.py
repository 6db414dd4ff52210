"""The controller's half of the mailbox (`node/record.py` describes the files), and the log of a
launch's machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from models.domain.cluster import Cluster, Offer

from ..node.data import FILE as DATA_FILE
from ..node.record import INSTALL, Plan, WorkloadFile, write_file, write_json
from ..providers.base import EndedLease, json_of_node
from ..workspace.sources import Source
from .outcomes import Row

SILENT_AFTER_S = 30.0  # a node at a fifth of a core can be late by seconds, never by this much


class WorkloadChanged(Exception):
    """A workload's code is no longer the code that the launch was made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """A directory shared by the controller and `nodes` machines."""

    path: Path
    nodes: int

    def put_workloads(self, files: Iterable[tuple[WorkloadFile, Source]]) -> None:
        """Put each workload's code where its `WorkloadFile` says. Raises WorkloadChanged."""
        for spec, source in files:
            with suppress(FileNotFoundError):
                contents = source.read()
                called = (contents, spec.function, spec.arguments)
                if source.digest(*called, env=spec.env, data=spec.data_digest) == spec.digest:
                    if not (self.path / spec.file).exists():
                        write_file(self.path / spec.file, source.travels_as(contents))
                    continue
            raise WorkloadChanged(f"code of workload {spec.name} was just changed: refresh again")

    def put_setups(self, run_setups: Mapping[str, Any]) -> None:
        """Put what a collector needs to load the runs."""
        write_json(self.path / "controller" / "envelopes.json", dict(run_setups))

    def put_plan(self, plan: Plan) -> None:
        """Start another attempt."""
        write_json(self.path / "plan.json", plan)

    def put_data(self, addresses: Mapping[str, str]) -> None:
        """Let the machines fetch data from those addresses, by digest."""
        if addresses:
            write_json(self.path / DATA_FILE, {"data": dict(addresses)})

    def data_of(self, node: int) -> dict[str, Row]:
        """Return what the machine reports of the data that it fetches, by digest."""
        states = self._read(node, DATA_FILE)
        return {digest: state for digest, state in states.items() if isinstance(state, dict)}

    def go(self, attempt: int, order: Sequence[int] = (), why: str = "") -> None:
        """Let the armed workers start. Machines send to each other in `order`; empty: as they
        come.
        """
        body = {"attempt": attempt, "order": list(order), "why": why}
        write_json(self.path / f"go-{attempt}.json", body)

    def done(self) -> None:
        """Let the agents leave."""
        write_json(self.path / "done.json", {})

    def ready_of(self, node: int) -> float:
        """When the machine reported itself, by the store's clock. Raises OSError before it has."""
        return (self._node(node) / "ready.json").stat().st_mtime

    def reported(self, node: int, address: str) -> bool:
        """True if the machine at `address`, no earlier one in its place, has reported itself."""
        body = read_object(self._node(node) / "ready.json")
        return body is not None and body.get("address", address) == address

    def forget(self, node: int) -> None:
        """Delete what a replaced machine reported of itself; its records and logs stay."""
        armed = (file.name for file in self._node(node).glob("armed-*.json"))
        for name in ("heartbeat.json", "progress.json", "notice.json", DATA_FILE, *armed):
            (self._node(node) / name).unlink(missing_ok=True)

    def armed(self, attempt: int) -> set[int]:
        """Nodes whose workers wait for go, or have been let go."""
        files = self.path.glob(f"node-*/armed-{attempt}.json")
        return {int(file.parent.name.removeprefix("node-")) for file in files}

    def pairs(self, attempt: int, node: int) -> Row:
        """What `node`, the first of the attempt, measured of links between machines."""
        found = self._read(node, f"armed-{attempt}.json").get("pairs")
        return found if isinstance(found, dict) else {}

    def finished(self, attempt: int) -> list[Row]:
        """The content of each `finished-<attempt>.json`, and `node`."""
        found = [(node, self._read(node, f"finished-{attempt}.json")) for node in range(self.nodes)]
        return [{**body, "node": node} for node, body in found if body]

    def silent(self, now_unix: float) -> set[int]:
        """Nodes without a heartbeat for SILENT_AFTER_S, by the store's clock."""
        found = set()
        for node in range(self.nodes):
            with suppress(FileNotFoundError):  # none before the first
                beat = (self._node(node) / "heartbeat.json").stat().st_mtime
                if now_unix - beat > SILENT_AFTER_S:
                    found.add(node)
        return found

    def under_way(self, attempt: int) -> set[str]:
        """Runs that nodes say they have come to."""
        found = [self._read(node, "progress.json") for node in range(self.nodes)]
        return {str(body.get("run_id")) for body in found if body.get("attempt") == attempt}

    def recorded(self) -> set[str]:
        """Ids of the runs that have a record, whole or not: loading decides which are sound."""
        return {file.stem for file in self._records()}

    def not_installed(self) -> dict[str, str]:
        """Digests of workloads whose requirements a machine could not install, with the reason."""
        bodies = [read_object(file) or {} for file in self._records()]
        return {
            str(body.get("workload_digest")): str(body.get("reason"))
            for body in bodies
            if body.get("cause") == INSTALL
        }

    def _records(self) -> Iterable[Path]:
        return self.path.glob("node-*/records/*.json")

    def _node(self, node: int) -> Path:
        return self.path / f"node-{node}"

    def _read(self, node: int, name: str) -> Row:
        return read_object(self._node(node) / name) or {}


def read_object(file: Path) -> Row | None:
    """A JSON object; None where it is not there yet or is nothing that a node of ours writes."""
    try:
        body = json_of_node(file.read_text())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
        return None
    return body if isinstance(body, dict) else None


_FILE = Path("controller") / "machines.json"


class MachineLog:
    """The machines of one launch in rank order, each since it was requested. A full disk costs the
    log alone.
    """

    def __init__(self, mailbox: Mailbox, cluster: Cluster) -> None:
        self._mailbox = mailbox
        self._rows = [_row(node, 0, offer, 0.0) for node, offer in enumerate(cluster.members)]

    def write(self) -> None:
        """Write to disk: the log outlives a controller that dies."""
        with suppress(OSError):
            write_json(self._mailbox.path / _FILE, {"machines": self._rows})

    def at_work(self, startup_s: float) -> None:
        """All are armed for the first time, `startup_s` after they were requested.

        The store's clock says how long before the last each reported itself; torchrun starts on all
        at once.
        """
        ready = {}
        for row in self._rows:
            with suppress(OSError):
                ready[row["node"]] = self._mailbox.ready_of(row["node"])
        for node, moment in ready.items():
            self.replaced(node, startup_s - max(ready.values()) + moment)

    def lost(self, node: int, after_s: float, *, interrupted: bool) -> None:
        """The machine in that place is gone, so many seconds after the launch began."""
        row = self._newest(node)
        if row["after_s"] is None:
            row |= {"interrupted": interrupted, "after_s": after_s}
            self.write()

    def ordered(self, node: int, offer: Offer, after_s: float) -> None:
        """Another machine was requested in that place, so many seconds after the launch began."""
        self.lost(node, after_s, interrupted=False)  # if it is silent, it is let go now
        self._rows.append(_row(node, self._newest(node)["number"] + 1, offer, after_s))
        self.write()

    def replaced(self, node: int, at_s: float) -> None:
        """The newest machine in that place is at work, so many seconds after the launch began."""
        row = self._newest(node)
        startup_s = at_s - row["from_s"]
        row["startup_s"] = startup_s if startup_s > 0 else None
        self.write()

    def _newest(self, node: int) -> Row:
        return next(row for row in reversed(self._rows) if row["node"] == node)


def machine_rows(lease: EndedLease, provider: str) -> list[Row]:
    """Columns of raw_machines of a lease that is over, refresh_id still open."""
    rows: list[Row] = (read_object(lease.mailbox / _FILE) or {}).get("machines", [])
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
