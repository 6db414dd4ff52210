"""The documents: links resolve, the commands in them parse, and the programs in them run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import duckdb
import pytest
import typer

from flows.cli import app
from tests.installed import furnished

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TYPED = re.compile(r"^(?:\$ )?(srift .*)$", re.MULTILINE)
_INLINE = re.compile(r"`(srift [^`]*)`")


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


def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    text = _BLOCK.sub("", path.read_text())
    heads = [line.lstrip("#").strip().lower() for line in text.splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in heads}


def typed(path: Path) -> Iterator[str]:
    """Return the commands in a page's console blocks, and in sentences if they have options."""
    text = path.read_text()
    for language, body in _BLOCK.findall(text):
        if language in ("console", "bash", "sh"):
            yield from _TYPED.findall(body)
    yield from (one for one in _INLINE.findall(_BLOCK.sub("", text)) if " --" in one)


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
        known = command.commands  # type: ignore[attr-defined]
        assert words[0] in known or words[0].startswith("-"), line
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
