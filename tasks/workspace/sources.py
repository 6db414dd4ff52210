"""A workload's code on this disk: a file, or a folder with its requirements; its digest, and the archive that travels.

What begins with a dot, virtual environments and compiled code stay at home, and so does what a link leads to outside
the folder. A workload that is one plain file has the digest and travels as it always did.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shlex
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.domain.suggestions import nearest_names

MOST_BYTES = (
    64 * 2**20
)  # of all files of a workload: every machine fetches them, and they go up once for each
MOST_FILES = 20_000
_NAMED = 3  # of the largest entries
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")  # what a folder holds that is a Python environment
_COMPILED = (".pyc", ".pyo")
_AGENT = "node"  # the package that runs on machines: a workload's module of that name would be taken for it
_MOMENT = 315_619_200  # 1980-01-02: of every file in an archive; a wheel built from them takes none before 1980


class SourceRefused(Exception):
    """A workload's code cannot be had as `srift.toml` says. `key` is the setting that is wrong."""

    def __init__(self, key: str, sentence: str) -> None:
        super().__init__(sentence)
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The files of a workload by the names that they travel under, sorted.

    `entry` is the name of the file with the function; `module` the dotted name by which a folder's code imports it,
    empty where the file stands alone. `requirements` names the requirements file, `needed` it and the files that
    installing reads. `left_out`: sentences on what a user may miss.
    """

    files: Mapping[str, Path]
    entry: str
    module: str = ""
    requirements: str = ""
    needed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @classmethod
    def of_file(cls, path: Path) -> Source:
        """One file alone."""
        return cls(files={path.name: path}, entry=path.name)

    @property
    def packed(self) -> bool:
        """Whether it travels as an archive, else as the file that it is."""
        return bool(self.module or self.requirements)

    def read(self) -> dict[str, bytes]:
        """The content of each file. Raises OSError."""
        return {name: path.read_bytes() for name, path in self.files.items()}

    def digest(
        self,
        contents: Mapping[str, bytes],
        function: str,
        arguments: Mapping[str, Any],
        *,
        env: Mapping[str, str],
        data: str = "",
    ) -> str:
        """Twelve hex digits: another digest is another workload. `data`: the digest of its data, if it has some."""
        content = hashed(contents).digest() if self.packed else contents[self.entry]
        called = f"{self.module}:{function}" if self.module else function
        return digest_of(
            content, called, arguments, requirements=self.requirements, env=dict(env), data=data
        )

    def needed_digest(self, contents: Mapping[str, bytes]) -> str:
        """Of the requirements file and all that installing reads; empty without requirements."""
        needed = {name: contents[name] for name in self.needed}
        return hashed(needed | {"": self.requirements.encode()}).hexdigest()[:12] if needed else ""

    def travels_as(self, contents: Mapping[str, bytes]) -> bytes:
        """The file, or the same archive for the same contents."""
        return archive(contents) if self.packed else contents[self.entry]


def digest_of(content: bytes, function: str, arguments: Mapping[str, Any], **more: Any) -> str:
    """Digest of a workload whose file holds `content`. What is empty of `more` does not change it."""
    options = {name: value for name, value in more.items() if value}
    rest = json.dumps(
        [function, dict(arguments), *([options] if options else [])], sort_keys=True
    ).encode()
    return hashlib.sha256(content + b"\0" + rest).hexdigest()[:12]


def hashed(contents: Mapping[str, bytes]) -> Any:
    """SHA-256 of names and contents, in the order of the names."""
    whole = hashlib.sha256()
    for name in sorted(contents):
        whole.update(f"{name}\0{len(contents[name])}\0".encode(errors="surrogateescape"))
        whole.update(contents[name])
    return whole


def archive(contents: Mapping[str, bytes]) -> bytes:
    """A tar.gz with those files, and no more of this disk: no owner, mode or moment."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(contents):
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(contents[name]), _MOMENT, 0o644
            tar.addfile(member, io.BytesIO(contents[name]))
    return gzip.compress(held.getvalue(), compresslevel=6, mtime=0)


def folder_source(
    folder: Path, module: str, requirements: str, without: Collection[Path]
) -> Source:
    """The code below `folder`, less what lies `without`. Raises SourceRefused."""
    found, left_out = _files(folder, {path.resolve() for path in without})
    _refuse_too_much(found, folder)
    _refuse_our_name(found, "path")
    needed = _needed(folder, requirements, found) if requirements else ()
    return Source(
        files=found,
        entry=_module_file(folder, module, found),
        module=module,
        requirements=requirements,
        needed=needed,
        left_out=tuple(left_out),
    )


