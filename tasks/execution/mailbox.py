"""The controller's half of the mailbox (`node/record.py` describes the files), and the log of a
launch's machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    def put_plan(self, plan: Plan) -> None:
        """Start another attempt."""
        write_json(self.path / "plan.json", plan)

    def put_data(self, addresses: Mapping[str, str]) -> None:
        """Have the machines fetch data from those addresses, by digest."""
        if addresses:
            write_json(self.path / DATA_FILE, {"data": dict(addresses)})

    def data_of(self, node: int) -> dict[str, dict[str, Any]]:
        """What the machine reports of the data that it fetches, by digest."""
        body = self._read(node, DATA_FILE) or {}
        return {digest: state for digest, state in body.items() if isinstance(state, dict)}

    def go(self, attempt: int, order: Sequence[int] = (), why: str = "") -> None:
        """Let the armed workers start; machines send to each other in `order`, empty: as
        they come.
        """
        write_json(self._go(attempt), {"attempt": attempt, "order": list(order), "why": why})

    def gone(self, attempt: int) -> bool:
        """True if `attempt` was let go: from then on a run is under way."""
        return self._go(attempt).is_file()

    def done(self) -> None:
        """Let the agents leave."""
        write_json(self.path / "done.json", {})

    def ready_of(self, node: int) -> float:
        """When the machine reported itself, by the store's clock. Raises OSError before it has."""
        return (self._node(node) / "ready.json").stat().st_mtime

    def reported(self, node: int, address: str) -> bool:
        """True if the machine at `address`, and none before it in that place, has reported
        itself.
        """
        body = self._read(node, "ready.json")
        return body is not None and body.get("address", address) == address

    def forget(self, node: int) -> None:
        """Clear away what a replaced machine reported of itself; its records and logs stay."""
        armed = (file.name for file in self._node(node).glob("armed-*.json"))
        for name in ("heartbeat.json", "progress.json", "notice.json", DATA_FILE, *armed):
            (self._node(node) / name).unlink(missing_ok=True)

    def armed(self, attempt: int) -> set[int]:
        """Nodes whose workers wait for go, or have been let go."""
        files = self.path.glob(f"node-*/armed-{attempt}.json")
        return {int(file.parent.name.removeprefix("node-")) for file in files}

    def pairs(self, attempt: int, node: int) -> dict[str, Any]:
        """What `node`, the first of the attempt, measured of links between machines."""
        found = (self._read(node, f"armed-{attempt}.json") or {}).get("pairs")
        return found if isinstance(found, dict) else {}

    def finished(self, attempt: int) -> list[dict[str, Any]]:
        """The content of each `finished-<attempt>.json`, and `node`."""
        found = ((node, self._read(node, f"finished-{attempt}.json")) for node in range(self.nodes))
        return [{**body, "node": node} for node, body in found if body is not None]

    def silent_s(self, node: int, now_unix: float) -> float:
        """Seconds since the node's last heartbeat, by the store's clock; 0 before the first."""
        if self._read(node, "heartbeat.json") is None:
            return 0.0
        return max(0.0, now_unix - (self._node(node) / "heartbeat.json").stat().st_mtime)

    def under_way(self, attempt: int) -> str:
        """The last run that a node says it has come to; "" if none says so."""
        found = [self._read(node, "progress.json") or {} for node in range(self.nodes)]
        at = [
            (_number(body, "index"), str(body.get("run_id", "")))
            for body in found
            if body.get("attempt") == attempt
        ]
        return max(at, default=(0.0, ""))[1]

    def refuses(self) -> OSError | None:
        """The store's error for a small file; None if it takes one."""
        probe = self.path / "controller" / "space.json"
        try:
            write_json(probe, {"space": "x" * 4096})
        except OSError as error:
            return error
        probe.unlink(missing_ok=True)
        return None

    def recorded(self) -> set[str]:
        """Ids of the runs that have a record, whole or not: loading decides which are sound."""
        return {file.stem for file in self.path.glob("node-*/records/*.json")}

    def not_installed(self) -> dict[str, str]:
        """Digests of workloads whose requirements some machine could not install just then, with
        the reason.
        """
        return {
            str(body.get("workload_digest")): str(body.get("reason"))
            for body in _records(self.path)
            if body.get("cause") == INSTALL
        }

    def _go(self, attempt: int) -> Path:
        return self.path / f"go-{attempt}.json"

    def _node(self, node: int) -> Path:
        return self.path / f"node-{node}"

    def _read(self, node: int, name: str) -> dict[str, Any] | None:
        return read_object(self._node(node) / name)


