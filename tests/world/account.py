"""The emulated account: what moto keeps for it, what moto has no place for, what an operator
installs.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends

from tests.world.market import Market

SERVICE_ROLES = ("AWSServiceRoleForEC2Spot", "AWSServiceRoleForEC2Fleet")
# Patterns of types that exist here: answers about all 1,395 would cost seconds.
SOLD = ("g4dn.*", "g5.*", "g6.*", "p3.*", "p4d.*", "m5.large", "c5.large")
_ALIVE = ("pending", "running", "stopping", "stopped")
_IMAGE = re.compile(r"/aws/service/deeplearning/ami/x86_64/[a-z0-9.-]+/latest/ami-id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Instances that one call launched, by the clock of this machine."""

    region: str
    name: str
    market: str
    zone: str
    ids: tuple[str, ...]
    tags: Mapping[str, str]
    at_unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleKeys:
    """Credentials that the metadata service gives to one instance."""

    instance_id: str
    role: str
    role_id: str
    access_key: str
    secret_key: str
    token: str


@dataclass(slots=True, kw_only=True)
class Account:
    """Held under `lock` by whoever reads or changes moto's EC2, which has no lock of its own."""

    market: Market
    lock: threading.RLock = field(default_factory=threading.RLock)
    placement_groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    keys: dict[str, RoleKeys] = field(default_factory=dict)  # by access key
    heard: Callable[[], None] = lambda: None  # called when instances were launched

    def sells(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in SOLD)

    def launched(self, region: str, instances: Sequence[Any], market: str) -> None:
        one = instances[0]
        launch = Launch(
            region=region,
            name=one.instance_type,
            market=market,
            zone=str(one.availability_zone),
            ids=tuple(instance.id for instance in instances),
            tags={tag["key"]: tag["value"] for tag in one.get_tags()},
            at_unix=time.time(),
        )
        self.launches.append(launch)
        self.heard()

    def instances(self, *states: str) -> list[Any]:
        """moto's instances in every region, in these states or alive at all."""
        with self.lock:
            return [one for one in self._all() if one.state in (states or _ALIVE)]

    def instance(self, instance_id: str) -> Any:
        """Raises KeyError for one that never was."""
        with self.lock:
            found = {one.id: one for one in self._all()}
        return found[instance_id]

    def end(self, instance_id: str, code: str, message: str) -> None:
        """Terminate an instance for a reason of EC2's own. Nothing happens where it is over."""
        with self.lock:
            one = self.instance(instance_id)
            if one.state in _ALIVE:
                one.ec2_backend.terminate_instances([instance_id])
                one.state_reason.code, one.state_reason.message = code, f"{code}: {message}"

    def power_off(self, instance_id: str) -> None:
        """The machine shut itself down: terminated or stopped, as its launch said."""
        one = self.instance(instance_id)
        if one.instance_initiated_shutdown_behavior == "terminate":
            self.end(instance_id, "Client.InstanceInitiatedShutdown", "Instance initiated shutdown")
        else:
            with self.lock:
                one.ec2_backend.stop_instances([instance_id])

    def image_of(self, parameter: str, region: str) -> str | None:
        """The AMI of a public parameter of the Deep Learning AMI, made at the first question; None
        for another name.
        """
        if _IMAGE.fullmatch(parameter) is None:
            return None
        with self.lock:
            backend = ec2_backends[DEFAULT_ACCOUNT_ID][region]
            known = next(
                (one.id for one in backend.amis.values() if one.description == parameter), None
            )
            if known is None:
                made = backend.register_image(name=parameter.split("/")[-3], description=parameter)
                made.architecture, made.owner_alias, made.root_device_name = (
                    "x86_64",
                    "amazon",
                    "/dev/sda1",
                )
                made.root_device_type, made.virtualization_type, known = "ebs", "hvm", made.id
            return str(known)

    def role_keys(self, instance_id: str) -> RoleKeys | None:
        one = self.instance(instance_id)
        arn = (one.iam_instance_profile or {}).get("Arn")
        if arn is None:
            return None
        profile = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].get_instance_profile_by_arn(arn)
        role = profile.roles[0]
        with self.lock:
            held = next(
                (keys for keys in self.keys.values() if keys.instance_id == instance_id), None
            )
            if held is None:
                held = RoleKeys(
                    instance_id=instance_id,
                    role=role.name,
                    role_id=role.id,
                    access_key=f"ASIA{secrets.token_hex(8).upper()}",
                    secret_key=secrets.token_urlsafe(30),
                    token=secrets.token_urlsafe(60),
                )
                self.keys[held.access_key] = held
        return held

    def policies_of(self, role: str) -> Iterator[Mapping[str, Any]]:
        found = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].get_role(role)
        for document in found.policies.values():
            body = json.loads(document) if isinstance(document, str) else document
            statements = body["Statement"]
            yield from [statements] if isinstance(statements, dict) else statements

    def _all(self) -> Iterator[Any]:
        for backend in list(ec2_backends[DEFAULT_ACCOUNT_ID].values()):
            yield from backend.all_instances()


def install(client: Callable[[str], Any], *, bucket: str, profile: str, policy: str) -> None:
    """What an operator makes once: a private bucket, the nodes' role with its policy and profile,
    EC2's own roles.
    """
    client("s3").create_bucket(Bucket=bucket)
    trust = {
        "Effect": "Allow",
        "Principal": {"Service": "ec2.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    document = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    iam = client("iam")
    for name in (profile, *SERVICE_ROLES):
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=document)
    iam.put_role_policy(RoleName=profile, PolicyName="mailbox", PolicyDocument=policy)
    iam.create_instance_profile(InstanceProfileName=profile)
    iam.add_role_to_instance_profile(InstanceProfileName=profile, RoleName=profile)
