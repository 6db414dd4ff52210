"""The structure that no linter checks: what rooms import, what is installed, what is pinned."""

import ast
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("flows", "tasks", "models", "warehouse")
MODELS_MAY_IMPORT = {"numpy", "scipy", "pandas"}
NODE_MAY_IMPORT = {"torch"}
# Folders of the node with libraries that their machines have.
NODE_FOLDERS = {
    "tasks/node/on_ec2": {"boto3", "botocore", "s3transfer"},
    "tasks/node/workloads/known": {"torchvision", "transformers"},
}


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name(path):
    return str(path.relative_to(ROOT))


@cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text())))


def foreign(package, allowed):
    """Return what each file imports beyond the standard library, `allowed` and the package."""
    found = {}
    for path in sources(package):
        depth, targets = len(path.relative_to(ROOT / package).parts), set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not 0 < node.level <= depth:
                targets.add(f"{'.' * node.level}{node.module or ''}")
        wrong = {target.partition(".")[0] for target in targets} - allowed
        if wrong := wrong - set(sys.stdlib_module_names):
            found[name(path)] = wrong
    return found


def test_nothing_branches_on_the_name_of_a_provider():
    """Elsewhere `spends_money` tells; in the settings `[local]` is a section."""
    files = [path for path in sources(*ROOMS) if not name(path).startswith("tasks/providers/")]
    found = [
        name(path)
        for path in files
        for node in nodes(path)
        if isinstance(node, ast.Compare | ast.MatchValue)
        for leaf in ast.walk(node)
        if isinstance(leaf, ast.Constant) and leaf.value in ("ec2", "local")
    ]
    assert set(found) <= {"tasks/workspace/settings.py"}


def test_a_machine_needs_torch_and_nothing_else():
    for file, wrong in foreign("tasks/node", NODE_MAY_IMPORT).items():
        assert wrong <= NODE_FOLDERS.get(str(Path(file).parent), set()), file


def test_models_can_be_copied_under_another_name():
    fits = ("models/step_time/learning.py", "models/step_time/regressor.py")  # never predict
    assert foreign("models", MODELS_MAY_IMPORT) == {path: {"sklearn"} for path in fits}


def test_every_module_and_data_file_is_installed():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for room in ROOMS:
        patterns = tools["package-data"].get(room, [])
        installed = {path for pattern in patterns for path in (ROOT / room).glob(pattern)}
        for path in (ROOT / room).rglob("*"):
            if path.suffix in (".sql", ".gz", ".jinja", ".csv", ".parquet"):
                assert path in installed, name(path)
    for path in sources(*ROOMS):
        assert (path.parent / "__init__.py").exists(), name(path)
