"""Packages that a workload imports, that are here, and that a machine would not have: no `requirements` names them.

Srift's environment holds far more than torch, and a check runs in it. A machine is sure to have torch, what torch
requires, and what the workload's requirements name; its image may have more.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions, packages_distributions
from pathlib import Path, PurePosixPath

from ..workspace.sources import Source, required

_NOT_RUN = (
    "TYPE_CHECKING",
    "typing.TYPE_CHECKING",
    "__name__ == '__main__'",
)  # of an imported file
# PEP 508: a name, and the extras that are wanted of it.
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


def unnamed_imports(source: Source, files: Iterable[str], environment: Path | None) -> list[str]:
    """A sentence for each of `files`, names of the workload's own that were imported, with such imports.

    `environment`: the folder of the Python environment that its requirements were installed in, None without any. A
    package is said once, of the first file.
    """
    own = {PurePosixPath(name).parts[0].removesuffix(".py") for name in source.files}
    imported: dict[str, str] = {}
    for file in files:
        for name in _imports(ast.parse(source.files[file].read_bytes())):
            imported.setdefault(name, file)
    strange = {
        name: file
        for name, file in imported.items()
        if name not in own | sys.stdlib_module_names | {"torch"}
    }
    if not strange:
        return []
    places = (
        [str(one) for one in environment.glob("lib/python*/site-packages")] if environment else []
    )
    asked = required(source.files[source.requirements]) if source.requirements else []
    there = _closure(["torch", *asked, *(one.name for one in distributions(path=places))], places)
    owners = packages_distributions()
    unnamed: dict[str, dict[str, str]] = {}
    for name, file in sorted(strange.items()):
        here = owners.get(name, [])
        if (
            here
            and not there & {_plain(one) for one in here}
            and PathFinder.find_spec(name, places) is None
        ):
            unnamed.setdefault(file, {})[name] = here[0]
    return [_said(file, names, source.requirements) for file, names in unnamed.items()]


def _said(file: str, names: dict[str, str], requirements: str) -> str:
    add = f"add {', '.join(dict.fromkeys(names.values()))} to "
    add += requirements or 'a file, and state `requirements = "requirements.txt"`'
    return (
        f"{file} imports {', '.join(names)}, which Srift's own environment has and no `requirements` name: another"
        f" machine is sure to have torch and what torch requires alone; {add}"
    )


def _imports(tree: ast.AST) -> Iterator[str]:
    """First names of what a file imports when it is imported itself, or in its functions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.If) and ast.unparse(node.test) in _NOT_RUN:
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _closure(asked: Iterable[str], places: list[str]) -> set[str]:
    """Plain names of all distributions that requirements in words lead to, of those in `places` or this environment.

    Conditions on Python or the system count as met.
    """
    known = {_plain(one.name): one for one in (*distributions(), *distributions(path=places))}
    found, waiting = set[tuple[str, str]](), list(_parts(asked))
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            name, extra = one
            waiting += _parts(_requires(known[name], extra)) if name in known else []
    return {name for name, _ in found}


def _requires(one: Distribution, extra: str) -> Iterator[str]:
    """Of a distribution for one of its extras; those that need none for the empty one."""
    for text in one.requires or []:
        condition = _EXTRA.findall(text.partition(";")[2])
        if extra in condition or not (extra or condition):
            yield text


def _parts(asked: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Plain name and extra, each name without an extra too."""
    for text in asked:
        if named := _NAMED.match(text):
            yield from (
                (_plain(named[1]), extra.strip()) for extra in ("", *(named[2] or "").split(","))
            )


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
