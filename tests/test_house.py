"""House rules that no linter knows: four rooms, small files that say what they are, a README that names every verb."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("flows", "tasks", "models", "warehouse")
LONGEST_FILE = 300
MODELS_MAY_IMPORT = {"numpy", "scipy", "pandas"}
NODE_MAY_IMPORT = {"torch"}


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Levels and names of what a file imports anywhere: (0, "torch.nn"), or (1, "record") for a relative one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def strangers(path: Path, allowed: set[str]) -> set[str]:
    absolute = {target.partition(".")[0] for level, target in imports(path) if level == 0}
    return absolute - allowed - set(sys.stdlib_module_names)


def test_there_are_four_rooms_and_no_other_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(ROOMS)


def test_tasks_init_is_empty_so_that_a_node_imports_nothing_heavy() -> None:
    assert (ROOT / "tasks" / "__init__.py").read_text() == ""


@pytest.mark.parametrize("path", sources(*ROOMS, "deployments", "tests"), ids=name)
def test_files_are_small_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LONGEST_FILE
    if path != ROOT / "tasks" / "__init__.py":
        assert ast.get_docstring(ast.parse(text)), "no module docstring"


@pytest.mark.parametrize("path", sources("tasks/node"), ids=name)
def test_what_travels_to_a_machine_needs_torch_and_nothing_else(path: Path) -> None:
    assert strangers(path, NODE_MAY_IMPORT) == set()
    depth = len(path.relative_to(ROOT / "tasks" / "node").parts)
    assert all(level <= depth for level, _ in imports(path)), "a relative import that leaves the package"


@pytest.mark.parametrize("path", sources("models"), ids=name)
def test_models_can_be_copied_under_another_name_into_the_artifact(path: Path) -> None:
    assert strangers(path, MODELS_MAY_IMPORT) == set()
    depth = len(path.relative_to(ROOT / "models").parts)
    assert all(level <= depth for level, _ in imports(path)), "a relative import that leaves the package"


@pytest.mark.parametrize("path", sources(*(f"tests/{room}" for room in ROOMS)), ids=name)
def test_tests_mirror_the_rooms(path: Path) -> None:
    """`tests/tasks/node/` tests what is in `tasks/node/`."""
    room = path.relative_to(ROOT / "tests").parent
    assert (ROOT / room).is_dir(), f"there is no {room} to test"


def test_the_node_and_the_flows_are_installed_with_every_sql_file() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in (ROOT / "warehouse").rglob("*.sql")}
    assert folders, "no SQL in the warehouse"
    assert tools["package-data"] == {"warehouse": ["**/*.sql"], "tasks": ["providers/*.json.gz"]}
    assert list((ROOT / "tasks").glob("providers/*.json.gz")), "no packaged prices"
    for folder in sources(*ROOMS):
        assert (folder.parent / "__init__.py").exists(), f"{name(folder)} is in no package and would not be installed"


def test_every_pin_is_public_and_exact() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    for pin in pins:
        package, equals, version = pin.partition("==")
        assert package and equals, pin
        assert not set(version) & set("+/@*"), f"{pin}: only versions that anybody can download"


def test_the_readme_names_every_verb_and_every_command_has_help() -> None:
    import typer.main

    from flows.cli import app

    readme = (ROOT / "README.md").read_text()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert commands
    for verb, command in commands.items():
        assert f"srift {verb}" in readme, f"README.md does not mention `srift {verb}`"
        assert command.help, f"`srift {verb} --help` says nothing"
    for target in ("make refresh", "make test", "make up"):
        assert target in readme
