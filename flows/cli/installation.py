"""Define the commands that check or repair an installation: doctor, check, restore."""

from typing import Annotated

import typer

from flows.cli.common import Json, Provider, settings, show

app = typer.Typer()


@app.command()
def check(
    workload: Annotated[str, typer.Argument(help="A workload of srift.toml with an entrypoint.")],
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Maximum seconds for the steps in all precisions.")
    ] = 300.0,
    as_json: Json = False,
) -> None:
    """Run two steps of a workload on this machine, in each precision of the workload."""
    from tasks.doctor.workload_check import check_workload, problems
    from tasks.reporting.tables import print_check

    found = check_workload(settings(), workload, timeout_s=timeout)
    show(as_json, found, print_check)
    if failed := problems(found):
        raise failed


@app.command()
def doctor(
    provider: Provider = "local",
    print_policies: Annotated[
        bool, typer.Option("--print-policies", help="Print the IAM policies that Srift needs.")
    ] = False,
    print_grants: Annotated[
        bool, typer.Option("--print-grants", help="Print the SQL that lets srift_reader read.")
    ] = False,
    share_warehouse: Annotated[
        bool,
        typer.Option("--share-warehouse", help="Copy the local warehouse to the shared warehouse."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check whether a refresh can run, and print a fix for each problem. Starts no machine."""
    from tasks.doctor import checks, findings

    stated = settings()
    if print_policies:
        show(True, checks.policies_of(stated), "")
        return
    if print_grants:
        sql = checks.GRANTS.read_text()
        show(as_json, {"sql": sql}, sql)
        return
    if share_warehouse:
        done = checks.share_warehouse(stated)
        show(as_json, {"says": done}, done)
        return
    found = checks.examine(stated, provider)
    show(as_json, findings.as_json(found), findings.as_text(found))
    if findings.problems(found):
        raise SystemExit(1)


@app.command()
def restore(as_json: Json = False) -> None:
    """Replace a damaged warehouse with the backup of the last refresh. Keeps the damaged file."""
    from tasks.workspace.shared import open_warehouse

    damaged = open_warehouse(settings()).restore()
    text = f"the backup of the last refresh was restored; the damaged file is now {damaged}"
    show(as_json, {"damaged": str(damaged)}, text)
