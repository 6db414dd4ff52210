"""The controller's half of the mailbox (`node/record.py` describes the files), and the log of a launch's machines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from models.domain.cluster import Cluster, Offer

from ..node.data import FAILED, READY
from ..node.data import FILE as DATA_FILE
from ..node.record import INSTALL, Plan, WorkloadFile, write_file, write_json
from ..providers.base import EndedLease, json_of_node
from ..workspace.sources import Source

SILENT_AFTER_S = 30.0  # a node at a fifth of a core can be late by seconds, never by this much


class WorkloadChanged(Exception):
    """A workload's code is no longer the one that the launch was made for; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """A directory shared by the controller and `nodes` machines."""

    path: Path
    nodes: int

    def put_workloads(self, files: Iterable[tuple[WorkloadFile, Source]]) -> None:
        """Put each workload's code where its `WorkloadFile` says. Raises WorkloadChanged."""
        for spec, source in files:
            try:
                contents = source.read()
            except FileNotFoundError:
                contents = {}
            called = (contents, spec.function, spec.arguments)
            if (
                not contents
                or source.digest(*called, env=spec.env, data=spec.data_digest) != spec.digest
            ):
                raise WorkloadChanged(
                    f"{source.files[source.entry]} of workload {spec.name}, or what it needs, was just changed: refresh"
                    " again to measure it"
                )
            if not (self.path / spec.file).exists():
                write_file(self.path / spec.file, source.travels_as(contents))

    def put_plan(self, plan: Plan) -> None:
        """Ask the nodes for another attempt."""
        write_json(self.path / "plan.json", plan)

    def put_data(self, addresses: Mapping[str, str]) -> None:
        """Have the machines fetch data from those addresses, by digest, before they are given a plan."""
        if addresses:
            write_json(self.path / DATA_FILE, {"data": dict(addresses)})

    def data_of(self, node: int) -> dict[str, dict[str, Any]]:
        """How far the machine is with what it fetches, by digest, in its own words; empty before it says so."""
        body = read_object(self._node(node) / DATA_FILE) or {}
        return {digest: state for digest, state in body.items() if isinstance(state, dict)}

    def has_data(self, node: int, digests: Iterable[str]) -> bool:
        """Whether all of them are there, or never will be: runs that need one that failed say so."""
        states = self.data_of(node)
        return all(states.get(one, {}).get("state") in (READY, FAILED) for one in digests)

    def go(self, attempt: int, order: Sequence[int] = (), why: str = "") -> None:
        """Let the armed workers of `attempt` start; machines send to each other in `order`, empty: as they come."""
        write_json(self._go(attempt), {"attempt": attempt, "order": list(order), "why": why})

    def gone(self, attempt: int) -> bool:
        """Whether `attempt` was let go: from then on a run is under way."""
        return self._go(attempt).is_file()

    def done(self) -> None:
        """Let the agents leave."""
        write_json(self.path / "done.json", {})

    def ready_at(self) -> list[float]:
        """When each agent reported itself, by the store's clock; up to the first that has not."""
        files = [self._node(node) / "ready.json" for node in range(self.nodes)]
        return [file.stat().st_mtime for file in itertools.takewhile(Path.is_file, files)]

    def ready_of(self, node: int) -> float:
        """When the machine in that place reported itself, by the store's clock. Raises OSError before it has."""
        return (self._node(node) / "ready.json").stat().st_mtime

    def reported(self, node: int, address: str) -> bool:
        """Whether the machine at `address` has reported itself as `node`; one before it in its place does not count."""
        body = read_object(self._node(node) / "ready.json")
        return body is not None and body.get("address", address) == address

    def forget(self, node: int) -> None:
        """Clear away what a machine said that another takes the place of; its records and logs stay."""
        armed = (file.name for file in self._node(node).glob("armed-*.json"))
        for name in ("heartbeat.json", "progress.json", "notice.json", DATA_FILE, *armed):
            (self._node(node) / name).unlink(missing_ok=True)

    def armed(self, attempt: int) -> set[int]:
        """The nodes whose workers wait for go, or have been let go."""
        return {
            node
            for node in range(self.nodes)
            if (self._node(node) / f"armed-{attempt}.json").is_file()
        }

    def pairs(self, attempt: int, node: int) -> dict[str, Any]:
        """What `node`, the first of the attempt, says of links between machines, in its own words; empty if nothing."""
        said = (read_object(self._node(node) / f"armed-{attempt}.json") or {}).get("pairs")
        return said if isinstance(said, dict) else {}

    def finished(self, attempt: int) -> list[dict[str, Any]]:
        """Of every node whose torchrun of `attempt` has ended, what `finished-<a>.json` holds, and `node`."""
        found = (
            (node, read_object(self._node(node) / f"finished-{attempt}.json"))
            for node in range(self.nodes)
        )
        return [
            {**body, "node": node} for node, body in found if body is not None
        ]  # each speaks for itself alone

    def silent_s(self, node: int, now_unix: float) -> float | None:
        """Seconds since the node's last heartbeat, by the store's clock; None before the first."""
        file = self._node(node) / "heartbeat.json"
        return None if read_object(file) is None else max(0.0, now_unix - file.stat().st_mtime)

    def under_way(self, attempt: int) -> str:
        """The run that the nodes say they have come to; "" where none says so."""
        said = (read_object(self._node(node) / "progress.json") or {} for node in range(self.nodes))
        at = [
            (_number(body, "index"), str(body.get("run_id", "")))
            for body in said
            if body.get("attempt") == attempt
        ]
        return max(at, default=(0.0, ""))[1]

    def refuses(self) -> OSError | None:
        """What the store answers to a small file; None where it takes it."""
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
        """Digests of workloads whose requirements some machine could not have just then, each with the reason."""
        found = [read_object(file) or {} for file in self.path.glob("node-*/records/*.json")]
        return {
            str(one.get("workload_digest")): str(one.get("reason"))
            for one in found
            if one.get("cause") == INSTALL
        }

    def _go(self, attempt: int) -> Path:
        return self.path / f"go-{attempt}.json"

    def _node(self, node: int) -> Path:
        return self.path / f"node-{node}"


