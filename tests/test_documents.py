"""The documents: the reference of the commands is theirs, links lead somewhere, each command shown can be typed, and
each output shown is what is printed.

`python -m tests.test_documents` writes docs/commands.md anew.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path

import duckdb
import pytest
import typer
from typer.cli import get_docs_for_click
from typer.testing import CliRunner

from flows.cli import app
from models.domain.workload import GOALS
from tasks.reporting.tables import print_measured
from tests.installed import furnished
from tests.warehouse.builders import fresh
from warehouse.export import export
from warehouse.publication import Publication, publish

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "commands.md"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TYPED = re.compile(r"^(?:\$ )?(srift .*)$", re.MULTILINE)
_INLINE = re.compile(r"`(srift [^`]*)`")
# `srift refresh --provider ec2 --max-usd 0` in a new home, then `srift table resnet50-imagenet --provider ec2 --json`
PUBLISHED = ROOT / "tests" / "frozen" / "published.json"
_AGE = re.compile(r"\d+\.\d days")
# Commands whose output is measured, or takes a server: who compares what is shown of it.
COMPARED_BY = {
    "srift check": "tests/test_from_your_script.py",
    "python deployments/automations.py": "tests/flows/test_deployments.py",
    "srift measure": "test_what_a_measurement_prints_is_shown_as_it_is_printed",
}


@cache
def documents() -> list[Path]:
    """Markdown files that are in the repository, or would be."""
    said = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = [ROOT / name for name in said.stdout.split()] or [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
    ]
    return [path for path in found if path.exists()]


def reference() -> str:
    """Markdown of every command, its arguments and options, as `--help` has them."""
    command = typer.main.get_command(app)
    with command.make_context("srift", ["table"], resilient_parsing=True) as context:
        text = get_docs_for_click(obj=command, ctx=context, name="srift", title="Commands")
    note = "Written by `python -m tests.test_documents` from the commands themselves; a test compares.\n"
    lines = [line.rstrip() for line in text.splitlines()]
    for name, verb in command.commands.items():  # type: ignore[attr-defined]
        short = next(at for at, line in enumerate(lines) if line.startswith(f"* `{name}`: "))
        lines[short] = f"* [`{name}`](#srift-{name}): {verb.help.splitlines()[0]}"
    return "\n".join([lines[0], "", note, *lines[2:]]).rstrip() + "\n"


def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    text = _BLOCK.sub("", path.read_text())
    heads = [line.lstrip("#").strip().lower() for line in text.splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in heads}


def typed(path: Path) -> Iterator[str]:
    """Commands of Srift in a page: in its console blocks, and in sentences where they have options."""
    text = path.read_text()
    for language, body in _BLOCK.findall(text):
        if language in ("console", "bash", "sh"):
            yield from _TYPED.findall(body)
    yield from (one for one in _INLINE.findall(_BLOCK.sub("", text)) if " --" in one)


def test_the_reference_of_the_commands_is_what_they_say_of_themselves() -> None:
    assert REFERENCE.read_text() == reference(), "write it anew: python -m tests.test_documents"


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_a_file_and_its_heading(path: Path) -> None:
    for link in _LINK.findall(_BLOCK.sub("", path.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_that_are_shown_can_be_typed(path: Path) -> None:
    command = typer.main.get_command(app)
    for line in typed(path):
        words = shlex.split(line.partition("  #")[0].partition(" | ")[0].replace("...", ""))[1:]
        if not words or any(mark in line for mark in ("[", "\\|", "(")):
            continue  # a synopsis
        assert words[0] in command.commands or words[0].startswith("-"), line  # type: ignore[attr-defined]
        if words[0] in command.commands:  # type: ignore[attr-defined]
            verb = command.commands[words[0]]  # type: ignore[attr-defined]
            known = {option for one in verb.params for option in (*one.opts, *one.secondary_opts)}
            unknown = [
                word
                for word in words[1:]
                if word.startswith("--") and word.partition("=")[0] not in known
            ]
            assert not unknown, f"{line}: {unknown}"


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_programs_that_are_shown_run_on_a_published_table(path: Path) -> None:
    """SQL on the published file; Python that opens `.srift`, as it stands."""
    blocks = _BLOCK.findall(path.read_text())
    asked = [body for language, body in blocks if language == "sql"]
    programs = [body for language, body in blocks if language == "python" and ".srift" in body]
    if not asked and not programs:
        return
    home = furnished() / "state"
    with duckdb.connect(
        str(home / "published" / "recommendations.duckdb"), read_only=True
    ) as table:
        for query in asked:
            assert table.execute(query).description
    for program in programs:
        text = (
            program.replace(".srift", str(home))
            .replace("wide-mlp", "conv")
            .replace("2xlc.large", "2xs.small")
        )
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{program}\n{done.stderr}"


def shown(path: Path) -> Iterator[tuple[str, str]]:
    """Commands in the console blocks of a page that have an output below them, and that output."""
    for language, body in _BLOCK.findall(path.read_text()):
        if language == "console":
            for part in body.removeprefix("$ ").split("\n$ "):
                command, _, output = part.partition("\n")
                if output.strip():
                    yield command, output


def as_printed(output: str) -> str:
    """A pattern of it: a line of three dots stands for any lines, and an age in days is as of whenever."""
    exact = (
        r"\d+\.\d days".join(map(re.escape, _AGE.split(line)))
        for line in output.rstrip("\n").splitlines()
    )
    return "".join(r"(?:.*\n)*?" if line == r"\.\.\." else rf"{line}\n" for line in exact)


def published_in(folder: Path) -> None:
    """A project whose published copy has the stored rows, and the moment at which they were published."""
    rows = json.loads(PUBLISHED.read_text())
    for row in rows:
        for column in ("published_at", "price_as_of", "newest_measurement_at"):
            row[column] = datetime.fromisoformat(row[column])
    first = rows[0]
    stamp = {
        name: first[name]
        for name in ("publication_id", "published_at", "provider", "model_version")
    }
    warehouse = fresh(folder / "state")
    publish(warehouse, rows, Publication(refresh_id=first["publication_id"], **stamp))
    export(warehouse, folder / "state" / "published")
    (folder / "srift.toml").touch()


def printed(line: str, folder: Path) -> str:
    """What the command prints in `folder`: on standard error only where it fails."""
    program, *words = shlex.split(line)
    if program == "head":
        said = "".join((folder / words[1]).read_text().splitlines(keepends=True)[: -int(words[0])])
    else:
        ended = CliRunner().invoke(app, words)
        said = ended.stderr if ended.exit_code else ended.stdout
    return said.rstrip("\n") + "\n"


def test_every_output_that_is_shown_is_what_the_command_prints(
    own_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    compared = 0
    for path in documents():
        for command, output in shown(path):
            if not command.startswith(tuple(COMPARED_BY)):
                said = printed(command, tmp_path)
                assert re.fullmatch(as_printed(output), said.rstrip("\n") + "\n"), (
                    f"{path.name}: {command} prints\n{said}"
                )
                compared += 1
    assert compared >= 6


def test_what_a_measurement_prints_is_shown_as_it_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The table of docs/exports.md, of the figures that stand in it: they were measured."""
    ((_, output),) = [
        one for one in shown(ROOT / "docs" / "exports.md") if one[0].startswith("srift measure")
    ]
    head, *lines = output.splitlines()
    runs = []
    for line in lines[: [one[0].isdigit() for one in lines].index(True)]:
        kind, cluster, layout, market, batch, *numbers = re.split(r"  +", line)
        step = re.fullmatch(r"([\d.]+) \(([\d.]+)-([\d.]+)\)", numbers[0])
        row: dict[str, object] = {"predicted_step_s": None}
        if step:
            row = {
                f"predicted_step{one}_s": float(s)
                for one, s in zip(("", "_low", "_high"), step.groups(), strict=True)
            }
        row |= {
            "kind": "train" if step else kind,
            "cluster": cluster,
            "layout": layout,
            "market": market,
        }
        row |= {"batch_per_device": batch, "accumulation_steps": 1, "measured": True, "reason": ""}
        runs.append(row | {"step_s": float(numbers[1]) if step else None})
    launches, usd = re.findall(r"^(\d+) launches, \$([\d.]+);", output, re.MULTILINE)[0]
    print_measured(
        {"runs": runs, "spent": {"launches": launches, "usd": float(usd), "notes": []}}, "local"
    )
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [head, *lines]


def test_the_readmes_table_is_of_the_form_that_is_printed(
    own_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures were measured; what is said of columns, workloads and goals is as the command says it."""
    monkeypatch.chdir(furnished())
    monkeypatch.setenv("SRIFT_HOME", str(furnished() / "state"))
    said = CliRunner().invoke(app, ["table", "conv", "--provider", "local"]).stdout.splitlines()
    (body,) = [
        body
        for language, body in _BLOCK.findall((ROOT / "README.md").read_text())
        if language == "text"
    ]
    note, _, workload, columns, *lines = body.splitlines()
    assert (note, workload) == (said[0], said[2].replace("conv", "transformer-lm"))
    assert columns.split() == said[3].split()
    rows = [re.split(r"  +", line) for line in lines if line.startswith(GOALS)]
    assert len(rows) == 4 and {row[1] for row in rows} == {"1"}
    assert all(row[-1].startswith(("compute", "communication")) for row in rows)


if __name__ == "__main__":
    REFERENCE.write_text(reference())
