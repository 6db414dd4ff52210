"""What the doctor finds: one line a check, and how the lines are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..providers.base import ProviderError


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `note` is for information and stops nothing; `wrong` says what it is and how to put it right."""

    check: str
    status: Literal["ok", "note", "wrong"]
    says: str


def judged(check: str, ask: Callable[[], str]) -> Finding:
    """`ask` returns what is right, or raises what is wrong."""
    try:
        return Finding(check, "ok", ask())
    except ProviderError as error:
        return Finding(check, "wrong", str(error))


def well(findings: Sequence[Finding]) -> bool:
    """Whether nothing is wrong."""
    return not any(one.status == "wrong" for one in findings)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """As `--json` prints it."""
    return {"well": well(findings), "findings": [asdict(one) for one in findings]}


def as_text(findings: Sequence[Finding]) -> str:
    """A line a finding, and the verdict."""
    width = max(len(one.check) for one in findings)
    lines = [f"{one.status:5}  {one.check:{width}}  {one.says}" for one in findings]
    wrong = sum(one.status == "wrong" for one in findings)
    return "\n".join(
        [*lines, f"{wrong} to put right" if wrong else "all is well: a refresh can start"]
    )
