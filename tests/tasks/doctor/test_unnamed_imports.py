"""What a workload imports of Srift's own environment, and no machine would have, is said before one is bought."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tasks.doctor.unnamed_imports import unnamed_imports
from tasks.doctor.workload_check import check_workload
from tasks.workspace.settings import load_settings
from tasks.workspace.sources import Source
from tests.wheels import wheel

SECTION = """
[workloads.net]
entrypoint = "net:build"
path = "."
samples = 1000
global_batch = 16
"""
BUILD = """
import torch
def build():
    model = torch.nn.Linear(4, 1)
    make_batch = lambda batch: (torch.randn(batch, 4), torch.randn(batch, 1))
    return model, torch.nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=0.1)
"""


def said(
    folder: Path,
    text: str,
    needs: str | None = None,
    *,
    environment: Path | None = None,
    **more: str,
) -> list[str]:
    """Of a folder whose `net.py` is imported; `needs`: its requirements file. `more` files are in it."""
    names = {"net.py": text} | {f"{name}.py": content for name, content in more.items()}
    names |= {} if needs is None else {"needs.txt": needs}
    for name, content in names.items():
        (folder / name).write_text(content)
    needed = "" if needs is None else "needs.txt"
    source = Source(
        files={name: folder / name for name in names},
        entry="net.py",
        module="net",
        requirements=needed,
    )
    return unnamed_imports(source, ["net.py"], environment)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import duckdb, numpy as np\n", "net.py imports duckdb, numpy, which"),
        ("def build():\n    from numpy.linalg import norm\n", "imports numpy, which"),
        (
            "try:\n    import yaml\nexcept ImportError:\n    yaml = None\n",
            "add PyYAML to a file, and state",
        ),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    x = 1\nelse:\n    import numpy\n",
            "numpy",
        ),
    ],
)
def test_a_package_of_srifts_environment_that_no_requirements_name_is_said(
    tmp_path: Path, text: str, named: str
) -> None:
    (sentence,) = said(tmp_path, text)
    assert (
        named in sentence
        and "another machine is sure to have torch and what torch requires alone" in sentence
    )


@pytest.mark.parametrize(
    "text",
    [
        "import torch, json, os.path\nfrom torch.nn import functional\n",
        "import jinja2, sympy, networkx, typing_extensions, mpmath\n",  # what torch requires, and what that requires
        "import numbers_of_mine\nfrom . import numpy\nfrom .numpy import x\n",
        "import nowhere_to_be_found\n",  # of which the check itself says what is wrong
        "import typing\nif typing.TYPE_CHECKING:\n    import numpy\n",
        "if __name__ == '__main__':\n    import numpy\n",
    ],
)
def test_what_a_machine_has_and_what_is_not_run_there_is_not_said(
    tmp_path: Path, text: str
) -> None:
    assert said(tmp_path, text, numbers_of_mine="", other="import duckdb\n") == []


def test_a_module_of_its_own_is_no_package_of_that_name(tmp_path: Path) -> None:
    assert said(tmp_path, "import duckdb\n", duckdb="") == []


@pytest.mark.parametrize(
    ("needs", "missing"),
    [
        ("duckdb>=1\nNumPy # arrays\npyyaml\n", []),
        ("duckdb\npandas\n-r more.txt\n", ["yaml"]),  # pandas requires numpy
        ("-c more.txt\n--requirement=more.txt\n", ["duckdb", "yaml"]),
        ("-c more.txt\n", ["duckdb", "numpy", "yaml"]),
        ("# numpy\nduckdb\n", ["numpy", "yaml"]),
    ],
)
def test_what_requirements_lead_to_is_named_and_what_constraints_pin_is_not(
    tmp_path: Path, needs: str, missing: list[str]
) -> None:
    (tmp_path / "more.txt").write_text("numpy==2.3.5\n")
    sentences = said(tmp_path, "import duckdb, numpy, yaml\n", needs)
    assert [one.startswith(f"net.py imports {', '.join(missing)}, which") for one in sentences] == [
        True
    ][: len(missing)]


@pytest.mark.parametrize(
    ("needs", "missing"),
    [("greeting[other, fast]", []), ("greeting[other]", ["numpy"]), ("greeting", ["numpy"])],
)
def test_an_extra_leads_to_what_it_requires(tmp_path: Path, needs: str, missing: list[str]) -> None:
    packages = tmp_path / "environment/lib/python3.11/site-packages"
    made = wheel(
        tmp_path,
        "greeting",
        "1.0",
        "",
        'numpy; python_version > "3" and extra == "fast"',
        "PyYAML>=6",
    )
    zipfile.ZipFile(made).extractall(packages)
    sentences = said(
        tmp_path, "import greeting, numpy, yaml\n", needs, environment=packages.parents[2]
    )
    assert [one.partition(", which")[0] for one in sentences] == [
        f"net.py imports {one}" for one in missing
    ]


def test_a_check_says_it_of_the_files_that_were_imported(tmp_path: Path) -> None:
    (tmp_path / "srift.toml").write_text(SECTION)
    (tmp_path / "net.py").write_text(f"import rows\n{BUILD}")
    (tmp_path / "rows.py").write_text("import numpy, duckdb\n")
    (tmp_path / "plots.py").write_text("import matplotlib\n")
    notes = check_workload(load_settings(tmp_path / "srift.toml"), "net", timeout_s=120)["notes"]
    assert [one.partition(", which")[0] for one in notes if "imports" in one] == [
        "rows.py imports duckdb, numpy"
    ]


def test_what_was_installed_for_its_requirements_leads_to_what_it_requires(tmp_path: Path) -> None:
    (tmp_path / "srift.toml").write_text(f'{SECTION}requirements = "needs.txt"\n')
    wheel(tmp_path / "wheels", "greeting", "1.0", "WORD = 'hello'\n", "PyYAML")
    (tmp_path / "needs.txt").write_text("--no-index\n./wheels/greeting-1.0-py3-none-any.whl\n")
    (tmp_path / "net.py").write_text(f"import greeting, numpy, yaml\n{BUILD}")
    notes = check_workload(load_settings(tmp_path / "srift.toml"), "net", timeout_s=120)["notes"]
    (note,) = [one for one in notes if "imports" in one]
    assert note.startswith("net.py imports numpy, which") and note.endswith(
        "; add numpy to needs.txt"
    )
