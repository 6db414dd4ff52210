"""Check everything that a refresh needs, for `srift doctor`. The checks start no machine."""

from pathlib import Path
from typing import Any

from warehouse.database import Warehouse
from warehouse.export import read_published
from warehouse.lake import SharedWarehouse

from ..providers.base import Provider, ProviderError
from ..workspace.home import Wrong, check_home, check_registry
from ..workspace.settings import Settings, SettingsError
from ..workspace.shared import open_warehouse
from ..workspace.workspace import provider_of, spends_money
from .aws import account_number, examine_ec2
from .data import examine_data, statements
from .findings import Finding, problems, run_check
from .iam_policies import policies

GRANTS = Path(__file__).with_name("reader.sql")  # SQL for the role of readers in [shared]


def examine(settings: Settings, provider: str) -> list[Finding]:
    """Run all checks, and return the findings. Users should fix problems in the returned order.

    Raises SettingsError if the provider is unknown.
    """
    findings = examine_home(settings)
    if spends_money(provider):
        return [*findings, *examine_ec2(settings)]
    machines = provider_of(settings, provider)
    findings += [Finding("this machine", "note", limit) for limit in machines.limits()]
    return [*findings, run_check("instance types", _types, machines), *examine_data(settings)]


def examine_home(settings: Settings, *, thorough: bool = True) -> list[Finding]:
    """Check SRIFT_HOME: disk, permissions, warehouse, published table and model registry.

    thorough: also read every row of the warehouse.
    """
    home, warehouse = settings.home, open_warehouse(settings, wait_s=1.0)
    findings = [run_check("home", check_home, home)]
    if home.is_dir() and home.stat().st_mode & 0o077:
        says = f"other users can read {home}: run `chmod 700 {home}`"
        findings.append(Finding("privacy of home", "note", says))
    return [
        *findings,
        run_check("warehouse", _warehouse, warehouse, thorough),
        run_check("published table", lambda: f"{len(read_published(home / 'published'))} rows"),
        run_check("model registry", check_registry, home),
    ]


def refuse_unless_well(settings: Settings, provider: str, max_usd: float | None) -> None:
    """Refuse a refresh whose checks fail.

    A refresh that spends money must pass all checks. Any other refresh needs only a writable
    SRIFT_HOME and the workloads' data.

    Raises:
        Wrong: if SRIFT_HOME is not writable or its disk is nearly full.
        SettingsError: if the data of a workload cannot be used.
        ProviderError: if the refresh would spend money and a check fails. The message names each
            problem.
    """
    check_home(settings.home)
    for name in settings.workloads:
        settings.data(name)
    if not spends_money(provider) or not max_usd:
        return
    if wrong := problems(examine(settings, provider)):
        raise ProviderError("\n  ".join(["checks failed, so no machine was requested:", *wrong]))


def policies_of(settings: Settings) -> dict[str, Any]:
    """Return the IAM policies as {file name without suffix: JSON object}.

    "node-policy" also lets machines read the S3 data of the workloads in srift.toml.
    """
    documents = policies(settings.ec2, account_number(settings.ec2))
    data = map(settings.data, settings.workloads)
    sources = {str(each.source): each.source for each in data if each is not None}
    documents["node-policy"]["Statement"] += statements(settings.ec2, *sources.values())
    return documents


def share_warehouse(settings: Settings) -> str:
    """Copy the rows of the warehouse file in SRIFT_HOME to the shared warehouse.

    Rows that the shared warehouse already has are skipped.
    Returns a message with the number of copied rows of each table.
    Raises SettingsError if srift.toml names no shared warehouse.
    """
    shared, file = open_warehouse(settings), Warehouse(settings.home / "warehouse.duckdb")
    if not isinstance(shared, SharedWarehouse):
        raise SettingsError("no shared warehouse is set: add a section [shared] to srift.toml")
    counts = shared.carry_over(file)
    rows = [f"{count} rows of {table}" for table, count in counts.items() if count]
    return f"copied to {shared}: {', '.join(rows) or 'nothing new'}. {file} is no longer used"


def _warehouse(warehouse: Warehouse, thorough: bool) -> str:
    if thorough:
        return f"all {warehouse.verify()} rows can be read"
    with warehouse.read():
        return "can be opened"


def _types(provider: Provider) -> str:
    types = [instance_type.name for instance_type in provider.instance_types()]
    if not types:
        raise Wrong(
            "every type in [local.instance_types] is too large for this machine: add a smaller type"
        )
    return ", ".join(types)
