"""The doctor of workloads' data: folders that are there, addresses that can be listed, room for them on a volume.

What only the machines' role may do cannot be seen from here: the statement that its policy needs is printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ..node.data import KEPT_FREE_BYTES
from ..providers.ec2.api import Ec2Api, Store
from ..providers.ec2.errors import DENIED, AwsRefused
from ..providers.ec2.settings import Ec2
from ..workspace.home import Wrong
from ..workspace.settings import Settings, SettingsError
from ..workspace.workload_data import MOST_FILES, Address, WorkloadData, files_below, said_bytes
from .findings import Finding, judged

_GIB = 2**30


def examine_data(settings: Settings, api: Ec2Api | None = None) -> Iterator[Finding]:
    """A line for each workload's data; what lies in S3, and what machines of EC2 hold, is looked at through `api`."""
    for name in settings.workloads:
        check = f"data of {name}"
        try:
            data = settings.data(name)
        except SettingsError as error:
            yield Finding(check, "wrong", str(error))
            continue
        if data is not None and data.address is None:
            yield judged(check, partial(_folder, None if api is None else settings.ec2, data))
        elif data is not None and data.address is not None and api is not None:
            yield from _address(check, api, settings.ec2, data.address)


def statements(ec2: Ec2, addresses: Mapping[str, Address]) -> list[dict[str, Any]]:
    """What the policy of the machines' role needs beside deployments/iam to read `addresses`; empty where it has it."""
    needed = sorted({str(one): one for one in addresses.values() if not _ours(ec2, one)}.items())
    return [
        statement
        for number, (_, one) in enumerate(needed, 1)
        for statement in _statements(one, number)
    ]


def addresses_of(settings: Settings) -> dict[str, Address]:
    """By workload, of those whose data lie in S3. Raises SettingsError."""
    every = {name: settings.data(name) for name in settings.workloads}
    return {
        name: one.address
        for name, one in every.items()
        if one is not None and one.address is not None
    }


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


def _folder(ec2: Ec2 | None, data: WorkloadData) -> str:
    assert data.folder is not None
    files = files_below(data.folder)
    size = sum(files.values())
    if ec2 is not None:
        _refuse_too_much(ec2, size)
    return f"{len(files)} files of {said_bytes(size)} in {data.folder}" + (
        ", uploaded before machines are bought" if ec2 is not None else ""
    )


def _address(check: str, api: Ec2Api, ec2: Ec2, address: Address) -> Iterator[Finding]:
    try:
        yield Finding(check, "ok", _listed(api, ec2, address))
    except AwsRefused as error:
        if error.code == "NoSuchBucket":
            yield Finding(check, "wrong", f"{address}: there is no bucket called {address.bucket}")
        elif error.code in DENIED:
            says = f"{address} may not be listed by this AWS identity: its size is not known before it is fetched"
            yield Finding(check, "note", says)
        else:
            yield Finding(check, "wrong", f"{address}: {error}")
    except Wrong as wrong:
        yield Finding(check, "wrong", str(wrong))
    if not _ours(ec2, address):
        lacking = json.dumps(_statements(address, 1))
        says = f"not seen from here: the policy of the machines' role ({ec2.instance_profile}) must hold {lacking}"
        yield Finding(check, "note", says)


def _listed(api: Ec2Api, ec2: Ec2, address: Address) -> str:
    listed, _ = Store(api, ec2.regions[0], address.bucket).listed(address.prefix, MOST_FILES)
    size = sum(one.size for one in listed)
    if not listed:
        raise Wrong(
            f"{address} holds no object: is its prefix right? `aws s3 ls {address}` shows what is there"
        )
    _refuse_too_much(ec2, size)
    return f"{len(listed)} objects of {said_bytes(size)} at {address}"


def _refuse_too_much(ec2: Ec2, size: int) -> None:
    """Whatever the image takes. Raises Wrong."""
    needed_gib = -(-(size + KEPT_FREE_BYTES) // _GIB)
    if needed_gib > ec2.volume_gib:
        raise Wrong(
            f"they take {said_bytes(size)}, and [ec2] volume_gib is {ec2.volume_gib}: set it to {needed_gib} and"
            " what the image takes, at least"
        )
