"""Ends what should be dead on EC2: leases of this home without a controller, and what has our tags past its deadline.

Looks through every region of srift.toml and of a lease of the last weeks, under today's deployment name and every name
in such a lease, whoever launched what it finds there. Raises NotSwept where it could not look or end, once all else is
done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from tasks.providers.base import LeaseUnreadable, NotSwept, ProviderError
from tasks.providers.ec2.api import ALIVE
from tasks.providers.ec2.errors import AwsRefused
from tasks.providers.ec2.leases import Ec2Lease, Ec2Leases
from tasks.providers.ec2.machines import Ec2Machines
from tasks.providers.ec2.termination import (
    await_shutdown,
    end_machines,
    end_these,
    lease_tags,
    not_answered,
    tags_of,
    tidy,
    until,
)


def reap(machines: Ec2Machines, now: datetime, *, all_of_them: bool = False) -> list[str]:
    """One plain sentence for each thing ended, and for each that is to be looked at.

    Raises NotSwept where a lease cannot be read, or a region could not be looked through or a machine not ended.
    """
    leases = machines.leases
    sentences: list[str] = []
    unswept: dict[str, str] = {}
    regions = dict.fromkeys(machines.choices.regions)
    deployments = {machines.choices.deployment}
    busy: set[str] = set()  # regions where a lease of ours is not ended that should be
    if leases.root.is_dir():
        with leases.locked():
            try:
                used = leases.used(now)
            except ProviderError as error:
                used, unswept["other regions"] = [], str(error)
            regions |= dict.fromkeys(region for region, _ in used)
            deployments |= {deployment for _, deployment in used if deployment}
            for lease_id in leases.ids():
                try:
                    lease = leases.read(lease_id)
                except LeaseUnreadable as error:
                    unswept[f"lease {lease_id}"] = str(error)
                    its = _texts(error.body.get("region")), _texts(error.body.get("deployment"))
                    regions |= dict.fromkeys(its[0])
                    deployments |= {*its[1]}
                    _note_used(leases, *its, now)
                    continue
                if lease is None:
                    sentences += _set_aside(machines, lease_id)
                    continue
                regions[lease.region] = None
                deployments |= {*_texts(lease.deployment)}
                if lease.ended_at is None:
                    _note_used(leases, [lease.region], _texts(lease.deployment), now)
                why = _why_end(lease, now, all_of_them)
                if why:
                    sentence, ended = _end(machines, lease, now, why)
                    sentences.append(sentence)
                    unswept |= {} if ended else {f"lease {lease_id}": sentence}
                    busy |= set() if ended else {lease.region}
    for region in regions:
        said, why = _sweep(machines, region, deployments, now)
        sentences += said
        unswept |= {region: why} if why else {}
    leases.note_swept([region for region in regions if region not in busy | unswept.keys()], now)
    if unswept:
        raise NotSwept("ec2", unswept, sentences)
    return sentences


def _texts(value: Any) -> list[str]:
    """`value` if it is a name; nothing else may stand for one."""
    return [value] if isinstance(value, str) and value else []


def _note_used(
    leases: Ec2Leases, regions: Iterable[str], deployments: Sequence[str], now: datetime
) -> None:
    """Its machines may outlive a lease that a person moves away. A full disk leaves it to the next reaper."""
    for region in regions:
        with suppress(OSError, ProviderError):
            leases.note_used(region, (*deployments, "")[0], now)


def _why_end(lease: Ec2Lease, now: datetime, all_of_them: bool) -> str:
    """Why a lease is to be ended; empty where it is not."""
    if lease.ended_at is not None:
        return ""
    if lease.releasing:
        return "its machines were to be ended before"
    return lease.why_end(now, all_of_them=all_of_them)


def _end(machines: Ec2Machines, lease: Ec2Lease, now: datetime, why: str) -> tuple[str, bool]:
    """The sentence, and whether no machine of it is known to live on."""
    before = sum(one.ended_at is None for one in lease.machines)
    tags = lease_tags(
        lease.lease_id, lease.deployment or machines.choices.deployment, machines.leases.token
    )
    lease, sentence = end_machines(machines.api, lease, tags)
    what = f"lease {lease.lease_id} ({lease.cluster}): {why}; "
    try:
        if sentence:
            machines.leases.write(replace(lease, releasing=True, note=sentence))
            return f"{what}{sentence}; {until(lease)}", sentence == not_answered(lease)
        if not lease.machines:
            if lease.refusals:
                machines.leases.close(lease, now, "refused")
            else:
                machines.leases.forget(lease.lease_id)
            return f"{what}it had no machines", True
        outcome = "released" if lease.releasing else "reaped"
        await_shutdown(machines.api, lease)
        lease = machines.fetched(machines.leases.close(lease, now, outcome), patient=True)
    except OSError as error:
        written = f"lease.json cannot be written ({error.strerror})"
        return f"{what}{sentence or 'its machines are ended'}, and {written}", not sentence
    ended = max(
        before, sum(one.ended_at is not None and one.ended_at >= now for one in lease.machines)
    )
    kept = (
        ""
        if lease.fetched
        else "; what they uploaded could not be fetched yet, and is asked for again"
    )
    return f"{what}{ended} machines in {lease.region} were ended{kept}", True


def _set_aside(machines: Ec2Machines, lease_id: str) -> list[str]:
    """Nothing tells of its machines but their tags, by which the sweep ends them; what they recorded is kept."""
    try:
        kept = machines.leases.set_aside(lease_id)
    except ProviderError as error:
        return [str(error)]
    where = f"; its records were moved to {kept}" if kept else ""
    return [f"lease {lease_id}: nothing tells who holds it{where}"]


def _sweep(
    machines: Ec2Machines, region: str, deployments: Iterable[str], now: datetime
) -> tuple[list[str], str]:
    """End machines past their deadline, and those of this home that no open lease tells of.

    Returns a sentence for each, and why there may be others; empty where all was looked at and nothing lives on.
    """
    api, sentences = machines.api, []
    try:
        found = [
            one
            for deployment in sorted(deployments)
            for one in api.instances(region, tags={"srift:deployment": deployment}, states=ALIVE)
        ]
        ends = {
            str(one["InstanceId"]): why
            for one in found
            if (why := _why_over(machines, tags_of(one), now))
        }
        stays = end_these(api, region, ends)
    except AwsRefused as error:
        return [], f"it could not be looked through for machines that should be dead: {error}"
    for one in found:
        name = str(one["InstanceId"])
        if name in ends:
            done = "it does not end; `srift reap` tries again" if name in stays else "it was ended"
            sentences.append(
                f"machine {name} ({one['InstanceType']}, {region}): {ends[name]}; {done}"
            )
        elif not _deadline(tags_of(one)):
            lease_id = tags_of(one).get("srift:lease", "no lease")
            sentences.append(
                f"machine {name} ({lease_id}, {region}) has no srift:deadline that can be read: look at it"
            )
    for deployment in sorted(deployments):
        tidy(api, region, deployment, lambda tags: bool(_why_over(machines, tags, now)))
    return sentences, f"these machines do not end: {', '.join(sorted(stays))}" if stays else ""


def _why_over(machines: Ec2Machines, tags: dict[str, str], now: datetime) -> str:
    """Why nothing can need what has these tags any more; empty where something may."""
    deadline = _deadline(tags)
    lease_id = tags.get("srift:lease", "")
    if deadline and now.timestamp() >= deadline:
        return f"its deadline was {datetime.fromtimestamp(deadline, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if tags.get("srift:controller") == machines.leases.token and _is_over(machines, lease_id):
        return f"its lease {lease_id} is over"
    return ""


def _is_over(machines: Ec2Machines, lease_id: str) -> bool:
    """Of this home: a lease is on disk before anything is asked for, so what has none was ended or forgotten.

    One that cannot be read may be open.
    """
    try:
        lease = machines.leases.read(lease_id)
    except LeaseUnreadable:
        return False
    except ProviderError:
        return True
    return lease is None or lease.ended_at is not None


def _deadline(tags: dict[str, str]) -> float:
    try:
        return float(tags.get("srift:deadline", ""))
    except ValueError:
        return 0.0