def silent_nodes(mailbox: Mailbox, now_unix: float) -> Sequence[int]:
    """Nodes that have spoken before and not for `SILENT_AFTER_S`."""
    return [
        node
        for node in range(mailbox.nodes)
        if (mailbox.silent_s(node, now_unix) or 0.0) > SILENT_AFTER_S
    ]


def read_object(file: Path) -> dict[str, Any] | None:
    """A JSON object, or None where it is not there yet or is nothing that a node of ours writes.

    Nodes write beside and rename, so it is never half there.
    """
    try:
        body = json_of_node(file.read_text())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def benchmark_seconds(path: Path) -> float:
    """Seconds that the records under `path` spent in steps, profiles and probes: what the machines were bought for."""
    total = 0.0
    each = {
        file.stem: file for file in path.glob("node-*/records/*.json")
    }  # of a run that failed several may tell
    for file in each.values():
        body = read_object(file) or {}
        values = body.get("values")
        if body.get("kind") == "train":
            total += _number(values, "warmup_s") + _number(values, "steps_s")
        else:
            total += _number(body, "ended_unix") - _number(body, "started_unix")
    return total


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
    """The machines of one launch in rank order, each since it was asked for. A full disk is nobody's concern here."""

    def __init__(self, mailbox: Mailbox, cluster: Cluster) -> None:
        self._mailbox = mailbox
        self._rows = [_row(node, 0, offer) for node, offer in enumerate(cluster.members)]

    def write(self) -> None:
        """Put what is known on disk, so that it outlives a controller that dies."""
        with suppress(OSError):
            write_json(self._mailbox.path / _FILE, {"machines": self._rows})

    def at_work(self, seconds: Mapping[str, float]) -> None:
        """All are armed for the first time, `seconds` by phase after they were asked for.

        Which of them reported itself how long before the last is measured by the store's clock; torchrun starts on all.
        """
        reported = self._mailbox.ready_at()
        last = max(reported, default=0.0)
        for row, moment in zip(self._rows, reported, strict=False):
            startup_s = sum(seconds.values()) - (last - moment)
            row["startup_s"] = startup_s if startup_s > 0 else None
        self.write()

    def lost(self, node: int, after_s: float, *, interrupted: bool) -> None:
        """The machine in the place `node` is gone, so many seconds after the launch began; or taken back."""
        row = self._newest(node)
        if row["after_s"] is None:
            row |= {"interrupted": interrupted, "after_s": after_s}
            self.write()

    def ordered(self, node: int, offer: Offer, after_s: float) -> None:
        """Another machine was asked for in that place, so many seconds after the launch began."""
        before = self._newest(node)
        if before["after_s"] is None:  # silent, and let go now
            before["after_s"] = after_s
        self._rows.append(_row(node, int(before["number"]) + 1, offer) | {"from_s": after_s})
        self.write()

    def replaced(self, node: int, startup_s: float) -> None:
        """The machine that was asked for last in that place is at work."""
        self._newest(node)["startup_s"] = startup_s if startup_s > 0 else None
        self.write()

    def _newest(self, node: int) -> dict[str, Any]:
        return next(row for row in reversed(self._rows) if row["node"] == node)


def machine_rows(lease: EndedLease, provider: str) -> list[dict[str, Any]]:
    """Columns of raw_machines of a lease that is over, refresh_id still open; none where nothing readable is there."""
    try:
        return [
            _ended(row, lease, provider)
            for row in (read_object(lease.mailbox / _FILE) or {})["machines"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _row(node: int, number: int, offer: Offer) -> dict[str, Any]:
    return {
        "node": node,
        "number": number,
        "instance_type": offer.instance_type.name,
        "market": offer.market,
        "zone": offer.zone,
        "from_s": 0.0,
        "startup_s": None,
        "after_s": None,
        "interrupted": False,
    }


def _ended(row: Mapping[str, Any], lease: EndedLease, provider: str) -> dict[str, Any]:
    whole_s = (lease.ended_at - lease.started_at).total_seconds()
    until_s = whole_s if row["after_s"] is None else min(float(row["after_s"]), whole_s)
    started = row["startup_s"]
    return {name: row[name] for name in ("node", "number", "instance_type", "market", "zone")} | {
        "startup_s": float(started) if started is not None and started > 0 else None,
        "interrupted": bool(row["interrupted"]),
        "lease_id": lease.lease_id,
        "provider": provider,
        "asked_at": lease.started_at + timedelta(seconds=float(row["from_s"])),
        "hours": max(until_s - float(row["from_s"]), 0.0) / 3600,
    }
