"""torchvision is imported where its operators did not load; where they did, or where there is none, nothing is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks.node import torchvision_operators
from tasks.node.torchvision_operators import declare_what_did_not_load

# In a process of its own: what is declared in this one stays.
IMPORTED = """
from tasks.node.torchvision_operators import declare_what_did_not_load
declare_what_did_not_load()
declare_what_did_not_load()
import torch, torchvision
from torchvision.extension import _has_ops
boxes, scores = torch.rand(3, 4), torch.rand(3)
try:
    torchvision.ops.nms(boxes, scores, 0.5)
    print("computed" if _has_ops() else "made up")
except RuntimeError as error:
    print("refused" if not _has_ops() else error)
"""


def test_torchvision_is_imported_and_its_operators_compute_or_refuse_as_they_did_before() -> None:
    """Whichever of the two this environment's torchvision does."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() in ("computed", "refused"), done.stderr


class Library:
    """Stands for torch.library.Library: what was declared."""

    declared: list[str]

    def __init__(self, name: str, kind: str) -> None:
        assert name == "torchvision"

    def define(self, schema: str) -> None:
        self.declared.append(schema.partition("(")[0])


@pytest.mark.parametrize(
    ("installed", "loads", "declared"),
    [
        (False, False, []),
        (True, True, []),
        (True, False, ["nms", "qnms"]),
        (True, None, ["nms", "qnms"]),
    ],
)
def test_only_what_did_not_load_is_declared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    loads: bool | None,
    declared: list[str],
) -> None:
    """`loads` is None where there is no compiled library at all."""
    tried: list[str] = []

    def load_library(path: str) -> None:
        tried.append(Path(path).name)
        if not loads:
            raise OSError("libcudart.so.13: cannot open shared object file")

    if installed:
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "__init__.py").write_text(
            "raise ImportError('is not to be imported')"
        )
        if loads is not None:
            (tmp_path / "torchvision" / "_C.so").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(torchvision_operators, "_DECLARED", [])
    monkeypatch.setattr(torch.ops, "torchvision", object())
    monkeypatch.setattr(torch.ops, "load_library", load_library)
    monkeypatch.setattr(torch.library, "Library", Library)
    monkeypatch.setattr(Library, "declared", [], raising=False)
    declare_what_did_not_load()
    assert Library.declared == declared and tried == (
        ["_C.so"] if installed and loads is not None else []
    )
