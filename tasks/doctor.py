"""Whether a refresh could work here: each thing that it needs, whether it is right, and the fix where it is not.

Costs nothing, asks for no machine, leaves nothing behind. Sentences hold no secret: AWS's own words are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .installation import PROVIDERS, provider_of
from .nearest import nearest
from .providers.base import Provider, ProviderError
from .settings import Settings, SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line. `note` is worth knowing and stops nothing; `wrong` says what it is and how to put it right."""

    check: str
    status: Literal["ok", "note", "wrong"]
    says: str


class Wrong(ProviderError):
    """What is wrong, and the fix."""


def judged(check: str, ask: Callable[[], str]) -> Finding:
    """`ask` returns what is right, or raises what is wrong."""
    try:
        return Finding(check=check, status="ok", says=ask())
    except ProviderError as error:
        return Finding(check=check, status="wrong", says=str(error))


def examine(settings: Settings, provider: str) -> list[Finding]:
    """Every finding, in the order in which one would put things right. Raises SettingsError on an unknown provider."""
    if provider not in PROVIDERS:
        raise SettingsError(f"unknown provider {provider!r}; {nearest(provider, PROVIDERS)}")
    if provider == "local":
        return _local(provider_of(settings, provider))
    from .doctor_ec2 import examine_ec2

    return examine_ec2(settings)


def refuse_unless_well(settings: Settings, provider: str, max_usd: float | None) -> None:
    """Raises ProviderError with everything that is wrong, before a refresh that may launch asks for a machine."""
    if provider == "local" or not max_usd:
        return
    wrong = [f"  {one.check}: {one.says}" for one in examine(settings, provider) if one.status == "wrong"]
    if wrong:
        raise ProviderError("\n".join(["no machine was asked for, since", *wrong]))


def well(findings: Sequence[Finding]) -> bool:
    """Whether nothing is wrong."""
    return not any(one.status == "wrong" for one in findings)


def policies_of(settings: Settings) -> dict[str, Any]:
    """The IAM policies with this installation's names, and the account's number where AWS could be asked for it."""
    from .doctor_ec2 import account_number
    from .policies import policies

    return policies(settings.ec2, account_number(settings.ec2))


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """As `--json` prints it."""
    return {"well": well(findings), "findings": [asdict(one) for one in findings]}


def as_text(findings: Sequence[Finding]) -> str:
    """A line a finding, and the verdict."""
    width = max(len(one.check) for one in findings)
    lines = [f"{one.status:5}  {one.check:{width}}  {one.says}" for one in findings]
    wrong = sum(one.status == "wrong" for one in findings)
    return "\n".join([*lines, f"{wrong} to put right" if wrong else "all is well: a refresh can start"])


def _local(provider: Provider) -> list[Finding]:
    limits = [Finding(check="this machine", status="note", says=limit) for limit in provider.limits()]
    try:
        types = [one.name for one in provider.instance_types()]
    except ProviderError as error:
        return [*limits, Finding(check="instance types", status="wrong", says=str(error))]
    if not types:
        says = "none can be had here: see above, and [local.instance_types] in srift.toml"
        return [*limits, Finding(check="instance types", status="wrong", says=says)]
    return [*limits, Finding(check="instance types", status="ok", says=", ".join(types))]
