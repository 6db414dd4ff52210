"""Ends what should be dead on EC2: leases of this home without a controller, and what has our tags past its deadline.

Looks through every region of srift.toml and of a lease, whoever launched what it finds there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

from tasks.providers.base import ProviderError
from tasks.providers.ec2_api import Answer
from tasks.providers.ec2_ending import end_machines, end_these, hear_out, lease_tags, tags_of, tidy, until
from tasks.providers.ec2_errors import AwsRefused
from tasks.providers.ec2_leases import Ec2Lease
from tasks.providers.ec2_machines import Ec2Machines
from tasks.providers.ec2_machines_api import ALIVE


def reap(machines: Ec2Machines, now: datetime, *, all_of_them: bool = False) -> list[str]:
    """One plain sentence for each thing ended, and for each that could not be."""
    leases = machines.leases
    sentences: list[str] = []
    regions = dict.fromkeys(machines.choices.regions)
    if leases.root.is_dir():
        with leases.locked():
            for lease_id in leases.ids():
                lease = leases.read(lease_id)
                if lease is None:
                    sentences += _set_aside(machines, lease_id)
                    continue
                regions[lease.region] = None
                why = _why_end(lease, now, all_of_them)
                if why:
                    sentences.append(_end(machines, lease, now, why))
    for region in regions:
        sentences += _sweep(machines, region, now)
    return sentences


def _why_end(lease: Ec2Lease, now: datetime, all_of_them: bool) -> str:
    """Why a lease is to be ended; empty where it is not."""
    if lease.ended_at is not None:
        return ""
    if lease.releasing:
        return "its machines were to be ended before"
    return lease.why_end(now, all_of_them=all_of_them)


def _end(machines: Ec2Machines, lease: Ec2Lease, now: datetime, why: str) -> str:
    before = sum(one.ended_at is None for one in lease.machines)
    tags = lease_tags(lease.lease_id, machines.choices.deployment, machines.leases.token)
    lease, sentence = end_machines(machines.api, machines.clock, lease, tags)
    what = f"lease {lease.lease_id} ({lease.cluster}): {why}; "
    try:
        if sentence:
            machines.leases.write(replace(lease, releasing=True, note=sentence))
            return f"{what}{sentence}; {until(lease)}"
        if not lease.machines:
            if lease.refusals:
                machines.leases.close(lease, now, "refused")
            else:
                machines.leases.forget(lease.lease_id)
            return f"{what}it had no machines"
        outcome = "released" if lease.releasing else "reaped"
        hear_out(machines.api, machines.clock, lease)
        lease = machines.fetched(machines.leases.close(lease, now, outcome), patient=True)
    except OSError as error:
        return f"{what}its machines are ended, and lease.json cannot be written ({error.strerror})"
    ended = max(before, sum(one.ended_at is not None and one.ended_at >= now for one in lease.machines))
    kept = "" if lease.fetched else "; what they uploaded could not be fetched yet, and is asked for again"
    return f"{what}{ended} machines in {lease.region} were ended{kept}"


def _set_aside(machines: Ec2Machines, lease_id: str) -> list[str]:
    """Nothing tells of its machines but their tags, by which the sweep ends them; what they recorded is kept."""
    try:
        kept = machines.leases.set_aside(lease_id)
    except ProviderError as error:
        return [str(error)]
    where = f"; its records were moved to {kept}" if kept else ""
    return [f"lease {lease_id}: nothing tells who holds it{where}"]


def _sweep(machines: Ec2Machines, region: str, now: datetime) -> Iterator[str]:
    """End machines past their deadline, and those of this home that no open lease tells of."""
    api, deployment = machines.api, machines.choices.deployment
    try:
        found = api.instances(region, tags={"srift:deployment": deployment}, states=ALIVE)
        ends = {str(one["InstanceId"]): why for one in found if (why := _why_stray(machines, tags_of(one), now))}
        stays = end_these(api, machines.clock, region, ends)
    except AwsRefused as error:
        yield f"{region} could not be looked through for machines that should be dead: {error}"
        return
    for one in found:
        name = str(one["InstanceId"])
        if name in ends:
            done = "it does not end; `srift reap` tries again" if name in stays else "it was ended"
            yield f"machine {name} ({one['InstanceType']}, {region}): {ends[name]}; {done}"
        elif not _deadline(tags_of(one)):
            yield f"machine {name} ({_lease_of(one)}, {region}) has no srift:deadline that can be read: look at it"
    tidy(api, region, deployment, lambda tags: _over(machines, tags, now))


def _why_stray(machines: Ec2Machines, tags: dict[str, str], now: datetime) -> str:
    deadline = _deadline(tags)
    lease_id = tags.get("srift:lease", "")
    if deadline and now.timestamp() >= deadline:
        return f"its deadline was {datetime.fromtimestamp(deadline, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if tags.get("srift:controller") == machines.leases.token and _is_over(machines, lease_id):
        return f"its lease {lease_id} is over"
    return ""


def _over(machines: Ec2Machines, tags: dict[str, str], now: datetime) -> bool:
    """Whether nothing can need what has these tags any more."""
    deadline = _deadline(tags)
    mine = tags.get("srift:controller") == machines.leases.token and _is_over(machines, tags.get("srift:lease", ""))
    return mine or bool(deadline and now.timestamp() >= deadline)


def _is_over(machines: Ec2Machines, lease_id: str) -> bool:
    """Of this home: a lease is on disk before anything is asked for, so what has none was ended or forgotten."""
    try:
        lease = machines.leases.read(lease_id)
    except ProviderError:
        return True
    return lease is None or lease.ended_at is not None


def _deadline(tags: dict[str, str]) -> float:
    try:
        return float(tags.get("srift:deadline", ""))
    except ValueError:
        return 0.0


def _lease_of(one: Answer) -> str:
    return tags_of(one).get("srift:lease", "no lease")
