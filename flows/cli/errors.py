"""Convert exceptions to messages and exit codes.

Exceptions with an `exit_code` are expected: their message is printed without a traceback.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup


class ExplainedGroup(TyperGroup):
    """Commands whose expected errors are printed without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with explained():
                return super().invoke(ctx)
        except (KeyboardInterrupt, _of_prefect("TerminationSignal", KeyboardInterrupt)):
            fail("interrupted: machines are released, and measurements are loaded", 1)


@contextmanager
def explained() -> Iterator[None]:
    """Turn wrong settings into exit code 2 and expected errors into exit code 1.

    The error's message is printed without a traceback. All other exceptions leave the block
    unchanged.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("typer", "click"):
            raise  # a misused option, --help
        from tasks.workspace.home import disk_trouble

        code = getattr(error, "exit_code", None)
        expected = code or isinstance(error, (OSError, _of_prefect("CancelledRun", OSError)))
        trouble = None if code else disk_trouble(error)
        if not expected and trouble is None:
            raise
        fail(trouble or str(error), code or 1)


def fail(message: str, code: int) -> None:
    """Print `message` to standard error and exit with `code`."""
    typer.echo(f"srift: {message}", err=True)
    raise SystemExit(code)


def _of_prefect(name: str, otherwise: type[BaseException]) -> type[BaseException]:
    """Return Prefect's exception class `name`, or `otherwise` if Prefect is not imported."""
    found: type[BaseException] = getattr(sys.modules.get("prefect.exceptions"), name, otherwise)
    return found
