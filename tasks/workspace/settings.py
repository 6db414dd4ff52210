"""One settings object: the nearest `srift.toml` upwards, overlaid by SRIFT_* variables. Refuses the unknown.

An error is in words of `srift.toml` and SRIFT_* variables: pydantic speaks of Python, which nobody writes there.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote

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
from models.domain.workload import (
    GOALS,
    MODES,
    OVERSHOOT_PRICE,
    PRECISIONS,
    SERVED,
    STRATEGIES,
    SWITCHES,
    UPDATES_SHARED,
    Goal,
    Mode,
    Workload,
)

from ..node.record import WorkloadFile
from ..providers.ec2.settings import Ec2
from ..providers.local.settings import Local
from .home import HISTORY, OPERATORS_ARTIFACTS, OPERATORS_STORE
from .sources import Source, SourceRefused, file_source, folder_source, hashed
from .workload_data import (
    Address,
    BadData,
    WorkloadData,
    digest_of_data,
    files_below,
    refuse_no_folder,
    source_of,
)

PREFIX = "SRIFT_"
_UNKNOWN = "extra_forbidden"
# What a section as such may be refused for; anything else is said of a value.
_OF_SECTIONS = {"value_error", "missing", "dict_type", "model_type"}
_FACTS = ("parameters", "gradient_bytes", "flops_per_sample")
_WHERE_FACTS_GO = (
    "put it into a CSV with the columns workload, parameters, gradient_bytes and, if known, flops_per_sample and "
    "samples, and load that with `srift import --workloads FILE`"
)
_PASSWORD = "a password stands in no settings: set PGPASSWORD, or PGPASSFILE to a file of passwords that is yours alone"
_PLAINLY = {
    "tuple_type": 'a list is wanted: ["one", "another"]',
    "too_short": "at least one that is known is wanted",
    "dict_type": "a section of keys is wanted",
    "model_type": "a section of keys is wanted",
    "string_type": "text in quotes is wanted",
    "missing": "this key is missing, and has no default",
}
FILE = "srift.toml"
IMPORTED = (
    "imported"  # digest of a workload that no file defines; the mart `workloads` calls it the same
)


class SettingsError(Exception):
    """`srift.toml` or a SRIFT_* variable is wrong; the message names the key, the reason and the nearest right name."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Campaign(_Section):
    """What one refresh may spend: dollars, minutes, and the most hosts of one cluster.

    `elastic_runs`: whether what they leave goes to learning what the loss of a machine costs.
    """

    max_usd: float = Field(default=1.0, ge=0)
    max_minutes: float = Field(default=7.5, gt=0)
    max_hosts: int = Field(default=4, ge=1, le=64)
    stale_after_days: float = Field(default=30.0, gt=0)
    seed: int = 0
    market: Literal["spot", "on-demand"] = "spot"
    elastic_runs: bool = False


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


# Variables that are not a workload's to set, and whose they are; a star stands for any ending.
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SCHEDULER = re.compile(r"(tcp|tls)://[^/\s@]+:[0-9]+")
_NOT_ITS_OWN = {
    "AWS_*": "no credentials and no settings of AWS reach a machine's workloads",
    "SRIFT_* PREFECT_* MLFLOW_*": "it is of Srift itself, which runs elsewhere",
    "PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONUSERBASE PYTHONSAFEPATH PYTHONPLATLIBDIR PYTHONEXECUTABLE VIRTUAL_ENV": (
        "the machine decides what Python imports; name a folder as `path`, and packages in `requirements`"
    ),
    "LD_* PATH HOME TMPDIR": "the machine decides which programs and libraries run, and where they write",
    "MASTER_ADDR MASTER_PORT RANK LOCAL_RANK GROUP_RANK ROLE_* WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE"
    " TORCHELASTIC_* TORCH_ELASTIC_*": "torchrun sets it for each rank",
    "GLOO_* NCCL_* TORCH_NCCL_* TORCH_GLOO_* TP_SOCKET_*": "by it machines find each other on the measured links",
    "OMP_* MKL_* OPENBLAS_* NUMEXPR_* CUDA_VISIBLE_DEVICES": "it says with how much of a machine is measured",
    "NVIDIA_TF32_OVERRIDE TORCHDYNAMO_* TORCH_COMPILE_* TORCHINDUCTOR_* ACCELERATE_MIXED_PRECISION": (
        "precision and compilation are what is measured; state them as `precisions` and `switches`"
    ),
}


