"""List legal names of settings, and suggest corrections for a misspelt name."""

import difflib
from collections.abc import Iterable

# A name of a workload or instance type must fit into `2xNAME+1xNAME`, a run's label and a path.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def nearest_names(name: str, known: Iterable[object], *, otherwise: str | None = None) -> str:
    """Return the end of an error message: up to three `known` names that are similar to `name`.

    If no name is similar, return `otherwise`. If `otherwise` is None, list all known names.
    """
    names = sorted(str(each) for each in known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(map(repr, close)) + "?"
    if otherwise is not None:
        return otherwise
    return "known: " + (", ".join(names) or "none")
