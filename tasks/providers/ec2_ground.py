"""What a launch stands on, learned before anything is asked for: image, network, role, quotas, zones, the archive.

Whatever is wrong with account or settings is said here, while nothing costs anything yet.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from models.cloud import Cluster, Offer
from tasks.providers import ec2_ladder
from tasks.providers.base import NoCapacity, NotSupported, ProviderError
from tasks.providers.ec2_api import Answer
from tasks.providers.ec2_ladder import Rung
from tasks.providers.ec2_machines_api import MachinesApi
from tasks.providers.ec2_request import Ground
from tasks.providers.ec2_scores import scores_or_why
from tasks.providers.ec2_types import TypeFacts, facts_of, quota_of, quota_sentence, vcpus_by_quota, vcpus_held


class Ec2Choices(Protocol):
    """What `srift.toml` states under [ec2]."""

    @property
    def regions(self) -> tuple[str, ...]:
        """Regions to consider."""

    @property
    def instance_types(self) -> tuple[str, ...]:
        """Patterns of types to consider, as `ec2_catalogue.wanted` reads them."""

    @property
    def markets(self) -> tuple[str, ...]:
        """Of on-demand and spot, those to consider."""

    @property
    def bucket(self) -> str | None:
        """The mailbox's bucket; None: no machine can be launched."""

    @property
    def prefix(self) -> str:
        """Where the mailbox begins in it."""

    @property
    def instance_profile(self) -> str:
        """Of the machines."""

    @property
    def vpc(self) -> str | None:
        """None: the default one."""

    @property
    def ami_parameter(self) -> str:
        """Public SSM parameter that names the machine image."""

    @property
    def volume_gib(self) -> int:
        """Of each machine's disk, at least."""

    @property
    def python(self) -> str:
        """On the image, with torch."""

    @property
    def deployment(self) -> str:
        """Value of the tag srift:deployment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one region of the account says, asked once a provider: the image is pinned for a campaign."""

    image: Answer
    role_id: str
    subnets: dict[str, str]
    vpc: str


