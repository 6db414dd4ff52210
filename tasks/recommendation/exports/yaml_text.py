"""Write YAML that people can read and edit."""

from __future__ import annotations

import re
from typing import Any

import yaml


def as_yaml(value: Any) -> str:
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes strings with several lines as blocks."""

    def represent_str(self, text: str) -> Any:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def label(text: str) -> str:
    """Return a name for Kubernetes and SkyPilot: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
