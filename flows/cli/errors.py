"""Convert exceptions to messages and exit codes.

An exception with the attribute `exit_code` is an expected error. Its message is printed without a
traceback.
"""

import sys
from typing import Any

import typer
from typer.core import TyperGroup


class ExplainedGroup(TyperGroup):
    """A group of commands whose expected errors are printed without a traceback.

    These errors are expected:

    - Errors with an attribute `exit_code`. The attribute is the exit code of the command.
    - OSError, and Prefect's CancelledRun. The exit code is 1.
    - Errors caused by a full or read-only disk. The exit code is 1.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, _of_prefect("TerminationSignal", KeyboardInterrupt)):
            measures = ctx.invoked_subcommand in ("refresh", "measure")
            end = ": machines were released, and their measurements were loaded" if measures else ""
            fail(f"interrupted{end}", 1)
        except Exception as error:
            if type(error).__module__.partition(".")[0] in ("typer", "click"):
                raise  # typer itself reports wrong options
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
