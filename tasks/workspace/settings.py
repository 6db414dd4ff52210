"""One settings object: the nearest `srift.toml` upwards, overlaid by SRIFT_* variables. Refuses the unknown.

An error is in words of `srift.toml` and SRIFT_* variables: pydantic speaks of Python, which nobody writes there.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as MalformedVariable

from models.domain.suggestions import nearest_names, refuse_odd_names
from models.domain.workload import GOALS, MODES, OVERSHOOT_PRICE, PRECISIONS, STRATEGIES, SWITCHES, Goal, Mode, Workload

from ..providers.ec2.settings import Ec2
from ..providers.local.settings import Local
from .workload_data import Address, BadData, WorkloadData, digest_of_data, files_below, refuse_no_folder, source_of

PREFIX = "SRIFT_"
_UNKNOWN = "extra_forbidden"
# What a section as such may be refused for; anything else is said of a value.
_OF_SECTIONS = {"value_error", "missing", "dict_type", "model_type"}
_FACTS = ("parameters", "gradient_bytes", "flops_per_sample")
_WHERE_FACTS_GO = (
    "put it into a CSV with the columns workload, parameters, gradient_bytes and, if known, flops_per_sample and "
    "samples, and load that with `srift import --workloads FILE`"
)
_PLAINLY = {
    "tuple_type": 'a list is wanted: ["one", "another"]',
    "too_short": "at least one that is known is wanted",
    "dict_type": "a section of keys is wanted",
    "model_type": "a section of keys is wanted",
}
FILE = "srift.toml"
IMPORTED = "imported"  # digest of a workload that no file defines; the mart `workloads` calls it the same


class SettingsError(Exception):
    """`srift.toml` or a SRIFT_* variable is wrong; the message names the key, the reason and the nearest right name."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Campaign(_Section):
    """What one refresh may spend: dollars, minutes, and the most hosts of one cluster."""

    max_usd: float = Field(default=1.0, ge=0)
    max_minutes: float = Field(default=7.5, gt=0)
    max_hosts: int = Field(default=4, ge=1, le=64)
    stale_after_days: float = Field(default=30.0, gt=0)
    seed: int = 0
    market: Literal["spot", "on-demand"] = "spot"


class Choice(_Section):
    """How clusters are chosen under a constraint without `p_required`: exceeding it by 1 % counts as so many per cent
    more of what is to be least."""

    overshoot_price: float = Field(default=OVERSHOOT_PRICE, gt=0, le=1000)


class GoalSettings(_Section):
    """A goal that the table answers for; `hours` or `usd` is its constraint, met with `p_required` or nothing is named.

    Without `p_required` exceeding the constraint is weighed.
    """

    goal: str
    hours: float | None = Field(default=None, gt=0)
    usd: float | None = Field(default=None, gt=0)
    p_required: float | None = Field(default=None, gt=0, lt=1)

    @field_validator("goal")
    @classmethod
    def _known(cls, goal: str) -> str:
        if goal not in GOALS:
            raise ValueError(f"unknown goal {goal!r}; {nearest_names(goal, GOALS)}")
        return goal

    @model_validator(mode="after")
    def _constrained(self) -> GoalSettings:
        needs = {"cheapest_within_deadline": "hours", "fastest_within_budget": "usd"}.get(self.goal)
        given = {name for name in ("hours", "usd") if getattr(self, name) is not None}
        if given != ({needs} if needs else set()):
            raise ValueError(f"goal {self.goal!r} takes {needs or 'neither hours nor usd'}")
        return self


# What there is one of in a mode, and those known, by the key that lists those tolerated.
_MODES = {
    "precisions": ("precision", PRECISIONS),
    "strategies": ("strategy", STRATEGIES),
    "switches": ("switches", SWITCHES),
}


