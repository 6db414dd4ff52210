"""What the doctor finds: one line a check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..providers.base import ProviderError


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `note` stops nothing; `wrong` names the fix."""

    check: str
    status: Literal["ok", "note", "wrong"]
    says: str


def judged(check: str, ask: Callable[[], str]) -> Finding:
    """Return `ask()` as ok, or its ProviderError as wrong."""
    try:
        return Finding(check, "ok", ask())
    except ProviderError as error:
        return Finding(check, "wrong", str(error))


def well(findings: Sequence[Finding]) -> bool:
    return not any(one.status == "wrong" for one in findings)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"well": well(findings), "findings": [asdict(one) for one in findings]}


def as_text(findings: Sequence[Finding]) -> str:
    width = max(len(one.check) for one in findings)
    lines = [f"{one.status:5}  {one.check:{width}}  {one.says}" for one in findings]
    wrong = sum(one.status == "wrong" for one in findings)
    return "\n".join([*lines, f"{wrong} to fix" if wrong else "all is well: a refresh can start"])
