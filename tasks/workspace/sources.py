"""Select the files of a workload's code, compute their digest, and pack them for machines."""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.domain.suggestions import nearest_names

from ..providers.archive import archive

MAX_BYTES = 64 * 2**20  # every machine fetches the archive
MAX_FILES = 20_000
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")  # entries that mark a Python environment
_COMPILED = (".pyc", ".pyo")
_AGENT = ("node.py", "node/__init__.py")  # would shadow Srift's package `node` on machines
# Matches what may make pip read other files: an option, a path or an archive.
_READS_FILES = re.compile(r"^\s*-|/|\.whl|\.zip|\.tar\.gz", re.MULTILINE)
# after "must not"
_LINK = "link out of the folder, to a hidden file, to SRIFT_HOME or to the data"


class SourceRefused(Exception):
    """The workload's code cannot be sent to machines. `key` names the setting to correct."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files of a workload's code.

    files: {name on the training machine: path on this machine}.
    entry: name of the file that defines the entrypoint function.
    module: dotted module name of `entry`; empty if the code is a single file.
    requirements: name of the requirements file; empty if there is none.
    left_out: names of symbolic links that are not sent to machines.
    """

    files: Mapping[str, Path]
    entry: str
    module: str = ""
    requirements: str = ""
    left_out: Sequence[str] = ()

    @property
    def packed(self) -> bool:
        """Return True if the code is sent as an archive, False if it is sent as a single file."""
        return bool(self.module or self.requirements)

    def read(self) -> dict[str, bytes]:
        """Return the files as {name: content}. Raises OSError if a file cannot be read."""
        return {name: path.read_bytes() for name, path in self.files.items()}

    def digest(
        self,
        contents: Mapping[str, bytes],
        function: str,
        arguments: Mapping[str, Any],
        *,
        env: Mapping[str, str] | None = None,
        data: str = "",
    ) -> str:
        """Return twelve hex digits that identify the code, its arguments, environment and data.

        contents: the result of `read`.
        function: name of the entrypoint function.
        env: environment variables of the workload.
        data: digest of the workload's data; empty without data.
        """
        content = hash_files(contents).digest() if self.packed else contents[self.entry]
        call = [f"{self.module}:{function}" if self.module else function, dict(arguments)]
        options = {"requirements": self.requirements, "env": env, "data": data}
        if values := {name: value for name, value in options.items() if value}:
            call.append(values)
        rest = json.dumps(call, sort_keys=True).encode()
        return hashlib.sha256(content + b"\0" + rest).hexdigest()[:12]

    def needed_digest(self, contents: Mapping[str, bytes]) -> str:
        """Return twelve hex digits that identify the files that pip reads; "" without requirements.

        contents: the result of `read`.
        """
        if not self.requirements:
            return ""
        requirements = contents[self.requirements]
        # If the requirements file may refer to other files, the digest covers all files.
        local = _READS_FILES.search(requirements.decode(errors="replace"))
        file_hash = hash_files(contents if local else {self.requirements: requirements})
        # The digest covers the name too, because two requirements files need two environments.
        file_hash.update(self.requirements.encode())
        return str(file_hash.hexdigest()[:12])

    def travels_as(self, contents: Mapping[str, bytes]) -> bytes:
        """Return the code as the bytes to send to machines.

        If `packed` is True, the bytes are an archive of all files. Otherwise the code is a single
        file, and the bytes are its content.

        contents: the result of `read`.
        """
        return archive(contents) if self.packed else contents[self.entry]


def hash_files(contents: Mapping[str, bytes]) -> Any:
    """Return the SHA-256 hash of the names and contents of files, as a hashlib object.

    contents: {file name: content}, in any order.
    """
    whole = hashlib.sha256()
    for name in sorted(contents):
        whole.update(f"{name}\0{len(contents[name])}\0".encode(errors="surrogateescape"))
        whole.update(contents[name])
    return whole


def folder_source(
    folder: Path, module: str, requirements: str, without: Collection[Path]
) -> Source:
    """Return the code below `folder`, except the files and folders in `without`.

    module: dotted name of the entrypoint's module.
    requirements: name of the requirements file in `folder`; empty if there is none.

    Raises SourceRefused in these cases:

    - The module or the requirements file is missing.
    - The files are too many or too large.
    - A file would shadow Srift's package `node`.
    """
    files, left_out = _files(folder.resolve(), {path.resolve() for path in without})
    stem = module.replace(".", "/")
    entry = next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in files), None)
    if entry is None:
        modules = [name[:-3].replace("/", ".") for name in files if name.endswith(".py")]
        raise SourceRefused(
            "entrypoint", f"no module {module!r} in {folder}; {nearest_names(module, modules)}"
        )
    _check(files, folder, requirements)
    return Source(
        files=files,
        entry=entry,
        module=module,
        requirements=requirements,
        left_out=left_out,
    )