class WorkloadSettings(_Section):
    """A workload: `entrypoint = "path/to/file.py:function"` beside srift.toml, its samples, global batch and goals.

    `precisions`, `strategies` and `switches` are those that its training tolerates, of which the table chooses. Without
    an entrypoint it is never run here, and known by imported measurements alone. `data`: a folder beside srift.toml, or
    `s3://bucket/prefix`, whose place on a machine the entrypoint gets as its argument `data`.
    """

    entrypoint: str | None = None
    data: str | None = None
    samples: int = Field(gt=0, le=10**15)
    global_batch: int | tuple[int, int]
    precisions: tuple[str, ...] = Field(default=PRECISIONS[:1], min_length=1)
    strategies: tuple[str, ...] = Field(default=STRATEGIES[:1], min_length=1)
    switches: tuple[str, ...] = Field(default=SWITCHES[:1], min_length=1)
    arguments: dict[str, bool | int | float | str] = {}
    goals: tuple[GoalSettings, ...] = ()

    @field_validator("precisions", "strategies", "switches")
    @classmethod
    def _known(cls, named: tuple[str, ...], field: ValidationInfo) -> tuple[str, ...]:
        what, known = _MODES[field.field_name or ""]
        for one in named:
            if one not in known:
                raise ValueError(f"unknown {what} {one!r}; {nearest_names(one, known)}")
        return tuple(dict.fromkeys(named))

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Each precision with each strategy and each of the switches, where these go together."""
        modes = (Mode(*parts) for parts in product(self.precisions, self.strategies, self.switches))
        return tuple(mode for mode in modes if mode in MODES)

    @model_validator(mode="after")
    def _scaled_alone(self) -> WorkloadSettings:
        others = [one for one in self.strategies if one != STRATEGIES[0]]
        if "fp16" in self.precisions and others:
            raise ValueError(f"fp16 with {others[0]}: no device sees all gradients to scale them; take bf16")
        if not self.modes:
            raise ValueError("offload without a strategy that shares states out: take fsdp or zero2 with it")
        return self

    @model_validator(mode="after")
    def _data_alone(self) -> WorkloadSettings:
        if self.data is not None and self.entrypoint is None:
            raise ValueError("data without an entrypoint: nothing would read them; name the function that does")
        if self.data is not None and "data" in self.arguments:
            raise ValueError("data and arguments.data: the entrypoint has one argument `data`; rename the second")
        return self

    @field_validator("goals")
    @classmethod
    def _told_apart(cls, goals: tuple[GoalSettings, ...]) -> tuple[GoalSettings, ...]:
        asked = [(goal.goal, goal.hours, goal.usd) for goal in goals]
        twice = [one.goal for place, one in enumerate(goals) if asked[place] in asked[:place]]
        if twice:
            raise ValueError(f"goal {twice[0]!r} stands twice with the same constraint")
        return goals

    @field_validator("global_batch")
    @classmethod
    def _range(cls, value: int | tuple[int, int]) -> int | tuple[int, int]:
        least, most = (value, value) if isinstance(value, int) else value
        if not 1 <= least <= most:
            raise ValueError(f"global_batch must be a whole number of at least 1, or [least, most]; not {value}")
        return value


class Settings(BaseSettings):
    """Everything that an installation decides. `root` is the folder of its srift.toml, `home` where state lives."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, env_ignore_empty=True
    )

    root: Path = Path()
    home: Path = Path()
    campaign: Campaign = Campaign()
    choice: Choice = Choice()
    local: Local = Local()
    ec2: Ec2 = Ec2()
    workloads: dict[str, WorkloadSettings] = {}
    _data: dict[str, WorkloadData] = PrivateAttr(default_factory=dict)  # a folder of a million files is read once

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Variables win over the file, whose content arrives as init arguments."""
        return env_settings, init_settings

    @field_validator("workloads")
    @classmethod
    def _plain(cls, workloads: dict[str, WorkloadSettings]) -> dict[str, WorkloadSettings]:
        refuse_odd_names(workloads)
        return workloads

    @field_validator("root", "home")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().resolve()

    def workload(self, name: str) -> Workload:
        """The workload `name` with the digest of its present file. Raises SettingsError if there is none."""
        if name not in self.workloads:
            raise SettingsError(f"unknown workload {name!r}; {nearest_names(name, self.workloads)}")
        spec = self.workloads[name]
        least, most = (spec.global_batch,) * 2 if isinstance(spec.global_batch, int) else spec.global_batch
        return Workload(
            name=name,
            digest=self.workload_digest(name),
            samples=spec.samples,
            global_batch_least=least,
            global_batch_most=most,
            modes=spec.modes,
            goals=tuple(Goal(**goal.model_dump(), **self.choice.model_dump()) for goal in spec.goals),
        )

    def entrypoint(self, name: str) -> tuple[Path, str]:
        """File and function of a workload. Raises SettingsError on a missing file, malformed text, or none at all."""
        text = self.workloads[name].entrypoint
        if text is None:
            raise SettingsError(f"workloads.{name} has no entrypoint: only imported measurements tell of it")
        file, colon, function = text.rpartition(":")
        if not colon or not function.isidentifier():
            raise SettingsError(f"workloads.{name}.entrypoint {text!r} is not of the form path/to/file.py:function")
        path = self.root / file
        if not path.is_file():
            siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
            raise SettingsError(f"workloads.{name}.entrypoint: no file {path}; {nearest_names(path.name, siblings)}")
        return path, function

    def data(self, name: str) -> WorkloadData | None:
        """What a workload's `data` names, as it is at the first question; None without any.

        Raises SettingsError where there is no such folder, an empty one, or one with files that could not travel.
        """
        text = self.workloads[name].data
        if text is None:
            return None
        if name not in self._data:
            source, files = _source(self, name, text), None
            try:
                if isinstance(source, Path):
                    refuse_no_folder(source, self.home)
                    files = files_below(source)
            except BadData as error:
                raise SettingsError(f"workloads.{name}.data: {error}") from None
            self._data[name] = WorkloadData(text=text, source=source, digest=digest_of_data(text, files))
        return self._data[name]

    def workload_digest(self, name: str) -> str:
        """Twelve hex digits of the workload's file, function, arguments and data: another is another workload.

        Of data, the digest that WorkloadData tells.
        """
        if self.workloads[name].entrypoint is None:
            return IMPORTED
        path, function = self.entrypoint(name)
        data = self.data(name)
        arguments = self.workloads[name].arguments
        return digest_of(path.read_bytes(), function, arguments, "" if data is None else data.digest)


def digest_of(content: bytes, function: str, arguments: Mapping[str, Any], data: str = "") -> str:
    """Digest of a workload whose file holds `content`; `data` is the digest of its data, where it has some."""
    rest = json.dumps([function, dict(arguments), *([data] if data else [])], sort_keys=True).encode()
    return hashlib.sha256(content + b"\0" + rest).hexdigest()[:12]


def find_file(start: Path | None = None) -> Path:
    """The nearest srift.toml from `start` (the working directory) upwards. Raises SettingsError if there is none."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / FILE).is_file():
            return folder / FILE
    raise SettingsError(f"no {FILE} in {here} or above it; run srift inside a project, or write one (see the README)")


