"""Hold the state of the emulated account that moto does not keep, and read and change moto's."""

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


@dataclass
class Launch:
    """The instances of a fleet, with its market and its tags."""

    market: str
    ids: list
    tags: Mapping


@dataclass
class RoleKeys:
    """The credentials of an instance from the metadata service. `role` is an object of moto."""

    instance_id: str
    role: Any
    access_key: str


@dataclass
class Account:
    """The emulated account. Hold `lock` to read or change moto's EC2, which has no lock."""

    market: Any  # the fake account of the tests of the code, with its prices
    lock: threading.RLock = field(default_factory=threading.RLock)
    launches: list = field(default_factory=list)
    keys: dict = field(default_factory=dict)  # by access key

    def instances(self, *states):
        """Return moto's instances in `states`, in all regions; by default, all but terminated."""
        with self.lock:
            return [instance for instance in self._all() if instance.state in (states or _ALIVE)]

    def instance(self, instance_id):
        """Return moto's instance with this id. Raises KeyError for an unknown id."""
        with self.lock:
            return {instance.id: instance for instance in self._all()}[instance_id]

    def power_off(self, instance_id):
        """Terminate or stop an instance that shut itself down, as its launch request says."""
        with self.lock:
            instance = self.instance(instance_id)
            if instance.state not in _ALIVE:
                return
            if instance.instance_initiated_shutdown_behavior != "terminate":
                instance.ec2_backend.stop_instances([instance_id])
                return
            instance.ec2_backend.terminate_instances([instance_id])
            code = "Client.InstanceInitiatedShutdown"
            instance.state_reason.code, instance.state_reason.message = code, f"{code}: shutdown"

    def image_id(self, region):
        """Return the id of the image that all parameters of Systems Manager have as value."""
        with self.lock:
            backend = ec2_backends[DEFAULT_ACCOUNT_ID][region]
            if not backend.amis:
                backend.register_image("Deep Learning AMI")
            return str(next(iter(backend.amis)))

    def role_keys(self, instance_id):
        """Return the credentials of an instance, or None if it has no instance profile."""
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
    """Create what an operator creates once in an AWS account.

    These are the bucket, a role with `policy` and its instance profile (both called `profile`), and
    EC2's service roles. `client(service)` returns a boto3 client.
    """
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
