"""Convert a published recommendation into a file for another tool (`srift export`)."""

from typing import Any

from .fleet import fleet
from .karpenter import karpenter
from .sagemaker import sagemaker
from .selection import Selection
from .skypilot import skypilot
from .torchrun import torchrun

TARGETS = {export.__name__: export for export in (skypilot, sagemaker, karpenter, torchrun, fleet)}


def export(selection: Selection, target: str) -> tuple[dict[str, Any], str]:
    """Return the JSON document of `srift export --json`, and the text of the exported file.

    target: the tool that reads the file, such as "skypilot".

    Raises:
        ExportRefused: if the target cannot represent the recommendation.
    """
    document, text = TARGETS[target](selection)
    body = {"to": target, "about": selection.about, "warnings": selection.warnings}
    return {**body, "document": document, "text": text}, text
