"""What names may be, and what an error about a misspelt one ends with."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*"
)  # what fits into `2xNAME+1xNAME`, a run's label and a path
NAME_RULE = (
    "the name {name!r} must be of letters, digits, '.', '_' and '-', a letter or digit first"
)


def plain_name(name: str) -> bool:
    """Can a workload or an instance type be called so? NAME_RULE says what it takes."""
    return _NAME.fullmatch(name) is not None


def refuse_odd_names(names: Iterable[str]) -> None:
    """Raises ValueError with NAME_RULE where one of them is not plain."""
    for name in names:
        if not plain_name(name):
            raise ValueError(NAME_RULE.format(name=name))


def nearest_names(name: str, known: Iterable[object], *, otherwise: str | None = None) -> str:
    """The end of an error about a name: the nearest right ones, or, where none is near, all of them or `otherwise`."""
    names = sorted(str(one) for one in known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(one) for one in close) + "?"
    if otherwise is not None:
        return otherwise
    return "known: " + (", ".join(names) if names else "none")
