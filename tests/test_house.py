"""The structure that no linter checks: what rooms import, what is installed, what is pinned."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
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
# Imported inside functions, so that lookups start fast; everything else is imported at the top.
HEAVY = {"boto3", "botocore", "matplotlib", "mlflow", "prefect", "prefect_dask", "sklearn"}
HEAVY |= {"s3transfer", "sqlalchemy", "scipy.optimize", "scipy.stats", "tenacity", "rich"}
PULLED = "srift_models"  # exists where a registered model is loaded


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def nodes(path: Path) -> list[Any]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(found: list[Any]) -> Iterator[tuple[int, str]]:
    """Return level and name of each import: (0, "torch.nn"), or (1, "record") if relative."""
    for node in found:
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def foreign(package: str, allowed: set[str]) -> dict[str, set[str]]:
    """Return what each file imports beyond the standard library, `allowed` and the package."""
    found = {}
    for path in sources(package):
        depth = len(path.relative_to(ROOT / package).parts)
        every = list(imports(nodes(path)))
        wrong = {target.partition(".")[0] for level, target in every if level == 0}
        wrong -= allowed | set(sys.stdlib_module_names)
        wrong |= {f"{'.' * level}{target}" for level, target in every if level > depth}
        if wrong:
            found[name(path)] = wrong
    return found


def compares_a_provider(node: ast.AST) -> bool:
    parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    parts += [node.value] if isinstance(node, ast.MatchValue) else []
    inside = [one for part in parts for one in ast.walk(part)]
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


def test_only_heavy_libraries_are_imported_inside_functions() -> None:
    for path in sources(*ROOMS):
        functions = [node for node in nodes(path) if isinstance(node, ast.FunctionDef)]
        inner = [node for function in functions for node in ast.walk(function)]
        for level, target in imports(inner):
            parts = target.split(".")
            heavy = level == 0 and (parts[0] in HEAVY or ".".join(parts[:2]) in HEAVY)
            allowed = heavy or parts[0] == PULLED or name(path).startswith("flows/cli/")
            assert allowed, (name(path), target)


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
