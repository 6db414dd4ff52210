"""The emulated account: what moto keeps for it, what moto has no place for, and what an operator
installs.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends

SERVICE_ROLES = ("AWSServiceRoleForEC2Spot", "AWSServiceRoleForEC2Fleet")
_ALIVE = ("pending", "running", "stopping", "stopped")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Instances of one fleet."""

    market: str
    ids: list
    tags: Mapping


@dataclass(frozen=True, kw_only=True)
class RoleKeys:
    """Credentials that the metadata service gives to one instance. `role` is moto's."""

    instance_id: str
    role: Any
    access_key: str


@dataclass(kw_only=True)
class Account:
    """Readers and writers of moto's EC2 hold `lock`, since moto has no lock of its own."""

    market: Any  # the fake account of the tests of the code, with its prices
    lock: threading.RLock = field(default_factory=threading.RLock)
    launches: list = field(default_factory=list)
    keys: dict = field(default_factory=dict)  # by access key

    def instances(self, *states):
        """moto's instances of every region in these states, or alive."""
        with self.lock:
            return [one for one in self._all() if one.state in (states or _ALIVE)]

    def instance(self, instance_id):
        """Raises KeyError for an unknown id."""
        with self.lock:
            return {one.id: one for one in self._all()}[instance_id]

    def power_off(self, instance_id):
        """The machine shut itself down: terminate or stop it, as its launch defined."""
        with self.lock:
            one = self.instance(instance_id)
            if one.state not in _ALIVE:
                return
            if one.instance_initiated_shutdown_behavior != "terminate":
                one.ec2_backend.stop_instances([instance_id])
                return
            one.ec2_backend.terminate_instances([instance_id])
            code = "Client.InstanceInitiatedShutdown"
            one.state_reason.code, one.state_reason.message = code, f"{code}: shutdown"

    def image_id(self, region):
        """The image that every parameter of Systems Manager names."""
        with self.lock:
            backend = ec2_backends[DEFAULT_ACCOUNT_ID][region]
            if not backend.amis:
                backend.register_image("Deep Learning AMI")
            return str(next(iter(backend.amis)))

    def role_keys(self, instance_id):
        """The credentials of an instance; None without a profile."""
        with self.lock:
            arn = (self.instance(instance_id).iam_instance_profile or {}).get("Arn")
            if arn is None:
                return None
            profile = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].get_instance_profile_by_arn(arn)
            access_key = f"ASIA{instance_id.removeprefix('i-').upper()}"
            keys = RoleKeys(instance_id=instance_id, role=profile.roles[0], access_key=access_key)
            self.keys[access_key] = keys
            return keys

    def _all(self):
        for backend in list(ec2_backends[DEFAULT_ACCOUNT_ID].values()):
            yield from backend.all_instances()


def install(client, *, bucket, profile, policy):
    """Create what an operator creates once: bucket, role with policy and profile, EC2's roles."""
    client("s3").create_bucket(Bucket=bucket)
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}}
    trust["Action"] = "sts:AssumeRole"
    document = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    iam = client("iam")
    for name in (profile, *SERVICE_ROLES):
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=document)
    iam.put_role_policy(RoleName=profile, PolicyName="mailbox", PolicyDocument=policy)
    iam.create_instance_profile(InstanceProfileName=profile)
    iam.add_role_to_instance_profile(InstanceProfileName=profile, RoleName=profile)
