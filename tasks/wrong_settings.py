"""Why a setting is refused, in words of `srift.toml` and SRIFT_* variables: whose it is, the reason, the right names.

Pydantic's own words speak of Python, which nobody writes there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_settings import SettingsError as MalformedVariable

from .nearest import nearest

PREFIX = "SRIFT_"
_UNKNOWN = "extra_forbidden"
# What a section as such may be refused for; anything else is said of a value.
_OF_SECTIONS = {"value_error", "missing", "dict_type", "model_type"}
_PLAINLY = {
    "tuple_type": 'a list is wanted: ["one", "another"]',
    "too_short": "at least one that is known is wanted",
    "dict_type": "a section of keys is wanted",
    "model_type": "a section of keys is wanted",
}


def variables() -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Name, key and text of every variable that states a setting; an empty one is as good as none."""
    for name, text in os.environ.items():
        if name.upper().startswith(PREFIX) and text:
            yield name, tuple(name[len(PREFIX) :].lower().split("__")), text


def refusal(error: ValidationError, file: Path, model: type[BaseModel]) -> str:
    """Every wrong key of `model`: those of `file` below its name, then each that a variable states after its own."""
    of_file, of_variables = [], []
    for one in error.errors():
        # a key that nobody knows, or a section where a plain value is wanted, may be stated by what is below it
        below = one["type"] == _UNKNOWN or (isinstance(one["input"], dict) and one["type"] not in _OF_SECTIONS)
        variable, sentence = _stated_by(one["loc"], below=below), _explained(one, model)
        if variable:
            of_variables.append(f"{variable}: {sentence}")
        else:
            of_file.append(f"  {sentence}")
    return "\n".join([*([f"{file}:"] if of_file else []), *of_file, *of_variables])


def malformed(error: MalformedVariable) -> str:
    """Which variable's text is not the list or section that its key wants."""
    text = getattr(error.__cause__, "doc", None)  # of json.JSONDecodeError
    names = [name for name, _, value in variables() if value == text]
    what = " or ".join(names) or f"a {PREFIX} variable"
    return f'{what}: a list or a section of keys must be JSON there: ["one", "another"]'


def _explained(error: Any, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == _UNKNOWN:
        return f"{where}: unknown key; {nearest(str(error['loc'][-1]), _known_keys(model, error['loc'][:-1]))}"
    return f"{where}: {_PLAINLY.get(error['type'], '') or error['msg'].removeprefix('Value error, ')}"


def _known_keys(model: Any, location: tuple[Any, ...]) -> list[str]:
    """Keys that the section at `location` below `model` understands."""
    for part in location:
        if _is_section(model):
            model = model.model_fields[part].annotation
        else:  # the values of a dictionary, the items of a tuple
            model = next(one for one in reversed(get_args(model)) if one is not Ellipsis)
    return [name for name in model.model_fields if name != "root"] if _is_section(model) else []


def _is_section(model: Any) -> bool:
    return isinstance(model, type) and issubclass(model, BaseModel)


def _stated_by(location: tuple[Any, ...], *, below: bool) -> str:
    """The variable that states what is at `location` (or `below` it), of many that of the longest key; "" for none."""
    found = []
    for name, key, text in variables():
        shared = min(len(key), len(location))
        if key[:shared] == location[:shared] and (below or len(key) == shared) and _holds(text, location[len(key) :]):
            found.append((len(key), name))
    return max(found)[1] if found else ""


def _holds(text: str, below: tuple[Any, ...]) -> bool:
    """Whether a variable's text says what is at `below`. Only sections are merged with the file's."""
    try:
        value = json.loads(text)
    except ValueError:
        return True
    for part in below:
        if not isinstance(value, dict):
            return True
        if part not in value:
            return False
        value = value[part]
    return True
