"""Load the settings from the nearest srift.toml and from environment variables SRIFT_*.

The nearest srift.toml is in the working directory or a folder above. An environment variable
overrides the file's value.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from models.domain.suggestions import nearest_names
from models.domain.transformer import transformer_facts
from models.domain.workload import (
    GOALS,
    MODES,
    OVERSHOOT_PRICE,
    PRECISIONS,
    SERVED,
    STRATEGIES,
    SWITCHES,
    Goal,
    Mode,
    Workload,
)

from ..node.record import WorkloadFile
from ..providers.ec2.settings import Ec2
from ..providers.local.settings import Local, Name
from .home import HISTORY, OPERATORS_ARTIFACTS, OPERATORS_STORE
from .sources import Source, SourceRefused, file_source, folder_source, hash_files
from .workload_data import BadData, WorkloadData, read_data, source_of

PREFIX = "SRIFT_"
FILE = "srift.toml"
# The digest of every workload without code. The mart `workloads` contains the same text.
IMPORTED = "imported"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables that a workload must not set. They control, for example, credentials, the files that
# Python and the linker load, how ranks find each other, and the precision.
_RESERVED = """
AWS_* SRIFT_* PREFECT_* MLFLOW_* PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONUSERBASE
PYTHONSAFEPATH PYTHONPLATLIBDIR PYTHONEXECUTABLE VIRTUAL_ENV LD_* PATH HOME TMPDIR
MASTER_* RANK *_RANK ROLE_* *WORLD_SIZE TORCHELASTIC_* TORCH_ELASTIC_* GLOO_* NCCL_*
TORCH_NCCL_* TORCH_GLOO_* TP_SOCKET_* OMP_* MKL_* OPENBLAS_* NUMEXPR_* CUDA_VISIBLE_DEVICES
NVIDIA_TF32_OVERRIDE TORCHDYNAMO_* TORCH_COMPILE_* TORCHINDUCTOR_* ACCELERATE_MIXED_PRECISION
"""


class SettingsError(Exception):
    """A value in srift.toml, an environment variable or an option is wrong."""

    exit_code = 2


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class Campaign(_Section):
    """The section [campaign]: limits for the measurements of one refresh.

    elastic_runs: if True, a refresh also stops a local machine during a run, to measure the
        training time that is lost.
    """

    max_usd: float = Field(default=1.0, ge=0)
    max_minutes: float = Field(default=7.5, gt=0)
    max_hosts: int = Field(default=4, ge=1, le=64)
    stale_after_days: float = Field(default=30.0, gt=0)
    seed: int = 0
    market: Literal["spot", "on-demand"] = "spot"
    elastic_runs: bool = False


class Choice(_Section):
    """The section [choice]: how the planner ranks setups that exceed the deadline or budget.

    overshoot_price: penalty for exceeding the deadline or budget. With 10, exceeding it by 1 % is
        as bad as a 10 % higher value of the objective (dollars or hours).
    """

    overshoot_price: float = Field(default=OVERSHOOT_PRICE, gt=0, le=1000)


def _choice_of(names: Sequence[str]) -> AfterValidator:
    """Return a pydantic validator that accepts only `names`, and suggests a similar name."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"unknown name {name!r}; {nearest_names(name, names)}")
        return name

    return AfterValidator(check)


class GoalSettings(_Section):
    """A goal of a workload.

    hours: the deadline, only for goals with a deadline.
    usd: the budget in dollars, only for goals with a budget.
    p_required: minimum probability that a recommended cluster meets the deadline or budget.
    """

    goal: Annotated[str, _choice_of(GOALS)]
    hours: float | None = Field(default=None, gt=0)
    usd: float | None = Field(default=None, gt=0)
    p_required: float | None = Field(default=None, gt=0, lt=1)

    @model_validator(mode="after")
    def _check_limit(self) -> GoalSettings:
        limit = Goal(goal=self.goal).constraint
        if any((getattr(self, name) is None) == (name == limit) for name in ("hours", "usd")):
            rule = f"must have the limit {limit} alone" if limit else "must not have a limit"
            raise ValueError(f"goal {self.goal!r} {rule} (limits are hours and usd)")
        return self


