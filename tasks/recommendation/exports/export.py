"""`srift export`: one published rank as a file of another tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from models.domain.suggestions import nearest_names

from ...workspace.settings import SettingsError
from .aws import fleet, sagemaker
from .choice import Choice
from .orchestrators import karpenter, skypilot
from .torchrun import torchrun

TARGETS: Mapping[str, Callable[[Choice], tuple[Any, str]]] = {
    "skypilot": skypilot,
    "sagemaker": sagemaker,
    "karpenter": karpenter,
    "torchrun": torchrun,
    "fleet": fleet,
}


def export(choice: Choice, to: str) -> tuple[dict[str, Any], str]:
    """What --json prints, and the file's text.

    Raises SettingsError where no tool is called `to`, and ExportRefused where it cannot take what was chosen.
    """
    if to not in TARGETS:
        raise SettingsError(f"nothing is exported to {to!r}; {nearest_names(to, TARGETS)}")
    document, text = TARGETS[to](choice)
    return {
        "to": to,
        "about": choice.about,
        "warnings": choice.warnings,
        "document": document,
        "text": text,
    }, text
