"""The only file that speaks MLflow: stores challengers with their scoreboards, moves `champion`, loads it.

The store is `SRIFT_HOME/mlflow.db`, and artifacts lie under `SRIFT_HOME`, unless MLFLOW_TRACKING_URI (and, if that is a
database, MLFLOW_DEFAULT_ARTIFACT_ROOT) say otherwise, as they do where srift.toml has a section [shared].
MLflow takes seconds to import and to open a store, so that it is imported where it is spoken to.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

import models
from models.step_time.model import StepTimeModel
from models.step_time.serialization import dump, load
from warehouse.lake import WHILE_LOCKED

from ..workspace.home import (
    OPERATORS_ARTIFACTS,
    OPERATORS_STORE,
    damaged_registry,
    in_force,
    is_damage,
    registry_damage,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature
    from mlflow.pyfunc import PyFuncModel

ALIAS, CHALLENGER = "champion", "challenger"  # the version in force; the newest that is not
REQUIREMENTS = ("numpy", "scipy", "pandas")
_OPTIONAL_TEXT = ("strategy", "precision", "switches", "provider")
# Of any type, like the batch: a layout is a number or `4+4+2`, and a whole number that is missing somewhere is a float
# to pandas, and MLflow takes no long for a double.
_OPTIONAL = (
    *("layout", "accumulation_steps", "parameters", "gradient_bytes", "flops_per_sample"),
    *("market", "zone", "run_id", "source", "measured_at"),
)
_LOCK_TIMEOUT = "55P03"  # PostgreSQL's code of it
_REGISTRAR, _TURN_S = (
    5112003,
    300,
)  # our advisory lock in a shared registry's database, and how long to wait for it
# SQLite's words, and the system's where a copy of several files (shutil.Error, an upload) names no number.
_FULL_DISK = ("database or disk is full", "No space left on device")
_OUTPUTS = (
    *("step_s", "step_low_s", "step_high_s", "samples_per_s"),
    *("compute_s", "communication_s", "exposed_communication_s"),
)


class RegistryError(OSError):
    """The model registry could not be read or written; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Champion:
    """The model in force, the version it is registered under, and its scoreboard (None: of an older Srift)."""

    version: int
    model: StepTimeModel
    scoreboard: pd.DataFrame | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a version records about where it came from."""

    training_digest: str
    training_rows: int
    code_commit: str
    seed: int
    refresh_id: str

    def tags(self) -> dict[str, str]:
        """As MLflow tags."""
        return {name: str(value) for name, value in asdict(self).items()}


def name_of(provider: str) -> str:
    """Registered name of a provider's model: fits are never pooled across providers."""
    return f"srift-step-time-{provider}"


