"""Check workloads' data: folders exist, S3 prefixes can be listed, and volumes are large enough."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..execution.data_transfer import DataCarrier
from ..providers.ec2.settings import Ec2
from ..workspace.settings import Settings, SettingsError
from ..workspace.workload_data import Address
from .findings import Finding


def examine_data(settings: Settings, carrier: DataCarrier | None = None) -> Iterator[Finding]:
    """Yield findings on the data of each workload.

    carrier: plans how EC2 machines get the data. None means local hosts. In that case, only folders
        are checked, not S3 data.
    """
    for name in settings.workloads:
        check = f"data of {name}"
        try:
            data = settings.data(name)
        except SettingsError as error:
            yield Finding(check, "wrong", str(error))
            continue
        if data is None:
            continue
        if carrier is not None:
            [plan] = carrier.plans([name], settings.ec2.regions[0])
            if plan.problem:
                yield Finding(check, "wrong", plan.problem)
            else:  # the size is unknown if only the machines' role may list the data
                yield Finding(check, "note" if plan.size is None else "ok", str(plan))
            if grants := statements(settings.ec2, data.source):
                role, policy = settings.ec2.instance_profile, json.dumps(grants)
                says = f"not checked: the IAM policy of {role} must contain {policy}"
                yield Finding(check, "note", says)
        elif isinstance(data.source, Path):
            yield Finding(check, "ok", str(data.source))


def statements(ec2: Ec2, *sources: Path | Address) -> list[dict[str, Any]]:
    """Return the IAM statements that let machines read the S3 addresses in `sources`.

    Addresses below s3://BUCKET/PREFIX/data/ are left out, because the policies in deployments/iam
    already allow them. BUCKET and PREFIX are settings in [ec2] of srift.toml.
    """
    entries: list[dict[str, Any]] = []
    ours = f"s3://{ec2.bucket}/{ec2.prefix}/data/"
    for source in sources:
        if isinstance(source, Path) or str(source).startswith(ours):
            continue
        bucket, below = f"arn:aws:s3:::{source.bucket}", f"{source.prefix}*"
        entries.append(
            {"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"{bucket}/{below}"}
        )
        listing = {"Condition": {"StringLike": {"s3:prefix": below}}, "Resource": bucket}
        entries.append({"Effect": "Allow", "Action": "s3:ListBucket", **listing})
    return entries
