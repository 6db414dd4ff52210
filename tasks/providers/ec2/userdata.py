"""The user-data of a machine: deployments/node-bootstrap.sh with its values and one Python file.

It holds no secret: the machine's role has the rights.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tasks.providers.base import NotSupported

MOST_BYTES = 16_384  # EC2's limit, before base64
_ROOT = Path(__file__).resolve().parents[3]
_TEMPLATE = _ROOT / "deployments" / "node-bootstrap.sh"
_METADATA = _ROOT / "tasks" / "node" / "on_ec2" / "metadata.py"
_MARK = "SRIFT_END_OF_FILE"
_LONGEST_S = 7 * 86_400.0
_ENDPOINT = r"(https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._/-]*)?)?"  # no user, no password


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBoot:
    """What all machines of a lease get. `endpoint`: an S3 other than AWS's."""

    bucket: str
    prefix: str
    region: str
    code_sha256: str
    lease_id: str
    role_id: str
    python: str
    endpoint: str = ""


def user_data(boot: NodeBoot, deadline_s: float) -> str:
    """The script that the machine runs as root at its first boot. Raises NotSupported."""
    if re.fullmatch(_ENDPOINT, boot.endpoint) is None:
        raise NotSupported("AWS_ENDPOINT_URL must be a plain http or https address")
    if not 1.0 <= deadline_s <= _LONGEST_S:
        raise NotSupported(f"a machine's deadline is {deadline_s} s, not 1 to {_LONGEST_S:.0f} s")
    values = {name: shlex.quote(value) for name, value in asdict(boot).items()} | {
        "lease": shlex.quote(boot.lease_id),
        "endpoint_option": f"--endpoint {shlex.quote(boot.endpoint)}" if boot.endpoint else "",
        "minutes": str(math.ceil(deadline_s / 60)),
        "seconds": str(int(deadline_s)),
        "mark": _MARK,
        "metadata": _without_docstrings(_METADATA),
    }
    script = re.sub(r"@([a-z0-9_]+)@", lambda found: values[found[1]], _read(_TEMPLATE))
    return fitting(script)


def fitting(script: str) -> str:
    """`script`, if EC2 takes it. Raises NotSupported with its size."""
    size_bytes = len(script.encode())
    if size_bytes > MOST_BYTES:
        raise NotSupported(f"the user-data has {size_bytes} bytes, and EC2 takes {MOST_BYTES}")
    return script


@cache
def _without_docstrings(file: Path) -> str:
    """The file's code without comments and docstrings, to save bytes."""
    tree = ast.parse(_read(file))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        raise NotSupported(f"{file} is missing: for EC2, run Srift from a checkout") from None
