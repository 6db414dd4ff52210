"""Claims of BENCHMARKS.md: a benchmark prints its own; `--write` puts them there."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "BENCHMARKS.md"
HEADER = "|claim|target|result|met|command|date|commit|\n" + "|---" * 7 + "|\n"
Write = Annotated[bool, typer.Option("--write", help="Write the claims into BENCHMARKS.md.")]


@dataclass(frozen=True)
class Claim:
    """One row: cells of a few words. `met` is None for a figure without a target."""

    claim: str
    target: str
    result: str
    met: bool | None = None


def show(title: str, table: pd.DataFrame) -> None:
    """Print a table with all of its rows and columns."""
    typer.echo(f"\n{title}\n{table.to_string(index=False, float_format='{:.4g}'.format)}")


def report(name: str, claims: Sequence[Claim], *, write: bool = False) -> None:
    """Print the claims of a benchmark; with `write`, replace its section of BENCHMARKS.md."""
    command = " ".join([name, *(word for word in sys.argv[1:] if word != "--write")])
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    rows = rows_of(claims, command, str(date.today()), commit)
    typer.echo("\n" + HEADER + rows)
    if write:
        BENCHMARKS.write_text(with_section(BENCHMARKS.read_text(), name, HEADER + rows))


def rows_of(claims: Sequence[Claim], command: str, day: str, commit: str) -> str:
    """Markdown table rows."""
    met = {True: "met", False: "**missed**", None: ""}
    cells = [
        (claim.claim, claim.target, claim.result, met[claim.met], f"`{command}`", day, commit)
        for claim in claims
    ]
    return "".join(f"|{'|'.join(row)}|\n" for row in cells)


def with_section(text: str, name: str, body: str) -> str:
    """`text` with `body` between the markers of `name`; a section at the end if there are none."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    if begin not in text:
        text += f"\n{begin}{end}"
    before, _, rest = text.partition(begin)
    return before + begin + body + end + rest.partition(end)[2]
