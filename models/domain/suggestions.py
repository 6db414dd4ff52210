"""Valid names, and suggestions for a misspelt name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Fits into `2xNAME+1xNAME`, a run's label and a path.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
NAME_RULE = "the name {name!r} must be letters, digits, '.', '_' and '-', a letter or digit first"


def plain_name(name: str) -> bool:
    """True if a workload or instance type can have the name."""
    return _NAME.fullmatch(name) is not None


def refuse_odd_names(names: Iterable[str]) -> None:
    """Raise ValueError at the first name that is not plain."""
    for name in names:
        if not plain_name(name):
            raise ValueError(NAME_RULE.format(name=name))


def nearest_names(name: str, known: Iterable[object], *, otherwise: str | None = None) -> str:
    """End an error message with the nearest known names; without any, all names or `otherwise`."""
    names = sorted(str(each) for each in known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(map(repr, close)) + "?"
    if otherwise is not None:
        return otherwise
    return "known: " + (", ".join(names) if names else "none")