def file_source(path: Path, root: Path, requirements: str) -> Source:
    """The file at `path`, with `requirements` below `root` and what they name where there are any.

    Raises SourceRefused.
    """
    if not requirements:
        return Source.of_file(path)
    needed = _needed(root, requirements, None)
    files = {path.name: path} | {name: root / name for name in needed}
    files = dict(sorted(files.items()))
    _refuse_our_name(files, "entrypoint")
    _refuse_too_much(files, root, "requirements")
    return Source(files=files, entry=path.name, requirements=requirements, needed=needed)


def _refuse_our_name(files: Mapping[str, Path], key: str) -> None:
    """Raises SourceRefused where the folder that code runs in would hide the package that runs it."""
    for name in (f"{_AGENT}.py", f"{_AGENT}/__init__.py"):
        if name in files:
            raise SourceRefused(
                key, f"{files[name]} has the name of the package that runs on machines: rename it"
            )


def _files(folder: Path, without: Collection[Path]) -> tuple[dict[str, Path], list[str]]:
    """What travels of `folder` by name, and sentences on links that are not followed. Raises SourceRefused."""
    root, found, left_out = folder.resolve(), {}, []
    for place, folders, files in os.walk(root):
        here = Path(place)
        kept = []
        for name in sorted(folders):
            path = here / name
            if name.startswith(".") or name == "__pycache__" or path.resolve() in without:
                continue
            if path.is_symlink():
                left_out.append(
                    f"{path.relative_to(root)} is a link to a folder, which is not sent to machines"
                )
            elif not any((path / sign).exists() for sign in _ENVIRONMENTS):
                kept.append(name)
        folders[:] = kept
        for name in sorted(files):
            path = here / name
            target = path.resolve()
            if (
                name.startswith(".")
                or name.endswith(_COMPILED)
                or not target.is_file()
                or path in without
            ):
                continue
            if not target.is_relative_to(root):
                left_out.append(
                    f"{path.relative_to(root)} is a link out of the folder, and is not sent to machines"
                )
                continue
            found[path.relative_to(root).as_posix()] = path
            if len(found) > MOST_FILES:
                _refuse_too_much(found, folder)
    return dict(sorted(found.items())), left_out


