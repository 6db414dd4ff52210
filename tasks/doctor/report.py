"""Whether a refresh could work here: each thing that it needs, whether it is right, and the fix where it is not.

Costs nothing, asks for no machine, leaves nothing behind. Sentences hold no secret: AWS's own words are not repeated.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from warehouse.database import (
    Warehouse,
    WarehouseBusy,
    WarehouseError,
    WarehouseMissing,
)
from warehouse.export import read_published
from warehouse.lake import SharedWarehouse

from ..providers.base import Provider, ProviderError
from ..workspace.home import HISTORY, OPERATORS_STORE, Wrong, check_home, damage, registry_damage
from ..workspace.settings import Settings, SettingsError
from ..workspace.shared import open_warehouse
from ..workspace.workspace import capabilities, provider_of
from .aws import account_number, examine_ec2
from .data import addresses_of, examine_data, statements
from .findings import Finding, judged
from .iam_policies import policies

# A first refresh writes about 20 MiB: the server's database, the model with its plots, the warehouse and its copies.
LEAST_FREE_MIB = 100


def examine(settings: Settings, provider: str) -> list[Finding]:
    """Every finding, in the order in which one would put things right. Raises SettingsError on an unknown provider."""
    warehouse = open_warehouse(settings, wait_s=1.0)
    if capabilities(provider).spends_money:
        return examine_home(settings.home, warehouse=warehouse) + examine_ec2(settings)
    return [
        *examine_home(settings.home, warehouse=warehouse),
        *_local(provider_of(settings, provider)),
        *examine_data(settings),
    ]


def examine_home(
    home: Path, *, thorough: bool = True, warehouse: Warehouse | None = None
) -> list[Finding]:
    """Whether SRIFT_HOME can be written, and what lies in it read; `thorough`: each row too.

    `warehouse` is that of the installation, where it is not the file in `home`.
    """
    warehouse = warehouse or Warehouse(home / "warehouse.duckdb", wait_s=1.0)
    found = [judged("home", partial(check_home, home))]
    if home.is_dir() and home.stat().st_mode & 0o077:
        says = f"other users of this machine may look into {home}: where they should not, type `chmod 700 {home}`"
        found.append(Finding("privacy of home", "note", says))
    files: dict[str, Callable[[Path, bool], str]] = {
        "warehouse": lambda home, thorough: _warehouse(warehouse, thorough),
        "published table": _published,
        "model registry": _registry,
        "Prefect's history": _history,
    }
    for check, ask in files.items():
        try:
            found.append(Finding(check, "ok", ask(home, thorough)))
        except (WarehouseMissing, WarehouseBusy) as error:
            found.append(Finding(check, "note", str(error)))
        except (Wrong, WarehouseError, OSError) as error:
            found.append(Finding(check, "wrong", str(error)))
    return found


def trouble_of(settings: Settings) -> list[str]:
    """What is wrong in SRIFT_HOME, in sentences, without reading all of it: a matter of milliseconds."""
    found = examine_home(
        settings.home, thorough=False, warehouse=open_warehouse(settings, wait_s=1.0)
    )
    return [f"{one.check}: {one.says}" for one in found if one.status == "wrong"]


def refuse_unless_well(settings: Settings, provider: str, max_usd: float | None) -> None:
    """Raises ProviderError with everything that is wrong, before a refresh that may launch asks for a machine.

    One that launches nothing, or local hosts alone, needs but a home that it can write, and its workloads' folders of
    data: raises SettingsError without.
    """
    check_home(settings.home)
    for name in settings.workloads:
        settings.data(name)
    if not capabilities(provider).spends_money or not max_usd:
        return
    wrong = [
        f"  {one.check}: {one.says}" for one in examine(settings, provider) if one.status == "wrong"
    ]
    if wrong:
        raise ProviderError("\n".join(["no machine was asked for, since", *wrong]))


def policies_of(settings: Settings) -> dict[str, Any]:
    """The IAM policies with this installation's names, and the account's number where AWS could be asked for it.

    Machines may read the data that workloads name in S3.
    """
    found = policies(settings.ec2, account_number(settings.ec2))
    found["node-policy"]["Statement"] += statements(settings.ec2, addresses_of(settings))
    return found


def restore_warehouse(settings: Settings) -> str:
    """Put the last refresh's copy in the warehouse's place. Raises WarehouseError."""
    damaged = open_warehouse(settings).restore()
    return f"the copy of the last refresh is in place; the file before is kept as {damaged}"


def share_warehouse(settings: Settings) -> str:
    """Copy the rows of the home's file into the shared warehouse, which keeps its own; returns what was done.

    The file stays. Raises SettingsError where nothing is shared, WarehouseMissing without a file, WarehouseError.
    """
    shared, file = open_warehouse(settings), Warehouse(settings.home / "warehouse.duckdb")
    if not isinstance(shared, SharedWarehouse):
        raise SettingsError(
            "nothing is shared: srift.toml has no section [shared] (see docs/team.md)"
        )
    if not file.exists():
        raise WarehouseMissing(
            f"there is no warehouse at {file} to copy; the next `srift refresh` writes to {shared}"
        )
    copied = shared.carry_over(file)
    rows = (
        ", ".join(f"{count} of {table}" for table, count in copied.items() if count)
        or "none: all were there"
    )
    return f"copied into {shared}: {rows}. {file} is no longer read; models are fitted anew by the next `srift refresh`"


def _warehouse(warehouse: Warehouse, thorough: bool) -> str:
    if thorough:
        return f"all {warehouse.verify()} rows can be read"
    with warehouse.read():
        return "opens"


def _published(home: Path, thorough: bool) -> str:
    return f"{len(read_published(home / 'published'))} rows"


def _registry(home: Path, thorough: bool) -> str:
    if said := registry_damage(home):
        raise Wrong(said)
    if OPERATORS_STORE in os.environ:  # which may hold a password
        return f"is kept where {OPERATORS_STORE} or [shared] says"
    return "can be read" if (home / "mlflow.db").exists() else "there is none yet"


def _history(home: Path, thorough: bool) -> str:
    if HISTORY in os.environ:
        return f"is kept where {HISTORY} or [shared] says"
    store = Path(os.environ.get("PREFECT_HOME", home / "prefect")) / "prefect.db"
    if said := damage(store, thorough=thorough):
        raise Wrong(
            f"{store} is damaged ({said}): move it away; the history of runs is lost, and nothing else"
        )
    return "can be read" if store.exists() else "there is none yet"


def _local(provider: Provider) -> list[Finding]:
    limits = [Finding("this machine", "note", limit) for limit in provider.limits()]
    try:
        types = [one.name for one in provider.instance_types()]
    except ProviderError as error:
        return [*limits, Finding("instance types", "wrong", str(error))]
    if not types:
        says = "none can be had here: see above, and [local.instance_types] in srift.toml"
        return [*limits, Finding("instance types", "wrong", says)]
    return [*limits, Finding("instance types", "ok", ", ".join(types))]
