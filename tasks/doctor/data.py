"""Check workloads' data: folders exist, S3 prefixes can be listed, volumes have room."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..node.data import KEPT_FREE_BYTES
from ..providers.base import ProviderError
from ..providers.ec2.api import Ec2Api, Store
from ..providers.ec2.errors import DENIED, AwsRefused
from ..providers.ec2.settings import Ec2
from ..workspace.home import Wrong
from ..workspace.settings import Settings, SettingsError
from ..workspace.workload_data import MOST_FILES, Address, files_below, said_bytes
from .findings import Finding, judged

_GIB = 2**30


def examine_data(settings: Settings, api: Ec2Api | None = None) -> Iterator[Finding]:
    """Return a finding for each workload's data; `api` is given where EC2 is to be used."""
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
            ec2 = None if api is None else settings.ec2
            yield judged(check, partial(_folder, ec2, data.source))
        elif api is not None:
            yield from _address(check, api, settings.ec2, data.source)


def statements(ec2: Ec2, addresses: Mapping[str, Address]) -> list[dict[str, Any]]:
    """Return what the machines' policy needs, beside deployments/iam, to read `addresses`."""
    needed = sorted({str(one): one for one in addresses.values() if not _ours(ec2, one)}.items())
    return [
        statement
        for number, (_, address) in enumerate(needed, 1)
        for statement in _statements(address, number)
    ]


def addresses_of(settings: Settings) -> dict[str, Address]:
    """Return the S3 address of each workload with data there. Raises SettingsError."""
    every = {name: settings.data(name) for name in settings.workloads}
    sources = {name: data.source for name, data in every.items() if data}
    return {name: source for name, source in sources.items() if isinstance(source, Address)}


def _ours(ec2: Ec2, address: Address) -> bool:
    return address.bucket == ec2.bucket and address.prefix.startswith(f"{ec2.prefix}/data/")


def _statements(address: Address, number: int) -> list[dict[str, Any]]:
    bucket = f"arn:aws:s3:::{address.bucket}"
    return [
        {
            "Sid": f"ReadDataOfWorkloads{number}",
            "Effect": "Allow",
            "Action": "s3:GetObject",
            "Resource": f"{bucket}/{address.prefix}*",
        },
        {
            "Sid": f"ListDataOfWorkloads{number}",
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": bucket,
            "Condition": {"StringLike": {"s3:prefix": f"{address.prefix}*"}},
        },
    ]


def _folder(ec2: Ec2 | None, folder: Path) -> str:
    sizes = files_below(folder).values()
    if ec2 is not None:
        _check_room(ec2, sum(sizes))
    return f"{len(sizes)} files of {said_bytes(sum(sizes))} in {folder}"


def _address(check: str, api: Ec2Api, ec2: Ec2, address: Address) -> Iterator[Finding]:
    try:
        yield Finding(check, "ok", _listed(api, ec2, address))
    except ProviderError as error:
        denied = isinstance(error, AwsRefused) and error.code in DENIED
        yield Finding(check, "note" if denied else "wrong", f"{address}: {error}")
    if not _ours(ec2, address):
        policy = json.dumps(_statements(address, 1))
        says = f"not checked: the policy of {ec2.instance_profile} must contain {policy}"
        yield Finding(check, "note", says)


def _listed(api: Ec2Api, ec2: Ec2, address: Address) -> str:
    listed, _ = Store(api, ec2.regions[0], address.bucket).listed(address.prefix, MOST_FILES)
    if not listed:
        raise Wrong(f"{address} holds no object: `aws s3 ls {address}` shows what is there")
    size = sum(one["Size"] for one in listed)
    _check_room(ec2, size)
    return f"{len(listed)} objects of {said_bytes(size)} at {address}"


def _check_room(ec2: Ec2, size: int) -> None:
    """Raises Wrong if the machines' volume is too small."""
    needed_gib = -(-(size + KEPT_FREE_BYTES) // _GIB)
    if needed_gib > ec2.volume_gib:
        raise Wrong(
            f"the data take {said_bytes(size)}: set [ec2] volume_gib to {needed_gib} plus the"
            f" image's size; it is {ec2.volume_gib}"
        )
