"""What `data` of a workload names: a folder of this machine, or an address of S3. Asks S3 nothing.

Wrong names are refused with the nearest right one, and so is what could not travel to a machine of EC2: the names of a
folder's files become names of objects.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from models.domain.suggestions import nearest_names

# A million files take minutes to list and hours to fetch one by one.
MOST_FILES = 1_000_000
_LONGEST_NAME = 900  # bytes: S3 takes 1024 of a key, and the prefix comes before
_FORM = "s3://bucket/prefix"
_ADDRESS = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?")
_LIKE_ADDRESS = re.compile(r"(?i)(s3:/*|\w+://)(.*)")
_BESIDE_LETTERS = set(
    "!_.'()=+@:, -/~#%&;[]{}^"
)  # of a prefix; no '*', '?' and '$', since it enters policies


class BadData(ValueError):
    """What `data` names is not there, or no data that could travel; the message says what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Objects of `bucket` whose keys begin with `prefix`, which is empty or ends with a slash."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadData:
    """Data of a workload as srift.toml names them; `source` is an absolute folder or an address.

    `digest`: of the text and, for a folder, of its files' names and sizes. Contents are not read.
    """

    text: str
    source: Path | Address
    digest: str

    @property
    def folder(self) -> Path | None:
        """None where they lie in S3."""
        return self.source if isinstance(self.source, Path) else None

    def fetched_below(self, home: Path) -> Path:
        """Where what lies in S3 is kept for local hosts, once fetched. Delete it to have it fetched anew."""
        return home / "data" / self.digest

    @property
    def address(self) -> Address | None:
        """None where they lie in a folder."""
        return self.source if isinstance(self.source, Address) else None


def source_of(text: str, root: Path) -> Path | Address:
    """What `text` names; a folder is relative to `root`. Raises BadData where it is malformed."""
    if not text.strip() or not text.isprintable():
        why = "has a character that cannot be printed" if text.strip() else "names nothing"
        raise BadData(f"{text!r} {why}: write a folder or {_FORM}")
    found = _LIKE_ADDRESS.fullmatch(text)
    if found is None:
        return (root / Path(text).expanduser()).resolve()
    if not text.startswith("s3://"):
        near = (
            f"; did you mean 's3://{found[2].lstrip('/')}'?"
            if found[1].lower().startswith("s3:")
            else ""
        )
        raise BadData(f"{text!r} is neither a folder nor of the form {_FORM}{near}")
    address = _ADDRESS.fullmatch(text)
    if address is None:
        raise BadData(
            f"{text!r} is not of the form {_FORM}: a bucket's name is of 3 to 63 lower case letters, digits, '-' and"
            " '.'"
        )
    bucket, prefix = address[1], (address[2] or "").removesuffix("/")
    odd = sorted({one for one in prefix if not (one.isalnum() or one in _BESIDE_LETTERS)})
    if odd or len(prefix.encode()) > _LONGEST_NAME:
        what = f"{odd[0]!r} in it" if odd else f"more than {_LONGEST_NAME} bytes"
        raise BadData(
            f"{text!r} has {what}, which cannot stand in an IAM policy: copy the data below a plainer prefix"
        )
    parts = prefix.split("/") if prefix else []
    if any(part in ("", ".", "..") for part in parts):
        plain = "/".join(part for part in parts if part not in ("", ".", ".."))
        raise BadData(
            f"{text!r} has an empty part, '.' or '..' in its prefix; did you mean 's3://{bucket}/{plain}'?"
        )
    return Address(bucket=bucket, prefix=f"{prefix}/" if prefix else "")


def refuse_no_folder(folder: Path, home: Path) -> None:
    """Raises BadData unless `folder` is one, holds something, and is not where `home`, which changes, lies."""
    if not folder.exists():
        siblings = (
            [one.name for one in folder.parent.iterdir() if one.is_dir()]
            if folder.parent.is_dir()
            else []
        )
        instead = "create it, or take `data` out"
        raise BadData(
            f"no folder {folder}; {nearest_names(folder.name, siblings, otherwise=instead)}"
        )
    if not folder.is_dir():
        raise BadData(
            f"{folder} is a file: name the folder that it lies in; did you mean {str(folder.parent)!r}?"
        )
    if home.is_relative_to(folder):
        raise BadData(
            f"{folder} holds SRIFT_HOME ({home}), which changes with every command: name a folder beside it"
        )
    try:
        with os.scandir(folder) as entries:
            empty = next(entries, None) is None
    except OSError as error:
        raise BadData(f"{folder} cannot be read: {error.strerror}") from None
    if empty:
        raise BadData(f"{folder} is empty: put the data there, or take `data` out")


def files_below(folder: Path) -> dict[str, int]:
    """Names relative to `folder`, with slashes, in order, and bytes of each. Raises BadData.

    A link counts as the file that it leads to; one to a folder is refused, since it might lead in a circle.
    """
    found: dict[str, int] = {}
    for name, size in _walk(folder, ""):
        found[name] = size
        if len(found) > MOST_FILES:
            raise BadData(
                f"{folder} has more than {MOST_FILES} files: pack them into archives of some hundred MB each"
            )
    if not found:
        raise BadData(f"{folder} has no file in it: put the data there, or take `data` out")
    return dict(sorted(found.items()))


def _walk(folder: Path, within: str) -> Iterator[tuple[str, int]]:
    try:
        with os.scandir(folder) as opened:
            entries = list(opened)
    except OSError as error:
        raise BadData(f"{folder} cannot be read: {error.strerror}") from None
    for entry in entries:
        name = f"{within}{entry.name}"
        if (
            not name.isprintable()
            or "\\" in name
            or len(name.encode(errors="replace")) > _LONGEST_NAME
        ):
            raise BadData(
                f"{folder} has a file called {entry.name!r}, which no object of S3 can be called: rename it"
            )
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), f"{name}/")
            elif entry.is_file():
                yield name, entry.stat().st_size
            else:
                raise BadData(
                    f"{entry.path} {_what(entry)}, which does not travel: take it away, or copy what it names"
                )
        except OSError as error:
            raise BadData(f"{entry.path} cannot be read: {error.strerror}") from None


def _what(entry: os.DirEntry[str]) -> str:
    if not entry.is_symlink():
        return "is no plain file"
    return "is a link to a folder" if entry.is_dir() else "is a link that leads nowhere"


def digest_of_data(text: str, files: dict[str, int] | None) -> str:
    """Twelve hex digits of the text, and of names and sizes where it names a folder."""
    text_of_all = json.dumps([text.rstrip("/") or text, files])
    return hashlib.sha256(text_of_all.encode()).hexdigest()[:12]


def said_bytes(size: int) -> str:
    """For a sentence: `3.2 GiB`."""
    for unit, of in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= of:
            return f"{size / of:.1f} {unit}"
    return f"{size} bytes"
