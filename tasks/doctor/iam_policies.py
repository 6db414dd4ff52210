"""The IAM policies of deployments/iam with this installation's names in them: `srift doctor --print-policies`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..providers.ec2.settings import Ec2
from ..workspace.settings import SettingsError

FOLDER = Path(__file__).resolve().parents[2] / "deployments" / "iam"
NAMES = ("controller-policy", "node-policy", "node-trust")
ACCOUNT = (
    "123456789012"  # AWS's own example; stands where nobody could be asked which account it is
)


def policies(ec2: Ec2, account: str | None = None, node_role: str | None = None) -> dict[str, Any]:
    """Each policy by its file's name. The machines' role is called as their profile, unless `node_role` says otherwise.

    Raises SettingsError where no bucket is named, or where the files did not come along.
    """
    if ec2.bucket is None:
        raise SettingsError(
            "the policies name the bucket: set bucket under [ec2] in srift.toml first"
        )
    if not FOLDER.is_dir():
        raise SettingsError(
            f"{FOLDER} is not there: the policies come with a checkout of Srift, not with the package"
        )
    named = {
        "bucket": ec2.bucket,
        "prefix": ec2.prefix,
        "deployment": ec2.deployment,
        "instance_profile": ec2.instance_profile,
        "node_role": node_role or ec2.instance_profile,
        "ami_parameter": ec2.ami_parameter,
        "account": account or ACCOUNT,
    }
    return {
        name: json.loads(_filled((FOLDER / f"{name}.json").read_text(), named)) for name in NAMES
    }


def _filled(text: str, named: dict[str, str]) -> str:
    """Not str.format: JSON has braces of its own, and `${aws:userid}` is AWS's to fill in."""
    for name, value in named.items():
        text = text.replace("{" + name + "}", value)
    return text
