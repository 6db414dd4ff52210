"""What the doctor finds: one line a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from warehouse.database import WarehouseBusy, WarehouseError, WarehouseMissing

from ..providers.base import ProviderError


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `note` stops nothing; `wrong` names the fix."""

    check: str
    status: Literal["ok", "note", "wrong"]
    says: str


class NotChecked(Exception):
    """Why a check could not look."""


def judged(check: str, ask: Callable[..., str], *given: Any) -> Finding:
    """Return `ask(*given)` as ok, or its error as wrong; a note if there is nothing to check."""
    try:
        return Finding(check, "ok", ask(*given))
    except (NotChecked, WarehouseMissing, WarehouseBusy) as error:
        return Finding(check, "note", str(error))
    except (ProviderError, WarehouseError, OSError) as error:
        return Finding(check, "wrong", str(error))


def problems(findings: Iterable[Finding]) -> list[str]:
    return [f"{one.check}: {one.says}" for one in findings if one.status == "wrong"]


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"well": not problems(findings), "findings": [asdict(one) for one in findings]}


def as_text(findings: Sequence[Finding]) -> str:
    width = max(len(one.check) for one in findings)
    lines = [f"{one.status:5}  {one.check:{width}}  {one.says}" for one in findings]
    wrong = len(problems(findings))
    return "\n".join([*lines, f"{wrong} to fix" if wrong else "all is well: a refresh can start"])
