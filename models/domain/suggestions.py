"""Define the characters that names may contain, and suggest corrections for misspelt names."""

import difflib
from collections.abc import Iterable

# For names of workloads and instance types. These names become part of paths, of the labels of
# runs, and of cluster names such as `2xNAME+1xNAME`.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def nearest_names(name: str, known: Iterable[object]) -> str:
    """Return a hint for the end of an error message, such as `did you mean 'conv'?`.

    The hint names up to three `known` names that are similar to `name`. If no name is similar, the
    hint lists all `known` names.
    """
    names = sorted(str(each) for each in known)
    close = difflib.get_close_matches(name, names)
    if close:
        return "did you mean " + " or ".join(map(repr, close)) + "?"
    return "known: " + (", ".join(names) or "none")