def load_settings(file: Path | None = None) -> Settings:
    """Settings of this installation, refused before anything starts where anything is unknown or malformed.

    Raises SettingsError naming every wrong key, its reason, and the nearest right names.
    """
    path = (file or find_file(Path(os.environ["SRIFT_ROOT"]) if os.environ.get("SRIFT_ROOT") else None)).resolve()
    try:
        body = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from None
    if "root" in body:
        raise SettingsError(f"{path}:\n  root: unknown key; the root is the folder of {FILE}")
    _refuse_unknown_variables(body)
    stated = body.pop("home", ".srift")
    home = path.parent / Path(stated).expanduser() if isinstance(stated, str) else stated
    try:
        settings = Settings(**body, home=home, root=path.parent)
    except ValidationError as error:
        raise SettingsError(_refusal(error, path, Settings)) from None
    except MalformedVariable as error:
        raise SettingsError(_malformed(error)) from None
    settings = settings.model_copy(update={"root": path.parent})  # SRIFT_ROOT says where to look for the file only
    for name, workload in settings.workloads.items():
        if workload.entrypoint is not None:
            settings.entrypoint(name)
        if workload.data is not None:
            _source(settings, name, workload.data)
    return settings


def _source(settings: Settings, name: str, text: str) -> Path | Address:
    """Of a workload's `data`; raises SettingsError. Whether a folder is there is asked by who reads it: a disk that is
    away is not to keep `srift reap` from its work.
    """
    try:
        return source_of(text, settings.root)
    except BadData as error:
        raise SettingsError(f"workloads.{name}.data: {error}") from None


def _refuse_unknown_variables(body: Mapping[str, Any]) -> None:
    """A variable overrides what `body` names. Keys inside a section are judged with those of the file."""
    for variable, (section, *rest), _ in _variables():
        if section not in Settings.model_fields:
            known = [f"{PREFIX}{name.upper()}" for name in Settings.model_fields]
            raise SettingsError(f"unknown variable {variable}; {nearest_names(variable, known)}")
        if rest and Settings.model_fields[section].annotation is Path:
            raise SettingsError(f"unknown variable {variable}; {nearest_names(variable, [PREFIX + section.upper()])}")
        named, what = body.get(section), "workload" if section == "workloads" else ""
        if section == "local" and rest[:1] == ["instance_types"] and isinstance(named, dict):
            named, rest, what = named.get("instance_types"), rest[1:], "instance type"
        if what and rest and rest[0] not in (named or ()):
            raise SettingsError(f"{variable}: unknown {what} {rest[0]!r}; {nearest_names(rest[0], named or ())}")


def _variables() -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Name, key and text of every variable that states a setting; an empty one is as good as none."""
    for name, text in os.environ.items():
        if name.upper().startswith(PREFIX) and text:
            yield name, tuple(name[len(PREFIX) :].lower().split("__")), text


def _refusal(error: ValidationError, file: Path, model: type[BaseModel]) -> str:
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


def _malformed(error: MalformedVariable) -> str:
    """Which variable's text is not the list or section that its key wants."""
    text = getattr(error.__cause__, "doc", None)  # of json.JSONDecodeError
    names = [name for name, _, value in _variables() if value == text]
    what = " or ".join(names) or f"a {PREFIX} variable"
    return f'{what}: a list or a section of keys must be JSON there: ["one", "another"]'


def _explained(error: Any, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == _UNKNOWN and error["loc"][:1] == ("workloads",) and error["loc"][-1] in _FACTS:
        return f"{where}: a fact of a workload and no setting; {_WHERE_FACTS_GO}"
    if error["type"] == _UNKNOWN:
        return f"{where}: unknown key; {nearest_names(str(error['loc'][-1]), _known_keys(model, error['loc'][:-1]))}"
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
    for name, key, text in _variables():
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