class WorkloadSettings(_Section):
    """A workload: `entrypoint = "path/to/file.py:function"` beside srift.toml, its samples, global batch and goals.

    With `path`, a folder beside srift.toml, the entrypoint is `module:function` or `package.module:function` in it.
    `requirements` is a requirements file in that folder, or beside srift.toml where there is none; `env` are variables
    that its code sees.

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
    path: str | None = None
    requirements: str | None = None
    env: dict[str, str] = {}
    goals: tuple[GoalSettings, ...] = ()

    @field_validator("env")
    @classmethod
    def _its_own(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise ValueError(
                    f"{name!r} is no variable: letters, digits and '_', no digit first"
                )
            for names, why in _NOT_ITS_OWN.items():
                if any(
                    name.startswith(one[:-1]) if one.endswith("*") else name == one
                    for one in names.split()
                ):
                    raise ValueError(f"{name} cannot be set: {why}")
        return env

    @model_validator(mode="after")
    def _of_an_entrypoint(self) -> WorkloadSettings:
        stated = [key for key in ("path", "requirements", "env") if getattr(self, key)]
        if self.entrypoint is None and stated:
            raise ValueError(f"{stated[0]} is for the code of an entrypoint, and none is stated")
        return self

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
        others = [one for one in self.strategies if one not in (STRATEGIES[0], *SERVED)]
        if "fp16" in self.precisions and others:
            why = "no device sees all gradients to scale them"
            if Mode(strategy=others[0]).compressed:
                why = "scaled gradients are not compressed, since the scale changes"
            elif Mode(strategy=others[0]).combined:
                why = "a scaled loss leaves steps out rank by rank, and what is left out cannot be combined"
            elif others[0] == UPDATES_SHARED:
                why = "an optimizer that scales is not shared out"
            raise ValueError(f"fp16 with {others[0]}: {why}; take bf16")
        never = [
            one for one in self.strategies if one not in {mode.strategy for mode in self.modes}
        ]
        if never:
            raise ValueError(
                f"{', '.join(never)} with {', '.join(self.switches)} alone: offload takes fsdp or zero2, and tables and"
                " tensor-... go with no switch; list none beside it"
            )
        return self

    @model_validator(mode="after")
    def _data_alone(self) -> WorkloadSettings:
        if self.data is not None and self.entrypoint is None:
            raise ValueError(
                "data without an entrypoint: nothing would read them; name the function that does"
            )
        if self.data is not None and "data" in self.arguments:
            raise ValueError(
                "data and arguments.data: the entrypoint has one argument `data`; rename the second"
            )
        return self

    @field_validator("goals")
    @classmethod
    def _distinct(cls, goals: tuple[GoalSettings, ...]) -> tuple[GoalSettings, ...]:
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
            raise ValueError(
                f"global_batch must be a whole number of at least 1, or [least, most]; not {value}"
            )
        return value


class Shared(_Section):
    """By what several machines work as one installation: PostgreSQL at `host`, and a folder or `s3://` prefix `data`.

    Without a host all lies in this machine's home. `host` is a name, or the folder of a Unix socket. `database` is the
    warehouse's; Prefect's and MLflow's are called after it. The password is libpq's affair: PGPASSWORD or PGPASSFILE.
    `dask`, the address of a scheduler of Dask, is where models are fitted and tables planned; it may stand alone.
    """

    host: str = ""
    port: int = Field(default=5432, ge=1, le=65535)
    user: str = Field(default="srift", min_length=1)
    database: str = Field(default="srift", pattern=r"^[a-z_][a-z0-9_]*$")
    data: str = ""
    dask: str = ""

    @field_validator("dask")
    @classmethod
    def _of_a_scheduler(cls, address: str) -> str:
        if address and not _SCHEDULER.fullmatch(address):
            raise ValueError(
                f"{address!r} is no address of a scheduler of Dask, such as tcp://host:8786 or tls://host:8786"
            )
        if address and find_spec("prefect_dask") is None:
            raise ValueError("Dask is not installed: type `pip install 'srift[dask]'`")
        return address

    @model_validator(mode="after")
    def _whole(self) -> Shared:
        if self.model_fields_set - {"dask"} and not self.host:
            raise ValueError(
                "host is missing: the machine where PostgreSQL runs, or the folder of its socket"
            )
        if self.host and not self.data:
            raise ValueError(
                "data is missing: a folder that every machine sees, or s3://bucket/prefix"
            )
        if "://" in self.host or "@" in self.host:
            raise ValueError(
                f"host {self.host!r} is a URL; a name is wanted: port, user and database are keys of their own"
            )
        if "://" in self.data and not self.data.startswith("s3://"):
            raise ValueError(f"data {self.data!r}: a folder, or s3://bucket/prefix")
        return self

    def url(self, database: str, driver: str) -> str:
        """Of a database, for SQLAlchemy; without a password."""
        host, query = (
            (quote(self.host), "")
            if "/" not in self.host
            else ("", f"?host={quote(self.host, safe='')}")
        )
        return f"postgresql+{driver}://{quote(self.user)}@{host}:{self.port}/{database}{query}"


class Settings(BaseSettings):
    """Everything that an installation decides. `root` is the folder of its srift.toml, `home` where state lives."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,
    )

    root: Path = Path()
    home: Path = Path()
    campaign: Campaign = Campaign()
    choice: Choice = Choice()
    local: Local = Local()
    ec2: Ec2 = Ec2()
    shared: Shared = Shared()
    workloads: dict[str, WorkloadSettings] = {}
    _data: dict[str, WorkloadData] = PrivateAttr(
        default_factory=dict
    )  # a folder of a million files is read once

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

    def shared_data(self, what: str) -> str:
        """The folder or prefix below `shared.data` for "warehouse" or "mlflow"."""
        stated = self.shared.data
        return (
            f"{stated.rstrip('/')}/{what}"
            if stated.startswith("s3://")
            else str(self.root / Path(stated).expanduser() / what)
        )

    def set_server_variables(self) -> None:
        """For this process and those that it starts; what an operator has set stays."""
        for name, value in self.server_variables().items():
            os.environ.setdefault(name, value)

    def server_variables(self) -> dict[str, str]:
        """By which Prefect's server and MLflow find what is shared; none where nothing is."""
        if not self.shared.host:
            return {}
        artifacts, database = self.shared_data("mlflow"), self.shared.database
        return {
            HISTORY: self.shared.url(f"{database}_prefect", "asyncpg"),
            OPERATORS_STORE: self.shared.url(f"{database}_mlflow", "psycopg2"),
            OPERATORS_ARTIFACTS: artifacts if "://" in artifacts else Path(artifacts).as_uri(),
        }

    def workload(self, name: str) -> Workload:
        """The workload `name` with the digest of its present file. Raises SettingsError if there is none."""
        if name not in self.workloads:
            raise SettingsError(f"unknown workload {name!r}; {nearest_names(name, self.workloads)}")
        spec = self.workloads[name]
        least, most = (
            (spec.global_batch,) * 2 if isinstance(spec.global_batch, int) else spec.global_batch
        )
        return Workload(
            name=name,
            digest=self.workload_digest(name),
            samples=spec.samples,
            global_batch_least=least,
            global_batch_most=most,
            modes=spec.modes,
            goals=tuple(
                Goal(**goal.model_dump(), **self.choice.model_dump()) for goal in spec.goals
            ),
        )

    def entrypoint(self, name: str) -> tuple[Path, str]:
        """The file that holds a workload's function, and the function's name. Raises SettingsError, as `source`."""
        source, function = self.source(name)
        return source.files[source.entry], function

    def source(self, name: str) -> tuple[Source, str]:
        """A workload's code, and the name of its function.

        Raises SettingsError on malformed text, where something that is named is missing, where it is too much to be
        sent to machines, or where there is no entrypoint at all.
        """
        spec = self.workloads[name]
        if spec.entrypoint is None:
            raise SettingsError(
                f"workloads.{name} has no entrypoint: only imported measurements tell of it"
            )
        where, colon, function = spec.entrypoint.rpartition(":")
        form = (
            "path/to/file.py:function"
            if spec.path is None
            else "module:function or package.module:function"
        )
        if not colon or not function.isidentifier():
            raise SettingsError(
                f"workloads.{name}.entrypoint {spec.entrypoint!r} is not of the form {form}"
            )
        try:
            if spec.path is None:
                file = self._file(name, where)
                return file_source(file, self.root, spec.requirements or ""), function
            folder = self._folder(name, spec.path)
            own = [
                self.home,
                self.root / FILE,
            ]  # Srift's: editing a goal must not make another workload
            if spec.data is not None and isinstance(data := _source(self, name, spec.data), Path):
                own.append(data)  # which has its own way to a machine
            return folder_source(folder, where, spec.requirements or "", own), function
        except SourceRefused as error:
            raise SettingsError(f"workloads.{name}.{error.key}: {error}") from None

    def _file(self, name: str, where: str) -> Path:
        path = self.root / where
        if not path.is_file():
            siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
            instead = f"the path is looked for from the folder of {FILE}"
            near = nearest_names(path.name, siblings, otherwise=instead)
            raise SettingsError(f"workloads.{name}.entrypoint: no file {path}; {near}")
        return path

    def _folder(self, name: str, stated: str) -> Path:
        folder = self.root / stated
        if folder.is_file():
            raise SettingsError(
                f"workloads.{name}.path: {folder} is a file; name its folder, or leave path out"
            )
        if not folder.is_dir():
            above = folder.parent
            siblings = (
                [p.name for p in above.iterdir() if p.is_dir() and p.name[0] != "."]
                if above.is_dir()
                else []
            )
            instead = f"the path is looked for from the folder of {FILE}"
            near = nearest_names(folder.name, siblings, otherwise=instead)
            raise SettingsError(f"workloads.{name}.path: no folder {folder}; {near}")
        return folder

    def travelling(self, name: str) -> tuple[WorkloadFile, Source]:
        """What a machine is given of a workload, but where its data lie there, and the code that goes there.

        Raises SettingsError, as `source` and `data`.
        """
        source, function = self.source(name)
        spec = self.workloads[name]
        contents = self._read(name, source)
        data = self.data(name)
        data_digest = "" if data is None else data.digest
        digest = source.digest(contents, function, spec.arguments, env=spec.env, data=data_digest)
        packed = f"workloads/{hashed(contents).hexdigest()[:12]}.tar.gz"  # workloads of one repository share it
        return WorkloadFile(
            name=name,
            digest=digest,
            file=packed if source.packed else f"workloads/{digest}.py",
            function=function,
            arguments=dict(spec.arguments),
            source=source.entry,
            module=source.module,
            requirements=source.requirements,
            requirements_digest=source.needed_digest(contents),
            env=dict(spec.env),
            data_digest=data_digest,
        ), source

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
            self._data[name] = WorkloadData(
                text=text, source=source, digest=digest_of_data(text, files)
            )
        return self._data[name]

    def workload_digest(self, name: str) -> str:
        """Twelve hex digits of the workload's code, function, arguments, requirements, variables and data."""
        if self.workloads[name].entrypoint is None:
            return IMPORTED
        return self.travelling(name)[0].digest

    def _read(self, name: str, source: Source) -> dict[str, bytes]:
        try:
            return source.read()
        except OSError as error:
            raise SettingsError(
                f"workloads.{name}: {error.filename} cannot be read: {error.strerror}"
            ) from None