def silent_nodes(mailbox: Mailbox, now_unix: float) -> Sequence[int]:
    """Nodes that have reported before and not for `SILENT_AFTER_S`."""
    nodes = range(mailbox.nodes)
    return [node for node in nodes if mailbox.silent_s(node, now_unix) > SILENT_AFTER_S]


def read_object(file: Path) -> dict[str, Any] | None:
    """A JSON object; None where it is not there yet or is nothing that a node of ours writes."""
    try:
        body = json_of_node(file.read_text())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def benchmark_seconds(path: Path) -> float:
    """Seconds that the records under `path` spent in steps, profiles and probes."""
    total = 0.0
    for body in _records(path):
        values = body.get("values")
        if body.get("kind") == "train":
            total += _number(values, "warmup_s") + _number(values, "steps_s")
        else:
            total += _number(body, "ended_unix") - _number(body, "started_unix")
    return total


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """One record of each run."""
    files = {file.stem: file for file in path.glob("node-*/records/*.json")}
    return (read_object(file) or {} for file in files.values())


def _number(body: Any, key: str) -> float:
    """A finite number that a node wrote, else 0: `record_loader` validates the rest."""
    value = body.get(key) if isinstance(body, dict) else None
    try:
        number = float(value) if isinstance(value, int | float) else 0.0
    except OverflowError:  # JSON's integers may have hundreds of digits
        return 0.0
    return number if math.isfinite(number) else 0.0


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

    def at_work(self, seconds: Mapping[str, float]) -> None:
        """All are armed for the first time, `seconds` by phase after they were requested.

        The store's clock says how long before the last each reported itself; torchrun starts on all
        at once.
        """
        reported = {}
        for row in self._rows:
            with suppress(OSError):
                reported[row["node"]] = self._mailbox.ready_of(row["node"])
        last = max(reported.values(), default=0.0)
        for node, moment in reported.items():
            self._set_startup(node, sum(seconds.values()) - (last - moment))

    def lost(self, node: int, after_s: float, *, interrupted: bool) -> None:
        """The machine in that place is gone, so many seconds after the launch began."""
        row = self._newest(node)
        if row["after_s"] is None:
            row |= {"interrupted": interrupted, "after_s": after_s}
            self.write()

    def ordered(self, node: int, offer: Offer, after_s: float) -> None:
        """Another machine was requested in that place, so many seconds after the launch began."""
        before = self._newest(node)
        if before["after_s"] is None:  # it is silent, and let go now
            before["after_s"] = after_s
        self._rows.append(_row(node, int(before["number"]) + 1, offer, after_s))
        self.write()

    def replaced(self, node: int, at_s: float) -> None:
        """The replacement in that place is at work, so many seconds after the launch began."""
        self._set_startup(node, at_s - float(self._newest(node)["from_s"]))

    def _set_startup(self, node: int, startup_s: float) -> None:
        self._newest(node)["startup_s"] = startup_s if startup_s > 0 else None
        self.write()

    def _newest(self, node: int) -> dict[str, Any]:
        return next(row for row in reversed(self._rows) if row["node"] == node)


def machine_rows(lease: EndedLease, provider: str) -> list[dict[str, Any]]:
    """Columns of raw_machines of a lease that is over, refresh_id still open; none if the log
    cannot be read.
    """
    try:
        rows = (read_object(lease.mailbox / _FILE) or {})["machines"]
        return [_ended(row, lease, provider) for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _row(node: int, number: int, offer: Offer, from_s: float) -> dict[str, Any]:
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


def _ended(row: Mapping[str, Any], lease: EndedLease, provider: str) -> dict[str, Any]:
    from_s, whole_s = float(row["from_s"]), (lease.ended_at - lease.started_at).total_seconds()
    until_s = whole_s if row["after_s"] is None else min(float(row["after_s"]), whole_s)
    return {
        **{name: row[name] for name in ("node", "number", "instance_type", "market", "zone")},
        "startup_s": row["startup_s"],
        "interrupted": bool(row["interrupted"]),
        "lease_id": lease.lease_id,
        "provider": provider,
        "asked_at": lease.started_at + timedelta(seconds=from_s),
        "hours": max(until_s - from_s, 0.0) / 3600,
    }
