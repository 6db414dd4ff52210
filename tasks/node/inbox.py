"""What the controller says, from the store into the machine's mailbox: the files that the manifest names.

A file is put in place only when its content is what the manifest says, written beside and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_FILES = 1000
_MOST_PARTS = 3
# a plan needs its workloads, a go its plan; done ends it all
_ORDER = ("plan", "go", "done")


class BadManifest(OSError):
    """The manifest, or the place that a node is given, is not what this version knows; the message says what."""


def place(path: Path, content: bytes, owner: int | None = None) -> None:
    """Write beside, flush, rename. Safe in a folder that belongs to `owner`: no link of theirs is followed.

    Raises OSError.
    """
    beside = path.with_name(f".{path.name}.courier")
    with suppress(FileNotFoundError):
        beside.unlink()
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
        if owner is not None:
            os.fchown(descriptor, owner, -1)
    os.replace(beside, path)


def files_of(content: bytes) -> dict[str, str]:
    """Names and digests in the order in which they are to be put in place. Raises BadManifest."""
    files = _object(content, "manifest.json").get("files")
    if not isinstance(files, dict) or len(files) > _MOST_FILES:
        raise BadManifest(f"manifest.json names no files, or more than {_MOST_FILES}")
    for name, digest in files.items():
        parts = str(name).split("/")
        if len(parts) > _MOST_PARTS or not all(_PART.fullmatch(part) for part in parts) or parts[0].startswith("node-"):
            raise BadManifest(f"manifest.json names {name!r}, which is no file of a mailbox")
        if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
            raise BadManifest(f"manifest.json has no sha256 for {name!r}")
    return dict(sorted(files.items(), key=lambda one: _rank(one[0])))


class Inbox:
    """Fetches into `directory`. `get(name)` raises OSError, also for what is not there yet."""

    def __init__(self, directory: Path, get: Callable[[str], bytes]) -> None:
        self._directory, self._get = directory, get
        self._placed: dict[str, str] = {}

    def rank(self) -> int:
        """This machine's place in the cluster. Raises OSError: not said yet, or not understood."""
        body = _object(self._get("node.json"), "node.json")
        node, nodes = body.get("node"), body.get("nodes")
        if not isinstance(node, int) or not isinstance(nodes, int) or not 0 <= node < nodes:
            raise BadManifest(f"node.json gives no place in a cluster: node {node!r} of {nodes!r}")
        return node

    def fetch(self) -> list[str]:
        """Put in place what is new or changed and name it. Raises OSError; what is in place by then stays there."""
        fresh = []
        for name, digest in files_of(self._get("manifest.json")).items():
            if self._placed.get(name) == digest:
                continue
            content = self._get(name)
            if hashlib.sha256(content).hexdigest() != digest:
                break  # it was replaced since; what depends on it waits for the next manifest
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            place(path, content)
            self._placed[name] = digest
            fresh.append(name)
        return fresh


def _rank(name: str) -> tuple[int, str]:
    kind = re.split(r"[-.]", name, maxsplit=1)[0]
    return (_ORDER.index(kind) + 1 if kind in _ORDER else 0), name


def _object(content: bytes, name: str) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise BadManifest(f"{name} is not a JSON object")
    return body