def find_file(start: Path | None = None) -> Path:
    """The nearest srift.toml from `start` (the working directory) upwards. Raises SettingsError if there is none."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / FILE).is_file():
            return folder / FILE
    raise SettingsError(
        f"no {FILE} in {here} or above it; run srift inside a project, or write one (see the README)"
    )


def load_settings(file: Path | None = None) -> Settings:
    """Settings of this installation, refused before anything starts where anything is unknown or malformed.

    Raises SettingsError naming every wrong key, its reason, and the nearest right names.
    """
    path = (
        file or find_file(Path(os.environ["SRIFT_ROOT"]) if os.environ.get("SRIFT_ROOT") else None)
    ).resolve()
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
    settings = settings.model_copy(
        update={"root": path.parent}
    )  # SRIFT_ROOT says where to look for the file only
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
            raise SettingsError(
                f"unknown variable {variable}; {nearest_names(variable, [PREFIX + section.upper()])}"
            )
        named, what = body.get(section), "workload" if section == "workloads" else ""
        if section == "local" and rest[:1] == ["instance_types"] and isinstance(named, dict):
            named, rest, what = named.get("instance_types"), rest[1:], "instance type"
        if what and rest and rest[0] not in (named or ()):
            raise SettingsError(
                f"{variable}: unknown {what} {rest[0]!r}; {nearest_names(rest[0], named or ())}"
            )


def _variables() -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Name, key and text of every variable that states a setting; an empty one is as good as none."""
    for name, text in os.environ.items():
        if name.upper().startswith(PREFIX) and text:
            yield name, tuple(name[len(PREFIX) :].lower().split("__")), text


