"""What an error about a misspelt name ends with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_names(name: str, known: Iterable[object]) -> str:
    """The end of an error about a name: the nearest right ones, or all of them."""
    names = sorted(str(one) for one in known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(one) for one in close) + "?"
    return "known: " + (", ".join(names) if names else "none")