def signature() -> ModelSignature:
    """The columns that a puller gives, and those of the answer."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec
    from mlflow.types.schema import AnyType

    inputs: list[ColSpec | TensorSpec] = [
        *(ColSpec("string", name) for name in ("workload", "cluster")),
        ColSpec(AnyType(), "batch_per_device"),  # type: ignore[no-untyped-call]
        *(ColSpec("string", name, required=False) for name in _OPTIONAL_TEXT),
        *(ColSpec(AnyType(), name, required=False) for name in _OPTIONAL),  # type: ignore[no-untyped-call]
    ]
    answers: list[ColSpec | TensorSpec] = [
        *(ColSpec("double", name) for name in _OUTPUTS),
        ColSpec("string", "bottleneck"),
        ColSpec("double", "input_s"),
        ColSpec("string", "input_by"),
        ColSpec("double", "nearest_doublings"),
    ]
    return ModelSignature(inputs=Schema(inputs), outputs=Schema(answers))


def example(model: StepTimeModel) -> pd.DataFrame:
    """A row that `model` can answer, with the columns that a puller gives."""
    workload, mode = min(model.trained)
    (kind, *_) = sorted(model.measured_types) or model.instance_types
    row = {"workload": workload, "cluster": f"1x{kind}", "batch_per_device": "8"}
    row |= {"strategy": mode.strategy, "precision": mode.precision, "switches": mode.switches}
    return pd.DataFrame([row])


def _own_store(home: Path) -> str:
    return f"sqlite:///{home / 'mlflow.db'}"


@contextmanager
def _environment_kept() -> Iterator[None]:
    """MLflow writes a store that it is told into the environment: the next call would take it for an operator's choice,
    and a process that is started later for its own.
    """
    before = {name: os.environ.get(name) for name in (OPERATORS_STORE, "MLFLOW_REGISTRY_URI")}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _client(home: Path) -> Iterator[MlflowClient]:
    import mlflow

    chosen = os.environ.get(OPERATORS_STORE)
    uri = chosen or _own_store(home)
    home.mkdir(parents=True, exist_ok=True)
    refuse_damaged(home)  # MLflow would try to open it again and again
    with _environment_kept():
        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
    logging.getLogger("mlflow.store.db.utils").setLevel(
        logging.CRITICAL
    )  # prints the traceback of every error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield mlflow.MlflowClient(uri, uri)
        except RegistryError:
            raise
        except Exception as error:
            explained = _explained(home, error)
            if explained is None:
                raise
            raise explained from error


@contextmanager
def _turn(store: str) -> Iterator[None]:
    """One machine of a team at a time in its PostgreSQL: MLflow reads, then writes, where it numbers a version or moves
    an alias. A home of its own has the refresh's lock, and a server of MLflow decides itself.

    PostgreSQL lets go when the process dies. Raises RegistryError after five minutes, and where it does not answer.
    """
    if not store.startswith("postgresql"):
        yield
        return
    import sqlalchemy

    with ExitStack() as held:
        try:
            connection = held.enter_context(
                sqlalchemy.create_engine(store, poolclass=sqlalchemy.NullPool).begin()
            )
            for setting, value in (WHILE_LOCKED | {"lock_timeout": f"'{_TURN_S}s'"}).items():
                connection.execute(sqlalchemy.text(f"set local {setting} = {value}"))
            connection.execute(sqlalchemy.text(f"select pg_advisory_xact_lock({_REGISTRAR})"))
        except sqlalchemy.exc.OperationalError as error:
            waited = getattr(error.orig, "pgcode", None) == _LOCK_TIMEOUT
            raise RegistryError(
                f"another machine has been registering a model for {_TURN_S} s. The model in force stays as it is;"
                " wait until its refresh ends, or end it, and try again"
                if waited
                else f"the model registry's PostgreSQL did not answer: {str(error.orig).splitlines()[0]}. The model in"
                " force stays as it is; see that the server is up, and try again"
            ) from error
        yield


def refuse_damaged(home: Path) -> None:
    """Raises RegistryError where our own store is damaged; a store that an operator chose is not looked at."""
    if said := registry_damage(home):
        raise RegistryError(said)


def _explained(home: Path, error: BaseException | None) -> RegistryError | None:
    """What our own store's file or disk has to do with `error`, as a sentence; None where they have nothing to do."""
    while error is not None:
        said = str(error).splitlines()[0] if str(error) else ""
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT) or any(one in str(error) for one in _FULL_DISK):
            return RegistryError(
                f"the disk is full, and the model registry at {home / 'mlflow.db'} could not be written: {said}."
                " The model in force stays as it is; free some space and try again"
            )
        if number == errno.EROFS or "readonly database" in said:
            return RegistryError(
                f"the model registry at {home / 'mlflow.db'} cannot be written: {said}. The model in force stays as it"
                " is; make the folder writable, or set SRIFT_HOME to one that is, and try again"
            )
        if isinstance(error, sqlite3.Error):
            other = f"the model registry at {home / 'mlflow.db'} did not answer: {said}. Nothing was promoted; try again"
            return RegistryError(damaged_registry(home, said) if is_damage(said) else other)
        error = error.__cause__ or error.__context__
    return None


def log_challenger(
    home: Path,
    provider: str,
    model: StepTimeModel,
    *,
    scoreboard: pd.DataFrame,
    card: str,
    provenance: Provenance,
    plots: Sequence[Path] = (),
) -> int:
    """Register a new version with its scoreboard, its plots (image files), card, provenance and an input example, and
    call it challenger; returns its number.
    """
    import mlflow

    name = name_of(provider)
    with _client(home) as client, tempfile.TemporaryDirectory() as folder:
        run_name = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
        with _turn(client.tracking_uri):
            experiment = _experiment(client, name, home)
        with mlflow.start_run(experiment_id=experiment, run_name=run_name):
            mlflow.set_tags(provenance.tags())
            mlflow.log_params({key: getattr(provenance, key) for key in ("seed", "training_rows")})
            mlflow.log_metrics(_metrics(scoreboard))
            mlflow.log_text(card, "card.md")
            mlflow.log_text(scoreboard.to_csv(index=False), "scoreboard.csv")
            for plot in plots:
                mlflow.log_artifact(str(plot), "plots")
            info = mlflow.pyfunc.log_model(
                name="model",
                python_model=str(Path(__file__).with_name("pyfunc_model.py")),
                artifacts={
                    "model": _written(Path(folder) / "model.json", dump(model)),
                    "scoreboard": _written(
                        Path(folder) / "scoreboard.json", scoreboard.to_json(orient="records")
                    ),
                },
                code_paths=[str(_copy_of_models(Path(folder)))],
                pip_requirements=[f"{package}=={version(package)}" for package in REQUIREMENTS],
                signature=signature(),
                input_example=example(model),
            )
        with _turn(client.tracking_uri):
            number = str(mlflow.register_model(info.model_uri, name).version)
            client.update_model_version(name, number, description=card)
            for key, value in provenance.tags().items():
                client.set_model_version_tag(name, number, key, value)
            client.set_registered_model_alias(name, CHALLENGER, number)
        return int(number)