def _refusal(error: ValidationError, file: Path, model: type[BaseModel]) -> str:
    """Every wrong key of `model`: those of `file` below its name, then each that a variable states after its own."""
    of_file, of_variables = [], []
    errors = error.errors()
    unknown = [one["loc"] for one in errors if one["type"] == _UNKNOWN]
    for one in errors:
        if one["type"] == "missing" and any(_misspelt(key, one["loc"]) for key in unknown):
            continue  # it is there under the name that is refused
        # a key that nobody knows, or a section where a plain value is wanted, may be stated by what is below it
        below = one["type"] == _UNKNOWN or (
            isinstance(one["input"], dict) and one["type"] not in _OF_SECTIONS
        )
        variable, sentence = _stated_by(one["loc"], below=below), _explained(one, model)
        if variable:
            of_variables.append(f"{variable}: {sentence}")
        else:
            of_file.append(f"  {sentence}")
    return "\n".join([*([f"{file}:"] if of_file else []), *of_file, *of_variables])


def _misspelt(unknown: tuple[Any, ...], missing: tuple[Any, ...]) -> bool:
    nearest = nearest_names(str(unknown[-1]), [missing[-1]], otherwise="")
    return unknown[:-1] == missing[:-1] and nearest != ""


def _malformed(error: MalformedVariable) -> str:
    """Which variable's text is not the list or section that its key expects."""
    text = getattr(error.__cause__, "doc", None)  # of json.JSONDecodeError
    names = [name for name, _, value in _variables() if value == text]
    what = " or ".join(names) or f"a {PREFIX} variable"
    return f'{what}: a list or a section of keys must be JSON there: ["one", "another"]'


def _explained(error: Any, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["loc"] == ("shared", "password"):
        return f"{where}: {_PASSWORD}"
    if (
        error["type"] == _UNKNOWN
        and error["loc"][:1] == ("workloads",)
        and error["loc"][-1] in _FACTS
    ):
        return f"{where}: a fact of a workload and no setting; {_WHERE_FACTS_GO}"
    if error["type"] == _UNKNOWN and error["loc"][:1] == ("workloads",):
        for key, (_, known) in _MODES.items():
            if (value := str(error["loc"][-1])) in known[1:]:
                return f'{where}: unknown key; did you mean `{key} = ["{known[0]}", "{value}"]`?'
    if error["type"] == _UNKNOWN:
        return f"{where}: unknown key; {nearest_names(str(error['loc'][-1]), _known_keys(model, error['loc'][:-1]))}"
    return (
        f"{where}: {_PLAINLY.get(error['type'], '') or error['msg'].removeprefix('Value error, ')}"
    )


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
        if (
            key[:shared] == location[:shared]
            and (below or len(key) == shared)
            and _holds(text, location[len(key) :])
        ):
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
