"""What the doctor finds: one line a check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..providers.base import ProviderError


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line. `note` is worth knowing and stops nothing; `wrong` says what it is and how to put it right."""

    check: str
    status: Literal["ok", "note", "wrong"]
    says: str


def judged(check: str, ask: Callable[[], str]) -> Finding:
    """`ask` returns what is right, or raises what is wrong."""
    try:
        return Finding(check=check, status="ok", says=ask())
    except ProviderError as error:
        return Finding(check=check, status="wrong", says=str(error))


def well(findings: Sequence[Finding]) -> bool:
    """Whether nothing is wrong."""
    return not any(one.status == "wrong" for one in findings)
