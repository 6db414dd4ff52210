"""Check the setting `data` of a workload: a folder on this machine, or an S3 prefix."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_FILES = 1_000_000  # machines fetch files one by one, so that more files would take hours
_MAX_NAME_BYTES = 900  # S3 allows 1024 bytes for a key, including the prefix
# The prefix is part of an IAM policy, where '*', '?' and '$' have a meaning.
_ADDRESS = re.compile(
    r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([\w!.'()=+@:, /~#%&;[\]{}^-]*))?"
)


class BadData(ValueError):
    """The setting `data` does not name data that can be sent to machines."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """An S3 prefix: all objects in `bucket` whose keys begin with `prefix`.

    `prefix` is empty or ends with a slash.
    """

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True, kw_only=True)
class WorkloadData:
    """The location of a workload's data, with a digest.

    text: the setting `data` in srift.toml.
    source: the folder or the S3 address that `text` names.
    digest: changes with `text` and, for a folder, with the names and sizes of its files.
    """

    text: str
    source: Path | Address
    digest: str

    def fetched_below(self, home: Path) -> Path:
        """Return the folder below `home` that holds a copy of S3 data, for local hosts."""
        return home / "data" / self.digest


def source_of(text: str, root: Path) -> Path | Address:
    """Parse the setting `data`: a folder relative to `root`, or an S3 address.

    The folder need not exist. Raises BadData if `text` is malformed.
    """
    if text.strip() and text.isprintable() and "://" not in text:
        return (root / Path(text).expanduser()).resolve()
    address = _ADDRESS.fullmatch(text)
    prefix = (address[2] or "").removesuffix("/") if address else ""
    plain = not prefix or not {"", ".", ".."} & set(prefix.split("/"))
    if address is None or not plain or len(prefix.encode()) > _MAX_NAME_BYTES:
        raise BadData(f"{text!r} must be a folder or an S3 address such as s3://bucket/prefix")
    return Address(bucket=address[1], prefix=f"{prefix}/" if prefix else "")


def read_data(text: str, root: Path, home: Path, follow_links: bool) -> WorkloadData:
    """Return the location and digest of a workload's data.

    text: the setting `data`.
    root: the folder that a relative path in `text` starts from.
    home: SRIFT_HOME.
    follow_links: if False, symbolic links must not lead out of the folder.

    Raises BadData in these cases:

    - `text` is malformed.
    - The folder contains SRIFT_HOME.
    - The files of the folder cannot be sent to machines.
    """
    source, files = source_of(text, root), None
    if isinstance(source, Path):
        if home.is_relative_to(source):
            raise BadData(
                f"{source} contains SRIFT_HOME, whose files change with every command: move the"
                " data or SRIFT_HOME"
            )
        files = files_below(source)
        for path in () if follow_links else map(source.joinpath, files):
            if path.is_symlink() and not path.resolve().is_relative_to(source):
                raise BadData(
                    f"{path} is a symbolic link out of the folder: replace it with a copy of the"
                    " target, or set follow_links = true"
                )
    return WorkloadData(text=text, source=source, digest=digest_of_data(text, files))


def files_below(folder: Path) -> dict[str, int]:
    """Return the files below `folder` as {path relative to `folder`: size in bytes}.

    A symbolic link to a file counts as the file.

    Raises BadData in these cases:

    - The folder is empty or cannot be read.
    - The folder has more than MOST_FILES files.
    - The folder contains a broken link, a link to a folder, a special file, or a name that S3
      refuses.
    """
    sizes: dict[str, int] = {}
    for name, size in _walk(folder, ""):
        sizes[name] = size
        if len(sizes) > MOST_FILES:
            raise BadData(f"{folder} has more than {MOST_FILES} files: pack them into archives")
    if not sizes:
        raise BadData(f"{folder} contains no file: put the data there, or remove `data`")
    return dict(sorted(sizes.items()))


def _walk(folder: Path, within: str) -> Iterator[tuple[str, int]]:
    try:
        with os.scandir(folder) as scan:
            entries = list(scan)
        for entry in entries:
            name = f"{within}{entry.name}"
            length = len(name.encode(errors="replace"))
            if not name.isprintable() or "\\" in name or length > _MAX_NAME_BYTES:
                raise BadData(f"rename {entry.name!r} in {folder}: S3 refuses this name")
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), f"{name}/")
            elif entry.is_file():
                yield name, entry.stat().st_size
            else:  # a link to a folder is refused, because links may form a cycle
                raise BadData(
                    f"{entry.path} is a broken link, a link to a folder or a special file: replace"
                    " it with a file or a folder"
                )
    except OSError as error:
        raise BadData(f"{error.filename} cannot be read: {error.strerror}") from None


def digest_of_data(text: str, files: dict[str, int] | None) -> str:
    """Return twelve hex digits that identify `text` and the names and sizes of the files.

    text: the setting `data`.
    files: {name: size in bytes} of a folder; None for an S3 address.
    """
    content = json.dumps([text.rstrip("/") or text, files])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def format_bytes(size: int) -> str:
    """Format a size in bytes, such as `3.2 GiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
