"""Build a machine's user-data, the script that EC2 runs at its first boot.

The script is deployments/node-bootstrap.sh with the code of tasks/node/on_ec2/metadata.py. The
script contains no secret, because the machine gets its permissions from its IAM role.
"""

import math
import re
import shlex
from pathlib import Path

from ..base import NotSupported

_ROOT = Path(__file__).resolve().parents[3]
_LONGEST_S = 7 * 86_400.0
_ENDPOINT = r"(https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._/-]*)?)?"  # no user name or password


def user_data(deadline_s: float, *, endpoint: str = "", **values: str) -> str:
    """Return the script that a machine runs as root at its first boot.

    deadline_s: seconds after which the machine shuts itself down.
    endpoint: URL of a service that replaces AWS's S3; "" for AWS's S3.
    values: the following keyword arguments, which are equal for all machines of a launch.

    bucket, prefix, region   the S3 bucket, the prefix of Srift's objects in it, and its region
    code_sha256              SHA-256 of the archive with the code that the machines run
    lease                    id of the lease, the record of the launch
    role_id                  id of the machines' IAM role
    python                   path of the Python interpreter in the machine image

    Raises NotSupported in these cases:

    - The endpoint is not a plain URL.
    - The deadline is not between 1 second and 7 days.
    - Srift does not run from a Git checkout.
    """
    if re.fullmatch(_ENDPOINT, endpoint) is None:
        raise NotSupported(
            "AWS_ENDPOINT_URL must be a plain http or https address without user and password"
        )
    if not 1.0 <= deadline_s <= _LONGEST_S:
        raise NotSupported(
            f"a machine's deadline is {deadline_s} s after the request, but must be between 1 and"
            f" {_LONGEST_S:.0f} s"
        )
    filled = {name: shlex.quote(value) for name, value in values.items()} | {
        "endpoint": shlex.quote(endpoint),
        "endpoint_option": f"--endpoint {shlex.quote(endpoint)}" if endpoint else "",
        "minutes": str(math.ceil(deadline_s / 60)),
        "seconds": str(int(deadline_s)),
    }
    try:
        template = (_ROOT / "deployments" / "node-bootstrap.sh").read_text()
        filled["metadata"] = (_ROOT / "tasks" / "node" / "on_ec2" / "metadata.py").read_text()
    except FileNotFoundError as error:
        raise NotSupported(f"{error}: for EC2, run Srift from a Git checkout") from None
    return re.sub(r"@([a-z0-9_]+)@", lambda found: filled[found[1]], template)