def promote(
    home: Path, provider: str, number: int, reason: str, *, over: int | None = None
) -> int | None:
    """Put version `number` in force; if it was the challenger, there is none then.

    Where another version than `over`, against which it was judged, is in force by now, nothing is changed, and that
    version is returned. None that is in force any more is nothing to be judged against.
    """
    name = name_of(provider)
    with _client(home) as client, _turn(client.tracking_uri):
        known = _number_of(client, name, ALIAS)
        if known not in (None, over):
            return known
        client.set_model_version_tag(name, str(number), "promotion", f"promoted: {reason}")
        client.set_model_version_tag(
            name, str(number), "replaces", "" if over is None else str(over)
        )
        client.set_registered_model_alias(name, ALIAS, str(number))
        if _number_of(client, name, CHALLENGER) == number:
            client.delete_registered_model_alias(name, CHALLENGER)
    return None


def refuse(home: Path, provider: str, number: int, reason: str) -> None:
    """Record why version `number` was not put in force."""
    with _client(home) as client:
        client.set_model_version_tag(
            name_of(provider), str(number), "promotion", f"refused: {reason}"
        )


def load_champion(home: Path, provider: str) -> Champion | None:
    """The model in force; None before the first, or where an older version of the project wrote it.

    Raises RegistryError where the registry does not say.
    """
    if not (home / "mlflow.db").exists() and OPERATORS_STORE not in os.environ:
        return None
    number: int | None = None
    try:
        known = (
            None
            if OPERATORS_STORE in os.environ
            else in_force(home / "mlflow.db", name_of(provider), ALIAS)
        )
        if known is None:
            import mlflow

            with _client(home) as client:
                number = _number_of(client, name_of(provider), ALIAS)
                if number is None:
                    return None
                known = (
                    number,
                    Path(
                        mlflow.artifacts.download_artifacts(f"models:/{name_of(provider)}/{number}")
                    ),
                )
        number, folder = known
        model = load((folder / "artifacts" / "model.json").read_text())
        held_out = folder / "artifacts" / "scoreboard.json"
        scoreboard = pd.DataFrame(json.loads(held_out.read_text())) if held_out.exists() else None
    except RegistryError:
        raise
    except _unreadable() as error:
        raise RegistryError(
            f"version {number} of {name_of(provider)} could not be read, and nothing was decided: {error}. "
            "Artifacts are recorded under absolute paths: a home that was moved must go back to its place, or lose its "
            "mlflow.db and be refreshed"
        ) from error
    return Champion(version=number, model=model, scoreboard=scoreboard)


def load_served(home: Path, provider: str) -> PyFuncModel:
    """The model in force as a puller has it. Raises MlflowException where there is none."""
    import mlflow

    with _client(home):
        served: PyFuncModel = mlflow.pyfunc.load_model(f"models:/{name_of(provider)}@{ALIAS}")
    return served


def _unreadable() -> tuple[type[Exception], ...]:
    from mlflow.exceptions import MlflowException

    return MlflowException, OSError, ValueError, KeyError


def _number_of(client: MlflowClient, name: str, alias: str) -> int | None:
    from mlflow.exceptions import MlflowException

    try:
        return int(client.get_model_version_by_alias(name, alias).version)
    except MlflowException as error:
        no_alias = (
            error.error_code == "INVALID_PARAMETER_VALUE"
            and f"alias {alias} not found" in str(error)
        )
        if no_alias or error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _experiment(client: MlflowClient, name: str, home: Path) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    # A server decides itself; a database would put artifacts in whatever folder the command was typed in.
    root = os.environ.get(OPERATORS_ARTIFACTS)
    if client.tracking_uri == _own_store(home):
        root = (home / "mlartifacts").as_uri()
    location = (
        f"{root.rstrip('/')}/{name}"
        if root and not client.tracking_uri.startswith("http")
        else None
    )
    return str(client.create_experiment(name, artifact_location=location))


def _metrics(scoreboard: pd.DataFrame) -> dict[str, float]:
    """`split/group/figure`, as MLflow accepts names."""
    figures = ("mean_error", "median_error", "p90_error", "coverage_90", "median_width")
    return {
        f"{row['split']}/{_plain(str(row['group']))}/{figure}": float(row[figure])
        for _, row in scoreboard.iterrows()
        for figure in figures
        if pd.notna(row[figure])
    }


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_. " else "_" for c in text)


def _written(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


def _copy_of_models(folder: Path) -> Path:
    """What a registered model runs on, as a package under a name that no puller has (`models` imports relatively)."""
    target, room = folder / "srift_models", Path(models.__file__).parent
    for part in ("domain", "step_time"):
        shutil.copytree(room / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(room / "__init__.py", target)
    return target
