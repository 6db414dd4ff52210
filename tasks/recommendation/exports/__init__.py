"""`srift export`: a published recommendation as a file for another tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from models.domain.suggestions import nearest_names

from ...workspace.settings import SettingsError
from .fleet import fleet
from .karpenter import karpenter
from .sagemaker import sagemaker
from .selection import ExportRefused, Selection, select
from .skypilot import skypilot
from .torchrun import torchrun

__all__ = ["TARGETS", "ExportRefused", "Selection", "export", "select"]

TARGETS: Mapping[str, Callable[[Selection], tuple[Any, str]]] = {
    "skypilot": skypilot,
    "sagemaker": sagemaker,
    "karpenter": karpenter,
    "torchrun": torchrun,
    "fleet": fleet,
}


def export(selection: Selection, target: str) -> tuple[dict[str, Any], str]:
    """Return the JSON document of the export, and the text of its file."""
    if target not in TARGETS:
        raise SettingsError(f"no export to {target!r}; {nearest_names(target, TARGETS)}")
    document, text = TARGETS[target](selection)
    body = {"to": target, "about": selection.about, "warnings": selection.warnings}
    return body | {"document": document, "text": text}, text