def _refuse_too_much(files: Mapping[str, Path], folder: Path, key: str = "path") -> None:
    """Raises SourceRefused where they are too many, or too large, to be brought to every machine."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total = sum(sizes.values())
    if total <= MOST_BYTES and len(files) <= MOST_FILES:
        return
    entries: dict[str, list[int]] = {}
    for name, size in sizes.items():
        top, below, _ = name.partition("/")
        entries.setdefault(top + below, []).append(size)
    largest = sorted(entries, key=lambda entry: -sum(entries[entry]) - len(entries[entry]))[:_NAMED]
    listed = ", ".join(
        f"{entry} ({sum(entries[entry]) / 2**20:.1f} MiB in {len(entries[entry])})"
        for entry in largest
    )
    more = "more than " if len(files) > MOST_FILES else ""
    raise SourceRefused(
        key,
        f"{folder} holds {total / 2**20:.0f} MiB in {more}{min(len(files), MOST_FILES)} files, and a machine is sent at"
        f" most {MOST_BYTES >> 20} MiB in {MOST_FILES}; the largest: {listed}. Name data as `data`, and move what the"
        " code does not import out of the folder",
    )


def _module_file(folder: Path, module: str, files: Collection[str]) -> str:
    stem = module.replace(".", "/")
    for name in (f"{stem}.py", f"{stem}/__init__.py"):
        if name in files:
            return name
    known = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in files
        if _is_module(name)
    ]
    near = nearest_names(module, known)
    if near.startswith("known"):
        near = nearest_names(module, {name.partition(".")[0] for name in known})
    raise SourceRefused("entrypoint", f"no module {module!r} in {folder}; {near}")


def _is_module(name: str) -> bool:
    return name.endswith(".py") and all(
        part.isidentifier() for part in name.removesuffix(".py").split("/")
    )


# Of a requirements file, options whose value is a file or a folder; those of the first kind are read like it.
_REQUIREMENTS = ("-r", "--requirement")
_READ = (*_REQUIREMENTS, "-c", "--constraint")
_LOOKED_INTO = ("-f", "--find-links", "-e", "--editable")
_LOCAL = re.compile(
    r"(?:.*@\s*)?(?P<path>file:[^\s;#]*|\.{0,2}/[^\s;#[]*|\.{1,2}(?=[\s;[]|$)|[^\s;#@]+\.(?:whl|zip|tar\.gz))"
)


def _needed(folder: Path, requirements: str, sent: Collection[str] | None) -> tuple[str, ...]:
    """Names below `folder` of the requirements file and of the files that it names, folders' too.

    All must be among those `sent`, where that is given. Raises SourceRefused.
    """
    root, needed, waiting = folder.resolve(), set[str](), [(requirements, "")]
    while waiting:
        name, where = waiting.pop()
        path = _within(root, name, where)
        if not path.is_file():
            siblings = (
                [one.name for one in path.parent.glob("*.txt")] if path.parent.is_dir() else []
            )
            instead = (
                "create it, or take out what names it"
                if where
                else "create it, or take `requirements` out"
            )
            near = nearest_names(path.name, siblings, otherwise=instead)
            raise SourceRefused("requirements", f"{where}no file {path}; {near}")
        relative = path.relative_to(root).as_posix()
        if relative in needed:
            continue
        needed.add(relative)
        for number, option, value in _named_in(path):
            at = f"{relative}, line {number}: "
            if option in _READ:
                waiting.append((os.path.relpath(path.parent / value, root), at))
                continue
            beside = (
                option in ("-f", "--find-links") and (path.parent / value).exists()
            )  # as pip looks for them
            needed |= _below(
                root, os.path.relpath(path.parent / value, root) if beside else value, at
            )
    unsent = sorted(needed - set(sent)) if sent is not None else []
    if unsent:
        raise SourceRefused(
            "requirements", f"{unsent[0]} in {folder} is needed, and is of a kind that is not sent"
        )
    return tuple(sorted(needed))


def required(path: Path) -> list[str]:
    """What a requirements file, and those that it reads, ask for in words: `numpy>=2`, `name[extra] @ url`.

    Constraints ask for nothing; what is named by its place alone (a folder, a wheel) is left out.
    """
    found: list[str] = []
    read, waiting = set[Path](), [path.resolve()]
    while waiting:
        file = waiting.pop()
        if file in read or not file.is_file():
            continue
        read.add(file)
        waiting += [
            (file.parent / value).resolve()
            for _, option, value in _named_in(file)
            if option in _REQUIREMENTS
        ]
        found += [line for line in _lines(file) if not line.startswith("-")]
    return found


def _lines(path: Path) -> list[str]:
    """Those of a requirements file without comments; what a backslash continues is one."""
    text = path.read_text(errors="replace").replace("\\\n", " ")
    return [re.sub(r"(^|\s)#.*$", "", line).strip() for line in text.splitlines()]


def _named_in(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, option and value of everything local that a requirements file names."""
    for number, plain in enumerate(_lines(path), 1):
        if plain.startswith("-"):
            try:
                words = shlex.split(plain)
            except ValueError:
                continue  # pip says what is wrong with it
            option, equals, value = words[0].partition("=")
            if (
                option[:2] in ("-r", "-c", "-f", "-e")
                and not option.startswith("--")
                and len(option) > 2
            ):
                option, equals, value = option[:2], "=", words[0][2:]
            value = value if equals else (words[1] if len(words) > 1 else "")
            if option in (*_READ, *_LOOKED_INTO) and value and not _elsewhere(value):
                yield number, option, value.removeprefix("file:")
        elif (local := _LOCAL.match(plain)) and not _elsewhere(
            plain.partition("@")[2].strip() or plain
        ):
            yield number, "", local["path"].removeprefix("file://").removeprefix("file:")


def _elsewhere(value: str) -> bool:
    return "://" in value and not value.startswith("file:")


def _within(root: Path, name: str, where: str) -> Path:
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise SourceRefused(
            "requirements", f"{where}{name} lies outside {root}, and does not travel to a machine"
        )
    return path


def _below(root: Path, name: str, where: str) -> set[str]:
    """The file called `name`, or all files of that folder."""
    path = _within(root, name.partition("[")[0] if name.startswith(".") else name, where)
    if path.is_dir():
        found, _ = _files(path, ())
        below = {(path / one).relative_to(root).as_posix() for one in found}
        if below:
            return below
    if path.is_file():
        return {path.relative_to(root).as_posix()}
    raise SourceRefused("requirements", f"{where}nothing is at {path}")