class WorkloadSettings(_Section):
    """The section of a workload: its code, samples, global batch and goals.

    global_batch: the permitted range, such as [64, 512], or the only permitted value, such as 64.
    entrypoint: `file.py:function` next to srift.toml, or `module:function` in the folder `path`.
        None means that the workload has no code, and its measurements are imported.
    precisions, strategies, switches: the options from which the planner can choose. An entry of
        `switches` is "none", or one or more of "checkpointing", "compile" and "offload", joined
        with "+".
    data: a folder or `s3://bucket/prefix`. The entrypoint's argument `data` is the folder on the
        training machine.
    follow_links: if True, symbolic links in the folder `data` are allowed to lead out of it.
    allow_builds: if True, pip may build requirements from source on this computer. A build runs the
        code of the requirement.
    transformer: the network's shape, as the path of a Hugging Face `config.json` or a table with
        its keys.
    sequence: number of tokens in a sample.
    """

    entrypoint: str | None = None
    data: str | None = None
    follow_links: bool = False
    samples: int = Field(gt=0, le=10**15)
    global_batch: tuple[int, int]
    transformer: str | dict[str, Any] | None = None
    sequence: int | None = Field(default=None, gt=0)
    precisions: tuple[Annotated[str, _choice_of(PRECISIONS)], ...] = Field(
        PRECISIONS[:1], min_length=1
    )
    strategies: tuple[Annotated[str, _choice_of(STRATEGIES)], ...] = Field(
        STRATEGIES[:1], min_length=1
    )
    switches: tuple[Annotated[str, _choice_of(SWITCHES)], ...] = Field(SWITCHES[:1], min_length=1)
    arguments: dict[str, bool | int | float | str] = {}
    path: str | None = None
    requirements: str = ""
    allow_builds: bool = False
    env: dict[str, str] = {}
    goals: tuple[GoalSettings, ...] = ()

    @field_validator("env")
    @classmethod
    def _check_names(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not a valid name of an environment variable")
            if any(fnmatchcase(name, pattern) for pattern in _RESERVED.split()):
                raise ValueError(f"Srift or the machine sets {name}. Remove {name} from env")
        return env

    @field_validator("global_batch", mode="wrap")
    @classmethod
    def _bounds(cls, batch: Any, parse: ValidatorFunctionWrapHandler) -> tuple[int, int]:
        with suppress(ValidationError):
            least, largest = parse(batch if isinstance(batch, (list, tuple)) else (batch, batch))
            if 1 <= least <= largest:
                return least, largest
        raise ValueError("must be a whole number above 0, or two numbers [smallest, largest]")

    @field_validator("data")
    @classmethod
    def _parse(cls, data: str) -> str:
        source_of(data, Path())
        return data

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Return every valid combination of the allowed precisions, strategies and switches."""
        modes = (Mode(*parts) for parts in product(self.precisions, self.strategies, self.switches))
        return tuple(mode for mode in dict.fromkeys(modes) if mode in MODES)

    @model_validator(mode="after")
    def _consistent(self) -> WorkloadSettings:
        for key in ("path", "requirements", "env", "data"):
            if self.entrypoint is None and getattr(self, key):
                raise ValueError(f"{key} needs an entrypoint")
        if self.sequence and self.transformer is None:
            raise ValueError("sequence is allowed only together with transformer")
        if self.data is not None and "data" in self.arguments:
            raise ValueError("rename arguments.data: Srift passes the data folder as `data`")
        usable = {STRATEGIES[0], *SERVED}  # other strategies cannot combine fp16's scaled gradients
        if "fp16" in self.precisions and not usable.issuperset(self.strategies):
            raise ValueError(
                "precision fp16 works only with strategies ddp, ps-1, ps-2 and ps-4: use bf16"
            )
        for strategy in set(self.strategies) - {mode.strategy for mode in self.modes}:
            switches = ", ".join(self.switches)
            raise ValueError(
                f"strategy {strategy} does not work with any of the switches {switches}"
            )
        if len({(goal.goal, goal.hours, goal.usd) for goal in self.goals}) < len(self.goals):
            raise ValueError("goals contains the same goal twice")
        return self


class Shared(_Section):
    """The section [shared]: the PostgreSQL server, file store and Dask scheduler of a team.

    host: the PostgreSQL host. libpq reads the password from PGPASSWORD or PGPASSFILE.
    data: the file store, a folder or `s3://bucket/prefix`.
    dask: the address of a Dask scheduler. It can be set without `host` and `data`.
    """

    host: str = Field(default="", pattern=r"^[^@:]*$")
    port: int = Field(default=5432, ge=1, le=65535)
    user: str = Field(default="srift", min_length=1)
    database: str = Field(default="srift", pattern=r"^[a-z_][a-z0-9_]*$")
    data: str = Field(default="", pattern=r"^(s3://.+|[^:]*)$")
    dask: str = Field(default="", pattern=r"^((tcp|tls)://[^/\s@]+:[0-9]+)?$")

    @model_validator(mode="after")
    def _complete(self) -> Shared:
        if bool(self.host) != bool(self.data):
            raise ValueError("set both host and data under [shared], or neither")
        return self

    def url(self, database: str, driver: str = "") -> str:
        """Return the URL of `database` without a password.

        driver: "+" and the name of an SQLAlchemy driver, such as "+psycopg2"; "" for libpq.
        """
        host, query = quote(self.host), ""
        if "/" in self.host:  # the folder of a Unix socket
            host, query = "", f"?host={quote(self.host, safe='')}"
        return (
            f"postgresql{driver}://{quote(self.user, safe='')}@{host}:{self.port}/{database}{query}"
        )


class Settings(_Section):
    """The settings of an installation.

    root: the folder of srift.toml.
    home: SRIFT_HOME, the folder of all state.
    """

    root: Path
    home: Path = Field(Path(".srift"), validate_default=True)
    campaign: Campaign = Campaign()
    choice: Choice = Choice()
    local: Local = Local()
    ec2: Ec2 = Ec2()
    shared: Shared = Shared()
    workloads: dict[Name, WorkloadSettings] = {}
    # {workload: data}. A cache, because listing a folder of a million files is slow.
    _data: dict[str, WorkloadData] = PrivateAttr(default_factory=dict)

    @field_validator("home")
    @classmethod
    def _in_root(cls, home: Path, others: ValidationInfo) -> Path:
        root: Path = others.data["root"]
        return (root / home.expanduser()).resolve()

    def shared_data(self, kind: str) -> str:
        """Return the team's folder or S3 prefix for files of `kind`, "warehouse" or "mlflow"."""
        location = self.shared.data
        if location.startswith("s3://"):
            return f"{location.rstrip('/')}/{kind}"
        return str(self.root / Path(location).expanduser() / kind)

    def set_server_variables(self) -> None:
        """Set the environment variables that make Prefect and MLflow use the team's database.

        Variables that are already set keep their values. Without a team's database, nothing is set.
        """
        if not self.shared.host:
            return
        artifacts, database = self.shared_data("mlflow"), self.shared.database
        variables = {
            HISTORY: self.shared.url(f"{database}_prefect", "+asyncpg"),
            OPERATORS_STORE: self.shared.url(f"{database}_mlflow", "+psycopg2"),
            OPERATORS_ARTIFACTS: artifacts if "://" in artifacts else Path(artifacts).as_uri(),
        }
        for name, value in variables.items():
            os.environ.setdefault(name, value)

    def workload(self, name: str) -> Workload:
        """Return the workload `name` with the digest of its current code.

        Raises:
            SettingsError: if the name is unknown, if its code or data cannot be sent to machines,
                or if the shape of its transformer is not valid.
            OSError: if the code cannot be read.
        """
        section = self.stated(name)
        least, largest = section.global_batch
        overshoot = self.choice.overshoot_price
        goals = (Goal(**goal.model_dump(), overshoot_price=overshoot) for goal in section.goals)
        return Workload(
            name=name,
            digest=self.workload_digest(name),
            samples=section.samples,
            global_batch_least=least,
            global_batch_most=largest,
            modes=section.modes,
            goals=tuple(goals),
            **self.shape(name),
        )

    def shape(self, name: str) -> dict[str, Any]:
        """Return facts of a transformer, such as its number of layers; {} for other workloads.

        Raises SettingsError if the shape of the transformer is not valid.
        """
        section = self.workloads[name]
        if section.transformer is None:
            return {}
        try:
            return read_transformer(section.transformer, section.sequence, self.root)
        except (OSError, ValueError) as error:
            raise SettingsError(f"workloads.{name}.transformer: {error}") from None

    def stated(self, name: str) -> WorkloadSettings:
        """Return the section of workload `name` in srift.toml.

        Raises SettingsError if the name is unknown.
        """
        if name not in self.workloads:
            raise SettingsError(f"unknown workload {name!r}; {nearest_names(name, self.workloads)}")
        return self.workloads[name]

    def source(self, name: str) -> tuple[Source, str]:
        """Return the files of a workload's code, and the name of the entrypoint function.

        Raises SettingsError if the name is unknown or the code cannot be sent to machines.
        """
        section = self.stated(name)
        where, _, function = (section.entrypoint or "").rpartition(":")
        try:
            if not where or not function.isidentifier():
                raise SourceRefused(
                    "entrypoint",
                    "the entrypoint must be file.py:function, or module:function if `path` is set",
                )
            # SRIFT_HOME, srift.toml and data are not code. The digest of the code ignores them.
            without = [self.home, self.root / FILE]
            if section.data and isinstance(data := source_of(section.data, self.root), Path):
                without.append(data)
            if section.path is None:
                return file_source(self.root, where, section.requirements, without), function
            folder = self.root / section.path
            return folder_source(folder, where, section.requirements, without), function
        except SourceRefused as error:
            raise SettingsError(f"workloads.{name}.{error.key}: {error}") from None

    def code_to_send(self, name: str) -> tuple[WorkloadFile, Source]:
        """Return what machines receive for a workload: its description and its code.

        Raises:
            SettingsError: if the name is unknown, or the code or data cannot be sent to machines.
            OSError: if the code cannot be read.
        """
        source, function = self.source(name)
        section, data = self.stated(name), self.data(name)
        contents = source.read()
        data_digest = "" if data is None else data.digest
        digest = source.digest(
            contents, function, section.arguments, env=section.env, data=data_digest
        )
        file = f"workloads/{digest}.py"
        if source.packed:  # workloads of one repository share the archive
            file = f"workloads/{hash_files(contents).hexdigest()[:12]}.tar.gz"
        return WorkloadFile(
            name=name,
            digest=digest,
            file=file,
            function=function,
            arguments=section.arguments,
            source=source.entry,
            module=source.module,
            requirements=source.requirements,
            requirements_digest=source.needed_digest(contents),
            env=section.env,
            data_digest=data_digest,
        ), source

    def data(self, name: str) -> WorkloadData | None:
        """Return the location and digest of a workload's data, or None if it has no data.

        Raises SettingsError if the data cannot be sent to machines.
        """
        text = self.workloads[name].data
        if text is not None and name not in self._data:
            try:
                self._data[name] = read_data(
                    text, self.root, self.home, self.workloads[name].follow_links
                )
            except BadData as error:
                raise SettingsError(f"workloads.{name}.data: {error}") from None
        return self._data.get(name)

    def workload_digest(self, name: str) -> str:
        """Return twelve hex digits that identify the workload, or "imported" if it has no code.

        The digits change with the code, function, arguments, requirements, environment variables
        and data.
        """
        if self.workloads[name].entrypoint is None:
            return IMPORTED
        return self.code_to_send(name)[0].digest


def read_transformer(
    shape: str | dict[str, Any], sequence: int | None, root: Path
) -> dict[str, float]:
    """Return facts of a transformer, such as its parameter count, as {name: value}.

    shape: the keys of a Hugging Face `config.json`, or the name of such a file in `root`.
    sequence: tokens per sample.

    Raises ValueError if the shape is wrong, and OSError if the file cannot be read.
    """
    config = json.loads((root / shape).read_text("utf-8-sig")) if isinstance(shape, str) else shape
    if not isinstance(config, dict):
        raise ValueError(f"{shape} does not contain a JSON object with the network's shape")
    return transformer_facts(config, sequence)


def load_settings(file: Path | None = None) -> Settings:
    """Return the settings of `file`; None means the nearest srift.toml.

    The nearest srift.toml is in the folder SRIFT_ROOT (default: the working directory) or in a
    folder above. Raises SettingsError if the file is missing or a value is wrong.
    """
    here = Path(os.environ.get(f"{PREFIX}ROOT") or ".").resolve()
    files = (folder / FILE for folder in (here, *here.parents) if (folder / FILE).is_file())
    path = file or next(files, None)
    if path is None:
        raise SettingsError(
            f"no {FILE} in {here} or above it: change to a project's folder, or create {FILE}"
        )
    if path.parent != here and path.stat().st_uid not in (0, os.geteuid()):
        raise SettingsError(
            f"{path} belongs to another user, and can make Srift run this user's code. If you trust"
            f" the user, run the command in {path.parent}"
        )
    try:
        body = tomllib.loads(path.read_text("utf-8-sig"))
    except ValueError as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from None
    variables = [
        name
        for name, value in sorted(os.environ.items())
        if name.upper().startswith(PREFIX) and name != f"{PREFIX}ROOT" and value
    ]
    try:
        for variable in variables:
            _merge(body, _stated_by(variable))
        settings = Settings(root=path.resolve().parent, **body)
    except (TypeError, ValueError) as error:
        problems = [str(error)]
        if isinstance(error, ValidationError):
            problems = [
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}"
                for fault in error.errors()
            ]
        lines = [f"{path}, with {', '.join(variables) or 'no SRIFT_* variables'}:", *problems]
        raise SettingsError("\n  ".join(lines)) from None
    for name, workload in settings.workloads.items():
        if workload.entrypoint is not None:
            settings.source(name)
        # A missing config.json must not stop `srift reap`, so only tables are checked here.
        if isinstance(workload.transformer, dict):
            settings.shape(name)
    return settings


def _stated_by(variable: str) -> dict[str, Any]:
    """Return the setting in an environment variable, in the form of a parsed srift.toml.

    For example, SRIFT_CAMPAIGN__MAX_USD gives {"campaign": {"max_usd": value}}. A value that begins
    with `[` or `{` is parsed as JSON. Raises ValueError if the JSON is malformed.
    """
    *sections, key = variable.lower()[len(PREFIX) :].split("__")
    value: Any = os.environ[variable]
    if variable == f"{PREFIX}HOME":
        value = str(Path(value).expanduser().absolute())
    elif value[0] in "[{":
        value = json.loads(value)
    for section in reversed(sections):
        key, value = section, {key: value}
    return {key: value}


def _merge(body: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Merge the nested dictionary `changes` into `body`. Values of `changes` take precedence.

    Raises ValueError if a key has a dictionary in `changes`, but another type of value in `body`.
    """
    for key, value in changes.items():
        if not isinstance(value, dict):
            body[key] = value
        elif isinstance(body.setdefault(key, {}), dict):
            _merge(body[key], value)
        else:
            raise ValueError(
                f"{key} is a plain value, but an environment variable SRIFT_*{key.upper()}* sets"
                f" keys inside {key}: unset the variable"
            )
