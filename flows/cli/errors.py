"""From exceptions to exit codes, and Prefect's settings for a single command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

_INTERRUPTED = {
    "refresh": "machines are released, measurements loaded, the table is unchanged",
    "measure": "machines are released, measurements loaded",
}


class ExplainedGroup(TyperGroup):
    """Commands whose expected errors are printed without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with explained():
                return super().invoke(ctx)
        except _interruptions():
            left = _INTERRUPTED.get(ctx.invoked_subcommand, "nothing was changed")
            fail(f"interrupted: {left}", 1)


@contextmanager
def explained() -> Iterator[None]:
    """Exit with 2 on wrong settings and 1 on an expected failure; other errors are bugs."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(("typer", "click")):
            raise  # a misused option, --help
        message, code = _message_and_code(error)
        if not message:
            raise
        fail(message, code)


def _message_and_code(error: Exception) -> tuple[str, int]:
    """Return an empty message for a bug. Imports late: most commands do not fail."""
    from tasks.workspace.home import disk_trouble
    from tasks.workspace.settings import SettingsError

    if isinstance(error, SettingsError):
        return str(error), 2
    if isinstance(error, _expected()):
        bare = getattr(error, "errno", None) is not None  # raised by the system
        return (bare and disk_trouble(error)) or str(error), 1
    return disk_trouble(error) or _server_trouble(error), 1


def fail(message: str, code: int) -> None:
    typer.echo(f"srift: {message}", err=True)
    raise SystemExit(code)


def _interruptions() -> tuple[type[BaseException], ...]:
    """Return Ctrl-C and Prefect's exception for a signal; Prefect is imported late."""
    ended = getattr(sys.modules.get("prefect.exceptions"), "TerminationSignal", KeyboardInterrupt)
    return KeyboardInterrupt, ended


def _expected() -> tuple[type[Exception], ...]:
    from tasks.data_files.measurements import ImportRefused
    from tasks.doctor.workload_check import CheckFailed
    from tasks.providers.base import ProviderError
    from tasks.recommendation.exports import ExportRefused
    from tasks.workspace.locking import Busy
    from warehouse.database import WarehouseError

    # A refresh that came second ends as CancelledRun.
    cancelled = getattr(sys.modules.get("prefect.exceptions"), "CancelledRun", Busy)
    refused = (ImportRefused, ExportRefused, CheckFailed)
    return (ProviderError, WarehouseError, Busy, OSError, cancelled, *refused)


def _server_trouble(error: Exception) -> str:
    """Return what is wrong with the home if Prefect's server answers "error 500" alone."""
    if type(error).__module__.partition(".")[0] not in ("prefect", "httpx"):
        return ""
    from tasks.providers.base import ProviderError
    from tasks.workspace.home import check_home
    from tasks.workspace.settings import load_settings

    try:
        check_home(load_settings().home)
    except ProviderError as wrong:
        return str(wrong)
    return ""
