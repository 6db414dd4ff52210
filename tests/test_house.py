"""The structure that no linter checks: what rooms import, what is installed, what is pinned."""

from __future__ import annotations

import ast
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("flows", "tasks", "models", "warehouse")
MODELS_MAY_IMPORT = {"numpy", "scipy", "pandas"}
NODE_MAY_IMPORT = {"torch"}
# Folders of the node with libraries that their machines have.
NODE_FOLDERS = {
    "tasks/node/on_ec2": {"boto3", "botocore", "s3transfer"},
    "tasks/node/workloads/known": {"torchvision", "transformers"},
}


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def nodes(path: Path) -> list[Any]:
    return list(ast.walk(ast.parse(path.read_text())))


def foreign(package: str, allowed: set[str]) -> dict[str, set[str]]:
    """Return what each file imports beyond the standard library, `allowed` and the package."""
    found = {}
    for path in sources(package):
        depth, targets = len(path.relative_to(ROOT / package).parts), set[str]()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not 0 < node.level <= depth:
                targets.add(f"{'.' * node.level}{node.module or ''}")
        wrong = {target.partition(".")[0] for target in targets} - allowed
        if wrong := wrong - set(sys.stdlib_module_names):
            found[name(path)] = wrong
    return found


def compares_a_provider(node: ast.AST) -> bool:
    inside = ast.walk(node) if isinstance(node, ast.Compare | ast.MatchValue) else ()
    return any(isinstance(one, ast.Constant) and one.value in ("ec2", "local") for one in inside)


def test_nothing_branches_on_the_name_of_a_provider() -> None:
    """Elsewhere `spends_money` tells; in the settings `[local]` is a section."""
    files = [path for path in sources(*ROOMS) if not name(path).startswith("tasks/providers/")]
    found = [name(path) for path in files for node in nodes(path) if compares_a_provider(node)]
    assert set(found) <= {"tasks/workspace/settings.py"}


def test_a_machine_needs_torch_and_nothing_else() -> None:
    for file, wrong in foreign("tasks/node", NODE_MAY_IMPORT).items():
        assert wrong <= NODE_FOLDERS.get(str(Path(file).parent), set()), file


def test_models_can_be_copied_under_another_name() -> None:
    assert foreign("models", MODELS_MAY_IMPORT) == {}


def test_every_module_and_data_file_is_installed() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for room in ROOMS:
        patterns = tools["package-data"].get(room, [])
        installed = {path for one in patterns for path in (ROOT / room).glob(one)}
        for path in (ROOT / room).rglob("*"):
            if path.suffix in (".sql", ".gz", ".jinja", ".csv", ".parquet"):
                assert path in installed, name(path)
    for path in sources(*ROOMS):
        assert (path.parent / "__init__.py").exists(), name(path)


def test_every_pin_is_public_and_exact() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        package, equals, version = line.partition("==")
        exact = bool(package and equals) and not set(version) & set("+/@*")
        assert exact or line.startswith("#"), line