class Surveyor:
    """Asks AWS what a launch stands on."""

    def __init__(self, api: MachinesApi, choices: Ec2Choices) -> None:
        self._api, self._choices = api, choices
        self._accounts: dict[str, Account] = {}
        self._facts: dict[str, TypeFacts] = {}
        self._no_scores = False  # they may not be asked for: that was said

    def account(self, region: str) -> Account:
        """Raises NotSupported or AwsRefused with the fix."""
        if region not in self._accounts:
            choices = self._choices
            subnets = self._api.subnets(region, choices.vpc)
            if not subnets:
                which = f"VPC {choices.vpc}" if choices.vpc else "the default VPC"
                raise NotSupported(f"{which} has no subnet in {region}: make one, or name another under [ec2] vpc")
            self._accounts[region] = Account(
                image=self._api.image(region, choices.ami_parameter),
                role_id=self._api.role_id(region, choices.instance_profile),
                # the first by id of each zone, so that a request is the same when it is asked again
                subnets={str(one["AvailabilityZone"]): str(one["SubnetId"]) for one in reversed(_by_id(subnets))},
                vpc=str(subnets[0]["VpcId"]),
            )
        return self._accounts[region]

    def types(self, region: str, names: Sequence[str]) -> dict[str, TypeFacts]:
        """Raises NotSupported for processors that the image does not run on."""
        unknown = [name for name in dict.fromkeys(names) if name not in self._facts]
        for answer in self._api.instance_types(region, unknown) if unknown else ():
            facts = facts_of(answer)
            self._facts[facts.name] = facts
        arm = [name for name in dict.fromkeys(names) if name in self._facts and self._facts[name].arm]
        if arm:
            raise NotSupported(
                f"{', '.join(arm)}: an ARM processor, for which there is no image here; take it out of [ec2] "
                "instance_types"
            )
        lacking = [name for name in dict.fromkeys(names) if name not in self._facts]
        if lacking:
            raise NotSupported(f"EC2 does not describe {', '.join(lacking)} in {region}")
        return {name: self._facts[name] for name in names}

    def ground(self, cluster: Cluster, *, lease_id: str, controller: str, deadline_unix: int) -> Ground:
        """For one lease. Raises NotSupported or AwsRefused with the fix."""
        region = cluster.members[0].region
        types = self.types(region, [one.instance_type.name for one in cluster.members])
        account, choices = self.account(region), self._choices
        root = str(account.image.get("RootDeviceName") or "/dev/sda1")
        sizes = [one.get("Ebs", {}).get("VolumeSize", 0) for one in account.image.get("BlockDeviceMappings", ())]
        return Ground(
            region=region,
            vpc=account.vpc,
            subnets=account.subnets,
            types=types,
            image_id=str(account.image["ImageId"]),
            root_device=root,
            least_gib=int(max(sizes, default=0)),
            volume_gib=choices.volume_gib,
            instance_profile=choices.instance_profile,
            deployment=choices.deployment,
            controller=controller,
            lease_id=lease_id,
            deadline_unix=deadline_unix,
        )

    def rungs(self, ground: Ground, cluster: Cluster, offers: Sequence[Offer]) -> tuple[list[Rung], list[str]]:
        """The ladder as far as quotas and prices go, and why rungs are left out. Raises NoCapacity if none is left."""
        zones = set(ground.subnets)
        for name in ground.types:
            zones &= self._api.zones_offering(ground.region, name)
        rungs, said = ec2_ladder.ladder(cluster, offers, sorted(zones), self._choices.markets)
        if ec2_ladder.spot_ties(rungs) and not self._no_scores:
            names = list(ground.types)
            scores, why = scores_or_why(lambda: self._api.placement_scores(ground.region, names, len(cluster.members)))
            self._no_scores = bool(why)
            rungs, said = ec2_ladder.ladder(cluster, offers, sorted(zones), self._choices.markets, scores)
            said += [why] if why else []
        refused = {
            market: self._over_quota(ground, market, rungs) for market in dict.fromkeys(r.markets for r in rungs)
        }
        said += [sentence for sentence in refused.values() if sentence]
        left = [rung for rung in rungs if not refused[rung.markets]]
        if not left:
            raise NoCapacity("; ".join(said) or f"no zone of {ground.region} offers all of {cluster.name}")
        return left, said

    def over_quota(self, cluster: Cluster) -> str:
        """Why the account's quotas leave no room for `cluster`, held machines counted; empty where they do."""
        region = cluster.members[0].region
        types = self.types(region, [one.instance_type.name for one in cluster.members])
        found: list[str] = []
        held: dict[str, int] | None = None
        for code, wanted in vcpus_by_quota(cluster.members, types).items():
            try:
                name, value = self._api.quota(region, code)
                if held is None:
                    held = vcpus_held(self._api.instances(region, states=("pending", "running")))
            except ProviderError:
                continue  # a right that is missing here shows when machines are refused; nothing is bought by it
            sentence = quota_sentence(code, name, value, wanted=wanted, held=held.get(code, 0), region=region)
            found += [sentence] if sentence else []
        return "; ".join(found)

    def _over_quota(self, ground: Ground, market: str, rungs: Sequence[Rung]) -> str:
        return self.over_quota(next(rung.cluster for rung in rungs if rung.markets == market))


def same_quotas(rung: Rung, other: Rung) -> bool:
    """Whether a refusal for quota on one holds for the other."""
    return {quota_of(o.instance_type.name, o.market) for o in rung.cluster.members} == {
        quota_of(o.instance_type.name, o.market) for o in other.cluster.members
    }


@cache
def archive(package: Path) -> tuple[bytes, str]:
    """The node package as .tar.gz, the same bytes for the same files, and its sha256."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                entry = tarfile.TarInfo(f"node/{path.relative_to(package).as_posix()}")
                content = path.read_bytes()
                entry.size, entry.mode = len(content), 0o644
                tar.addfile(entry, io.BytesIO(content))
    content = gzip.compress(raw.getvalue(), mtime=0)
    return content, hashlib.sha256(content).hexdigest()


def _by_id(subnets: list[Answer]) -> list[Answer]:
    return sorted(subnets, key=lambda one: str(one["SubnetId"]))
