"""Check workloads' data: folders exist, S3 prefixes can be listed, and volumes are large enough."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..node.data import KEPT_FREE_BYTES
from ..providers.ec2.api import Ec2Api, Store
from ..providers.ec2.errors import DENIED, AwsRefused
from ..providers.ec2.settings import Ec2
from ..workspace.home import Wrong
from ..workspace.settings import Settings, SettingsError
from ..workspace.workload_data import MOST_FILES, Address, files_below, said_bytes
from .findings import Finding, NotChecked, judged

_GIB = 2**30


def examine_data(settings: Settings, api: Ec2Api | None = None) -> Iterator[Finding]:
    """Yield findings on the data of each workload.

    api: the AWS client for a check on behalf of EC2 machines. None means local hosts; data in S3
    are then not checked.
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
        if isinstance(data.source, Path):
            yield judged(check, _folder, None if api is None else settings.ec2, data.source)
        elif api is not None:
            yield judged(check, _listed, api, settings.ec2, data.source)
            if needed := statements(settings.ec2, data.source):
                role, policy = settings.ec2.instance_profile, json.dumps(needed)
                says = f"not checked: the IAM policy of {role} must contain {policy}"
                yield Finding(check, "note", says)


def statements(ec2: Ec2, *sources: Path | Address) -> list[dict[str, Any]]:
    """Return the IAM statements that let machines read the S3 addresses in `sources`.

    Folders need no statement. Neither do addresses that the policies in deployments/iam allow.
    """
    found: list[dict[str, Any]] = []
    ours = f"s3://{ec2.bucket}/{ec2.prefix}/data/"
    for source in sources:
        if isinstance(source, Path) or str(source).startswith(ours):
            continue
        bucket, below = f"arn:aws:s3:::{source.bucket}", f"{source.prefix}*"
        found.append({"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"{bucket}/{below}"})
        listing = {"Condition": {"StringLike": {"s3:prefix": below}}, "Resource": bucket}
        found.append({"Effect": "Allow", "Action": "s3:ListBucket", **listing})
    return found


def _folder(ec2: Ec2 | None, folder: Path) -> str:
    sizes = files_below(folder).values()
    if ec2 is not None:
        _check_room(ec2, sum(sizes))
    return f"{len(sizes)} files of {said_bytes(sum(sizes))} in {folder}"


def _listed(api: Ec2Api, ec2: Ec2, address: Address) -> str:
    try:
        listed, _ = Store(api, ec2.regions[0], address.bucket).listed(address.prefix, MOST_FILES)
    except AwsRefused as error:
        if error.code in DENIED:  # the machines' role may still have the right
            raise NotChecked(f"{address}: {error}") from None
        raise
    if not listed:
        raise Wrong(f"{address} contains no object: `aws s3 ls {address}` shows what is there")
    size = sum(one["Size"] for one in listed)
    _check_room(ec2, size)
    return f"{len(listed)} objects of {said_bytes(size)} at {address}"


def _check_room(ec2: Ec2, size: int) -> None:
    """Raise Wrong if the machines' volume is too small for `size` bytes of data."""
    needed_gib = -(-(size + KEPT_FREE_BYTES) // _GIB)
    if needed_gib > ec2.volume_gib:
        raise Wrong(
            f"the data take {said_bytes(size)}: set [ec2] volume_gib to {needed_gib} plus the"
            f" image's size, instead of {ec2.volume_gib}"
        )
