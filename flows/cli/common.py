"""Define the options that commands share, load the settings, and print results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from tasks.workspace.settings import Settings


ProviderName = Literal["local", "ec2"]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
Provider = Annotated[
    ProviderName, typer.Option(help="Where the machines come from: this computer or EC2.")
]
MaxUsd = Annotated[
    float | None, typer.Option(min=0.0, help="Dollar cap, required on ec2; 0 measures nothing.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would happen, and change nothing.")
]


def show(as_json: bool, body: Any, shown: str | Callable[[Any], object]) -> None:
    """Print the result of a command.

    body: the result. It is printed as JSON if `as_json` is True.
    shown: a text or a function. If `as_json` is False, the text is printed, or the function is
        called to print `body`.
    """
    if as_json:
        typer.echo(json.dumps(body, indent=2, default=_json_value, allow_nan=False))
    elif callable(shown):
        shown(body)
    elif shown:
        typer.echo(shown)


def _json_value(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def settings() -> Settings:
    """Load the settings, create SRIFT_HOME, and make Prefect keep its state there."""
    from tasks.workspace.settings import load_settings

    found = load_settings()
    found.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    found.set_server_variables()
    os.environ.setdefault("PREFECT_HOME", str(found.home / "prefect"))
    # The console shows only the command's output. Prefect still stores the log of a flow run.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    return found
