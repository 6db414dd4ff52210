"""Define a finding of `srift doctor`, which is the result of a check."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from warehouse.database import WarehouseBusy, WarehouseError, WarehouseMissing

from ..providers.base import ProviderError


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    status: `wrong` stops a refresh that spends money; `note` and `ok` do not.
    says: the result as text. The text of `wrong` names the fix.
    """

    check: str
    status: Literal["ok", "note", "wrong"]
    says: str


class NotChecked(Exception):
    """A check could not run. The message gives the reason."""


def run_check(check: str, ask: Callable[..., str], *arguments: Any) -> Finding:
    """Run a check, and return its result as a finding.

    The status is `wrong` if the check fails. The status is `note` if the check could not run, or if
    the warehouse is missing or busy.

    check: the name of the check.
    ask: a function that does the check, and returns the result as text.
    arguments: the arguments of the function.
    """
    try:
        return Finding(check, "ok", ask(*arguments))
    except (NotChecked, WarehouseMissing, WarehouseBusy) as error:
        return Finding(check, "note", str(error))
    except (ProviderError, WarehouseError, OSError) as error:
        return Finding(check, "wrong", str(error))


def problems(findings: Iterable[Finding]) -> list[str]:
    return [f"{finding.check}: {finding.says}" for finding in findings if finding.status == "wrong"]


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"well": not problems(findings), "findings": [asdict(finding) for finding in findings]}


def as_text(findings: Sequence[Finding]) -> str:
    width = max(len(finding.check) for finding in findings)
    lines = [f"{finding.status:5}  {finding.check:{width}}  {finding.says}" for finding in findings]
    wrong = len(problems(findings))
    return "\n".join(
        [*lines, f"problems to fix: {wrong}" if wrong else "all is well: a refresh can start"]
    )
