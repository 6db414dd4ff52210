"""An AWS account in moto, as the doctor sees it, with scripted refusals of single methods.

What moto lacks is answered here: dry runs that it would carry out, quotas, the time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from moto import mock_aws

from tests import aws_model

os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
REGION, BUCKET, PARAMETER, PROFILE = "us-east-1", "mine-1", "/ours/ami", "srift-node"
KEYS = {"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "very-secret-key"}
DRY = (
    "create_fleet",
    "create_launch_template",
    "create_security_group",
    "create_placement_group",
)
_ONCE = Config(retries={"total_max_attempts": 1})  # nothing sleeps


@cache
def _session() -> Any:
    """One, since it remembers the descriptions of services that it has read."""
    return boto3.Session(**KEYS)


@cache
def plain_client(service: str, region: str) -> Any:
    """One for all accounts: making a client takes longer than its calls."""
    return _session().client(service, region_name=region, config=_ONCE)


class Account:
    """`refuse`: method -> error code; `answers`: method -> answer in place of moto's."""

    def __init__(self) -> None:
        self.refuse: dict[str, str] = {}
        self.answers: dict[str, Any] = {
            "get_service_quota": {"Quota": {"QuotaName": "Running things", "Value": 768.0}}
        }
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.methods: set[tuple[str, str]] = (
            set()
        )  # (service, method) of boto3's clients that were called

    def clients(self, service: str, region: str) -> Any:
        """As ec2_api.Clients."""
        return _Client(self, service, plain_client(service, region))

    def plain(self, service: str) -> Any:
        """A client that nothing is scripted over."""
        return plain_client(service, REGION)

    def keys(self) -> list[str]:
        """What lies in the bucket."""
        return [
            one["Key"]
            for one in self.plain("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])
        ]


class _Client:
    def __init__(self, account: Account, service: str, client: Any) -> None:
        self._account, self._service, self._client = account, service, client

    def __getattr__(self, method: str) -> Any:
        def call(**words: Any) -> Any:
            aws_model.valid(self._service, method, words)
            self._account.asked.append((method, words))
            self._account.methods.add((self._service, method))
            code = self._account.refuse.get(
                method, "DryRunOperation" if words.get("DryRun") else ""
            )
            if code:
                message = "arn:aws:iam::1:user/x with very-secret-key may not"
                raise ClientError({"Error": {"Code": code, "Message": message}}, method)
            if method in self._account.answers:
                return self._account.answers[method]
            return getattr(self._client, method)(**words)

        return call


@contextmanager
def account() -> Iterator[Account]:
    """All that a launch needs, and nothing launched."""
    with mock_aws():
        made = Account()
        made.plain("s3").create_bucket(Bucket=BUCKET)
        iam = made.plain("iam")
        for name in (PROFILE, "AWSServiceRoleForEC2Spot", "AWSServiceRoleForEC2Fleet"):
            iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")
        iam.create_instance_profile(InstanceProfileName=PROFILE)
        iam.add_role_to_instance_profile(InstanceProfileName=PROFILE, RoleName=PROFILE)
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 45}}
        image = made.plain("ec2").register_image(
            Name="torch", Architecture="x86_64", BlockDeviceMappings=[disk]
        )
        made.plain("ssm").put_parameter(Name=PARAMETER, Value=image["ImageId"], Type="String")
        yield made


def project(folder: Path, *lines: str) -> Path:
    """A srift.toml that names what `account` has."""
    (folder / "work.py").write_text(
        "def build():\n    raise AssertionError('runs on nodes only')\n"
    )
    stated = [
        f'bucket = "{BUCKET}"',
        f'ami_parameter = "{PARAMETER}"',
        'instance_types = ["g4dn.*"]',
        *lines,
    ]
    workload = '[workloads.conv]\nentrypoint = "work.py:build"\nsamples = 1000\nglobal_batch = 16\n'
    (folder / "srift.toml").write_text("\n".join(["[ec2]", *stated, workload]))
    return folder / "srift.toml"
