"""Fill in the placeholders of the IAM policies in deployments/iam, such as the bucket's name."""

import json
from pathlib import Path
from typing import Any

from ..providers.ec2.settings import Ec2
from ..workspace.settings import SettingsError

FOLDER = Path(__file__).resolve().parents[2] / "deployments" / "iam"
NAMES = ("controller-policy", "node-policy", "node-trust")
ACCOUNT = "123456789012"  # the example account of AWS's documentation


def policies(ec2: Ec2, account: str | None = None) -> dict[str, Any]:
    """Return the IAM policies as {file name without suffix: JSON object}.

    account: number of the AWS account; None means the example account of AWS's documentation.

    Raises SettingsError if no bucket is set or deployments/iam is missing.
    """
    if ec2.bucket is None:
        raise SettingsError("set bucket under [ec2] in srift.toml: the IAM policies need its name")
    if not FOLDER.is_dir():
        raise SettingsError(f"{FOLDER} is missing: run this command in a checkout of Srift")
    names = {
        "bucket": ec2.bucket,
        "prefix": ec2.prefix,
        "deployment": ec2.deployment,
        "instance_profile": ec2.instance_profile,
        "ami_parameter": ec2.ami_parameter,
        "account": account or ACCOUNT,
    }
    documents = {}
    for policy in NAMES:
        text = (FOLDER / f"{policy}.json").read_text()
        for name, value in names.items():  # not str.format: JSON and `${aws:userid}` have braces
            text = text.replace("{" + name + "}", value)
        documents[policy] = json.loads(text)
    return documents
