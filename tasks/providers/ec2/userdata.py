"""The user-data of a rented machine: deployments/node-bootstrap.sh with its values and one file of the node in it.

Pure but for the two files of this checkout that it reads. It holds no secret: the machine's role has the rights.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tasks.providers.base import NotSupported

MOST_BYTES = 16_384  # EC2's limit, before base64
_ROOT = Path(__file__).resolve().parents[3]
_TEMPLATE = _ROOT / "deployments" / "node-bootstrap.sh"
_ON_EC2 = _ROOT / "tasks" / "node" / "on_ec2"
_MARK = "SRIFT_END_OF_FILE"
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_LONGEST_S = 7 * 86_400.0
_FORMS = {
    "bucket": (r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "the name of an S3 bucket ([ec2] bucket)"),
    "prefix": (rf"{_WORD}(/{_WORD})*", "a prefix like srift or team/srift ([ec2] prefix)"),
    "region": (r"[a-z]{2}(-[a-z]+)+-\d", "a region like us-east-1"),
    "endpoint": (
        r"(https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._/-]*)?)?",
        "an address like http://127.0.0.1:5000",
    ),
    "code_sha256": (r"[0-9a-f]{64}", "64 hexadecimal digits"),
    "lease_id": (_WORD, "a lease's id"),
    "role_id": (
        r"[A-Z0-9]{8,128}",
        "the RoleId of the machines' role, like AROAEXAMPLE ([ec2] instance_profile)",
    ),
    "python": (r"/[A-Za-z0-9._+/-]+", "an absolute path ([ec2] python)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBoot:
    """What all machines of a lease are given. `endpoint`: where the store is if it is not AWS's, else empty."""

    bucket: str
    prefix: str
    region: str
    code_sha256: str
    lease_id: str
    role_id: str
    python: str
    endpoint: str = ""


def user_data(boot: NodeBoot, deadline_s: float) -> str:
    """The script that the machine runs as root when it has come up. Raises NotSupported, naming what is wrong."""
    words = {name: getattr(boot, name) for name in _FORMS}
    for name, value in words.items():
        form, meaning = _FORMS[name]
        if re.fullmatch(form, value) is None:
            raise NotSupported(
                f"{value!r} cannot be given to a machine as its {name}: it must be {meaning}"
            )
    if not 1.0 <= deadline_s <= _LONGEST_S:
        raise NotSupported(
            f"a machine's deadline must be 1 s to {_LONGEST_S:.0f} s away, not {deadline_s} s"
        )
    values = {name: shlex.quote(value) for name, value in words.items()} | {
        "lease": shlex.quote(boot.lease_id),
        "endpoint_option": f"--endpoint {shlex.quote(boot.endpoint)}" if boot.endpoint else "",
        "minutes": str(math.ceil(deadline_s / 60)),
        "seconds": str(int(deadline_s)),
        "mark": _MARK,
        "metadata": _bare(_ON_EC2 / "metadata.py"),
    }
    script = re.sub(r"@([a-z0-9_]+)@", lambda found: values[found[1]], _read(_TEMPLATE))
    return fitting(script)


def fitting(script: str) -> str:
    """`script`, if EC2 takes it. Raises NotSupported with its size."""
    size_bytes = len(script.encode())
    if size_bytes > MOST_BYTES:
        raise NotSupported(
            f"the user-data has {size_bytes} bytes and EC2 takes {MOST_BYTES}: shorten {_TEMPLATE.name}"
        )
    return script


@cache
def _bare(file: Path) -> str:
    """The file's code without comments and docstrings: every byte counts, and the whole is in the archive."""
    tree = ast.parse(_read(file))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    code = ast.unparse(tree)
    if _MARK in code:
        raise NotSupported(f"{file.name} holds {_MARK}, which ends it in the user-data")
    return code


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        raise NotSupported(
            f"{file} is missing: for EC2, run Srift from its checkout (make setup)"
        ) from None
