"""Convert exceptions to messages and exit codes.

Exceptions with an `exit_code` are expected: their message is printed without a traceback.
"""

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
        except (KeyboardInterrupt, _of_prefect("TerminationSignal", KeyboardInterrupt)):
            left = _INTERRUPTED.get(ctx.invoked_subcommand, "nothing was changed")
            fail(f"interrupted: {left}", 1)


@contextmanager
def explained() -> Iterator[None]:
    """Exit with 2 after a wrong setting and with 1 after an expected failure.

    Other errors are raised again.
    """
    try:
        yield
    except Exception as error:
        library = type(error).__module__.partition(".")[0]
        if library in ("typer", "click"):
            raise  # a misused option, --help
        from tasks.workspace.home import disk_trouble

        code = getattr(error, "exit_code", None)
        expected = code or isinstance(error, (OSError, _of_prefect("CancelledRun", OSError)))
        message = str(error) if expected else _server_trouble(library)
        if not expected or getattr(error, "errno", None):  # an error of a library or the system
            message = disk_trouble(error) or message
        if not message:
            raise
        fail(message, code or 1)


def fail(message: str, code: int) -> None:
    """Print `message` to standard error and exit with `code`."""
    typer.echo(f"srift: {message}", err=True)
    raise SystemExit(code)


def _of_prefect(name: str, otherwise: type[BaseException]) -> type[BaseException]:
    """Return Prefect's exception class `name`, or `otherwise` if Prefect is not imported."""
    found: type[BaseException] = getattr(sys.modules.get("prefect.exceptions"), name, otherwise)
    return found


def _server_trouble(library: str) -> str:
    """Return the problem of SRIFT_HOME's disk after an error of Prefect or its HTTP client.

    Prefect's server reports such a problem only as "error 500". Returns "" if there is none.

    library: the package that defines the error.
    """
    from tasks.workspace.home import Wrong, check_home
    from tasks.workspace.settings import load_settings

    try:
        if library in ("prefect", "httpx"):
            check_home(load_settings().home)
    except Wrong as wrong:
        return str(wrong)
    return ""