def file_source(root: Path, name: str, requirements: str, without: Collection[Path] = ()) -> Source:
    """Return the code of a workload that is a single file `name` in the folder `root`.

    requirements: name of the requirements file in `root`; empty if there is none.
    without: resolved paths of files and folders to which links must not lead.

    Raises SourceRefused in these cases:

    - The code file or the requirements file is missing.
    - A file is a link that leads out of `root`, to a hidden file or to a path in `without`.
    - `requirements` is not empty, and the two files are too large.
    - `requirements` is not empty, and a file would shadow Srift's package `node`.
    """
    path = root / name
    if not path.is_file():
        near = nearest_names(path.name, [other.name for other in path.parent.glob("*")])
        raise SourceRefused("entrypoint", f"no file {path}; {near}")
    if path.is_symlink() and _leads_out(path, root, without):
        raise SourceRefused("entrypoint", f"{path} must not {_LINK}")
    files = {path.name: path}
    if requirements:
        file = root / requirements
        if file.is_file() and not _leads_out(file, root, without):
            files[requirements] = file
        _check(files, root, requirements)
    return Source(files=files, entry=path.name, requirements=requirements)


def _files(root: Path, without: Collection[Path]) -> tuple[dict[str, Path], list[str]]:
    """Return the files to send as {name: path}, and the names of symbolic links that are not sent.

    Hidden files, Python environments, compiled code and the paths in `without` are skipped. A
    symbolic link is not sent if it leads to a folder, out of `root`, to a hidden file, or to a path
    in `without`.
    """
    files: dict[str, Path] = {}
    left_out: list[str] = []
    for place, folders, names in os.walk(root):
        here = Path(place)
        folders[:] = [name for name in folders if _sends_folder(here / name, without)]
        for path in (here / name for name in (*folders, *names)):
            name = path.relative_to(root).as_posix()
            if path.name.startswith(".") or name.endswith(_COMPILED) or path in without:
                continue
            if _leads_out(path, root, without):
                left_out.append(name)
            elif path.is_file():
                files[name] = path
    return dict(sorted(files.items())), left_out


def _leads_out(path: Path, root: Path, without: Collection[Path]) -> bool:
    """Return True if `path` contains a symbolic link and leads to a forbidden target.

    A forbidden target is a folder, lies outside `root`, is hidden, or is a path in `without` or
    below it. The link may be `path` itself or one of its parent folders.
    """
    target = path.resolve()
    is_hidden = "/." in str(target).removeprefix(str(root))
    is_skipped = is_hidden or any(map(target.is_relative_to, without))
    out = path.is_dir() or is_skipped or not target.is_relative_to(root)
    return out and os.path.abspath(path) != str(target)


def _sends_folder(path: Path, without: Collection[Path]) -> bool:
    is_hidden = path.name.startswith(".") or path.name == "__pycache__"
    environment = any((path / sign).exists() for sign in _ENVIRONMENTS)
    return not (is_hidden or environment or path.resolve() in without)


def _check(files: Mapping[str, Path], folder: Path, requirements: str) -> None:
    """Raise SourceRefused if the files cannot be sent to machines.

    The files must not be too many or too large, must include the requirements file, and must not
    shadow Srift's package `node`.
    """
    for name in _AGENT:
        if name in files:
            raise SourceRefused(
                "path", f"rename {files[name]}: its name hides Srift's package `node`"
            )
    if requirements and requirements not in files:
        raise SourceRefused(
            "requirements",
            f"{folder / requirements} must exist and must not be hidden. It must not {_LINK}",
        )
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if sum(sizes.values()) > MAX_BYTES or len(files) > MAX_FILES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        raise SourceRefused(
            "path",
            f"{folder} has {sum(sizes.values()) / 2**20:.0f} MiB in {len(files)} files, but the"
            f" limit for code is {MAX_BYTES >> 20} MiB in {MAX_FILES} files. Move data files to"
            f" another folder and set `data` to that folder (largest files: {', '.join(largest)})",
        )
