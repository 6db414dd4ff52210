"""Rules of the house that no linter knows: four rooms, what they import, what is installed, who starts hosts."""

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
ON_EC2, EC2_MAY_IMPORT = "tasks/node/on_ec2", {"boto3", "botocore", "s3transfer"}
# Workloads from libraries, which a machine installs for them alone: nothing else of the node may import what these do.
KNOWN_WORKLOADS, KNOWN_MAY_IMPORT = (
    "tasks/node/workloads/known",
    {"torch", "torchvision", "transformers"},
)


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, f"no source in {folders}"
    return found


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def nodes(path: Path) -> list[Any]:
    """Of the syntax tree of a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Levels and names of what a file imports anywhere: (0, "torch.nn"), or (1, "record") for a relative one."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def not_allowed(package: str, allowed: set[str]) -> dict[str, list[str]]:
    """By file of `package`: what it imports beyond the standard library and `allowed`, or from outside the package."""
    found = {}
    for path in sources(package):
        depth = len(path.relative_to(ROOT / package).parts)
        tops = {target.partition(".")[0] for level, target in imports(path) if level == 0}
        wrong = sorted(tops - allowed - set(sys.stdlib_module_names))
        wrong += [f"{'.' * level}{target}" for level, target in imports(path) if level > depth]
        if wrong:
            found[name(path)] = wrong
    return found


# What a command that only looks something up is not to wait for; imported where it is used.
HEAVY = {
    "boto3",
    "botocore",
    "dask",
    "distributed",
    "matplotlib",
    "mlflow",
    "prefect",
    "prefect_dask",
    "sklearn",
    "sqlalchemy",
}
HEAVY |= {"scipy.optimize", "scipy.stats"}
# Ours imported inside functions; all but the first, which is read in the artifact alone, are to go to the top.
LATE = {
    (
        "tasks/training/pyfunc_model.py",
        "srift_models.step_time.serialization",
    ),  # there only where a model is loaded
}
MANY_PARAMETERS, MOST_FUNCTIONS_OF_MANY = 7, 8  # self apart
MOST_LOOSE_FILES = 6  # directly in models/ and in tasks/: what has a home has a folder


def inner_imports(path: Path) -> Iterator[str]:
    """Modules imported inside functions, relative ones by their dots."""
    functions = (node for node in nodes(path) if isinstance(node, ast.FunctionDef))
    for node in {inner for function in functions for inner in ast.walk(function)}:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def module_imports(path: Path, modules: set[str]) -> set[str]:
    """Our own modules that the file at `path` imports when it is read: neither in functions nor for types alone."""
    package = path.relative_to(ROOT).with_suffix("").parts
    found = set()
    for node in nodes(path)[0].body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: -node.level] if node.level else ()
            source = ".".join((*base, *filter(None, (node.module or "").split("."))))
            found |= {source} | {f"{source}.{alias.name}" for alias in node.names}
    return found & modules


def test_there_are_four_rooms_and_no_other_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(ROOMS)


def test_tasks_init_is_empty_so_that_a_node_imports_nothing_heavy() -> None:
    assert (ROOT / "tasks" / "__init__.py").read_text() == ""


def names_a_provider(node: ast.AST) -> bool:
    """Whether a comparison or a `case` has the name of a provider in it."""
    inside = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    inside += [node.value] if isinstance(node, ast.MatchValue) else []
    return any(
        isinstance(one, ast.Constant) and one.value in ("ec2", "local")
        for part in inside
        for one in ast.walk(part)
    )


def test_nothing_branches_on_the_name_of_a_provider() -> None:
    """Elsewhere its `Capabilities` tell; `[local]` in the settings is the section of srift.toml."""
    files = [
        path for path in sources(*ROOMS) if not path.is_relative_to(ROOT / "tasks" / "providers")
    ]
    found = {
        f"{name(path)}:{node.lineno}"
        for path in files
        if path != ROOT / "tasks" / "workspace" / "settings.py"
        for node in nodes(path)
        if names_a_provider(node)
    }
    assert sorted(found) == []


def test_what_travels_to_a_machine_needs_torch_and_nothing_else() -> None:
    allowed = {KNOWN_WORKLOADS: KNOWN_MAY_IMPORT, ON_EC2: EC2_MAY_IMPORT}
    for file, wrong in not_allowed("tasks/node", NODE_MAY_IMPORT).items():
        folder = str(Path(file).parent)
        assert set(wrong) <= allowed.get(folder, set()), file


def test_models_can_be_copied_under_another_name_into_the_artifact() -> None:
    assert not_allowed("models", MODELS_MAY_IMPORT) == {}


def test_imports_stand_at_the_top_but_for_the_command_line_and_what_is_heavy() -> None:
    """`srift --help` and lookups start in a moment because cli.py and these wait."""
    late = {
        (name(path), target)
        for path in sources(*ROOMS)
        for target in inner_imports(path)
        if not HEAVY & {target.partition(".")[0], ".".join(target.split(".")[:2])}
    }
    assert {
        (file, target) for file, target in late if not file.startswith("flows/cli/")
    } - LATE == set()


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources(*ROOMS)
    }
    left = {module: module_imports(path, set(paths)) - {module} for module, path in paths.items()}
    while free := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in free}
    assert left.keys() == set(), "these import each other, or one that does"


def test_few_files_stand_outside_a_folder() -> None:
    for room in ("models", "tasks"):
        assert len(list((ROOT / room).glob("*.py"))) <= MOST_LOOSE_FILES, room


def test_few_functions_take_many_parameters() -> None:
    many = [
        f"{name(path)}: {node.name}"
        for path in sources(*ROOMS)
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and len(
            [
                one
                for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                if one.arg not in ("self", "cls")
            ]
        )
        >= MANY_PARAMETERS
    ]
    assert len(many) <= MOST_FUNCTIONS_OF_MANY, many


def test_tests_mirror_the_rooms() -> None:
    """`tests/tasks/node/` tests what is in `tasks/node/`."""
    rooms = {
        path.relative_to(ROOT / "tests").parent
        for path in sources(*(f"tests/{room}" for room in ROOMS))
    }
    assert [str(room) for room in sorted(rooms) if not (ROOT / room).is_dir()] == []


def test_the_node_and_the_flows_are_installed_with_every_sql_file() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in (ROOT / "warehouse").rglob("*.sql")}
    assert folders, "no SQL in the warehouse"
    data = {
        "warehouse": ["**/*.sql", "seeds/*"],
        "tasks": ["providers/ec2/*.json.gz", "reporting/*.jinja"],
        "models": ["**/*.csv"],
    }
    assert tools["package-data"] == data
    assert list((ROOT / "tasks").glob("providers/ec2/*.json.gz")), "no packaged prices"
    assert list((ROOT / "tasks").glob("reporting/*.jinja")), "no template of the report page"
    assert list((ROOT / "models").rglob("*.csv")), "no data sheets"
    for folder in sources(*ROOMS):
        assert (folder.parent / "__init__.py").exists(), (
            f"{name(folder)} is in no package and would not be installed"
        )


def test_every_pin_is_public_and_exact() -> None:
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    for pin in pins:
        package, equals, version = pin.partition("==")
        assert package and equals, pin
        assert not set(version) & set("+/@*"), f"{pin}: only versions that anybody can download"
