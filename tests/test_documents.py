"""The documents: links resolve, the commands in them parse, and the programs in them run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
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


DOCUMENTS = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(name.startswith(".") for name in path.relative_to(ROOT).parts)
]
each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def anchors(path):
    """Of the headings of a page, as GitHub makes them."""
    text = _BLOCK.sub("", path.read_text())
    heads = [line.lstrip("#").strip().lower() for line in text.splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in heads}


def typed(path):
    """Return the commands in a page's console blocks, and in sentences if they have options."""
    text = path.read_text()
    for language, body in _BLOCK.findall(text):
        if language in ("console", "bash", "sh"):
            yield from _TYPED.findall(body)
    yield from (code for code in _INLINE.findall(_BLOCK.sub("", text)) if " --" in code)


@each_document
def test_links_lead_to_a_file_and_its_heading(path):
    for link in _LINK.findall(_BLOCK.sub("", path.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


@each_document
def test_the_commands_that_are_shown_can_be_typed(path):
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for line in typed(path):
        words = shlex.split(line.partition("  #")[0].partition(" | ")[0].replace("...", ""))[1:]
        is_synopsis = any(mark in line for mark in ("[", "\\|", "("))
        if words and not is_synopsis and not words[0].startswith("-"):
            assert words[0] in verbs, line
            verb = verbs[words[0]]
            verb.make_parser(click.Context(verb)).parse_args(words[1:])


@each_document
def test_the_programs_that_are_shown_run_on_a_published_table(path):
    """SQL on the published file; Python that opens `.srift`, as it stands."""
    blocks = _BLOCK.findall(path.read_text())
    queries = [body for language, body in blocks if language == "sql"]
    programs = [body for language, body in blocks if language == "python" and ".srift" in body]
    if not queries and not programs:
        return
    home = furnished() / "state"
    published = home / "published/recommendations.duckdb"
    with duckdb.connect(published, read_only=True) as table:
        for query in queries:
            assert table.execute(query).description
    names = {".srift": str(home), "wide-mlp": "conv", "2xlc.large": "2xs.small"}
    for program in programs:
        for shown, present in names.items():
            program = program.replace(shown, present)
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{program}\n{done.stderr}"
