"""Define the command `srift`. Exit codes: 0 success, 1 failure, 2 wrong usage.

Commands import their dependencies inside functions, so that `srift --help` starts fast.
"""

import gc
import os
import signal
from typing import Annotated

import typer

from flows.cli import files, installation, pipeline, questions
from flows.cli.errors import ExplainedGroup

# With Python's default threshold of 700, garbage collection takes 20 % of a short command's time.
_GC_THRESHOLDS = (50_000, 20, 50)

app = typer.Typer(
    cls=ExplainedGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for group in (pipeline.app, questions.app, files.app, installation.app):
    app.add_typer(group)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"srift {version('srift')}")
        raise typer.Exit


@app.callback()
def srift(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Find the best EC2 instances for training a PyTorch model, from recent measurements."""


def main() -> None:
    """Run the command `srift`. Closing the terminal has the same effect as Ctrl-C."""
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    gc.set_threshold(*_GC_THRESHOLDS)
    # pydantic searches the metadata of all installed packages for plugins, which is slow.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    app()
