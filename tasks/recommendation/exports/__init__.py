"""Convert a published recommendation into a file for another tool (`srift export`)."""

from typing import Any

from models.domain.suggestions import nearest_names

from ...workspace.settings import SettingsError
from .fleet import fleet
from .karpenter import karpenter
from .sagemaker import sagemaker
from .selection import Selection
from .skypilot import skypilot
from .torchrun import torchrun

TARGETS = {one.__name__: one for one in (skypilot, sagemaker, karpenter, torchrun, fleet)}


def export(selection: Selection, target: str) -> tuple[dict[str, Any], str]:
    """Return a pair: the JSON document that describes the export, and the text of its file.

    Raises:
        SettingsError: if `target` is not one of TARGETS.
        ExportRefused: if the target cannot represent the recommendation.
    """
    if target not in TARGETS:
        raise SettingsError(f"no export to {target!r}; {nearest_names(target, TARGETS)}")
    document, text = TARGETS[target](selection)
    body = {"to": target, "about": selection.about, "warnings": selection.warnings}
    return body | {"document": document, "text": text}, text
