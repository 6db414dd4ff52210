"""Store models in the MLflow registry, and load the model in use (alias `champion`).

The registry is `SRIFT_HOME/mlflow.db`, unless MLFLOW_TRACKING_URI names another registry.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

import models
from models.step_time import field_terms
from models.step_time.model import StepTimeModel
from models.step_time.serialization import dump, load

from ..workspace.home import (
    MLFLOW_PAGES,
    OPERATORS_ARTIFACTS,
    OPERATORS_STORE,
    Wrong,
    check_registry,
    disk_trouble,
    in_force,
)

# Importing MLflow takes seconds, so only the functions that need MLflow import it.
if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature

ALIAS = "champion"  # the model in use
CHALLENGER = "challenger"  # the newest model that is not in use
REQUIREMENTS = ("numpy", "scipy", "pandas")
_REQUIRED = ("workload", "cluster", "batch_per_device")
_TEXT = ("workload", "cluster", "strategy", "precision", "switches", "provider")
# Input columns without a fixed type. A layout may be a number or a text such as `4+4+2`, and MLflow
# rejects integers in a column of floats.
_ANY_TYPE = (
    *("batch_per_device", "layout", "accumulation_steps"),
    *("parameters", "gradient_bytes", "flops_per_sample"),
    *("market", "zone", "run_id", "source", "measured_at"),
)
_TEXT_OUTPUTS = ("bottleneck", "input_by")
_OUTPUTS = (
    *("step_s", "step_low_s", "step_high_s", "samples_per_s"),
    *("compute_s", "communication_s", "exposed_communication_s", "bottleneck"),
    *("input_s", "input_by", "nearest_doublings", *field_terms.COLUMNS),
)


class RegistryError(OSError):
    """The model registry cannot be read or written."""


@dataclass(frozen=True, kw_only=True)
class Champion:
    """The model in use and its version in the registry.

    scoreboard: the model's errors in cross-validation; None if unknown.
    """

    version: int
    model: StepTimeModel
    scoreboard: pd.DataFrame | None = None


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The data, code, random seed and refresh that produced a model version."""

    training_digest: str
    training_rows: int
    code_commit: str
    seed: int
    refresh_id: str


def name_of(provider: str) -> str:
    """Return the name under which a provider's model is registered in MLflow."""
    return f"srift-step-time-{provider}"


def page_of(provider: str, number: int) -> str:
    """Return the address of a model version's page in MLflow.

    If no MLflow server is known, the model version's URI is returned.
    """
    name, server = name_of(provider), _pages()
    return f"{server}/#/models/{name}/versions/{number}" if server else f"models:/{name}/{number}"


def show_report(home: Path, provider: str, report: Path) -> str:
    """Store the page `report` with the model in use, and return the page's address in MLflow.

    Returns the path of the page if no MLflow server or no model is known, or if MLflow cannot
    store the page.
    """
    if server := _pages():
        with suppress(RegistryError), _client(home) as client:
            champion = client.get_model_version_by_alias(name_of(provider), ALIAS)
            run = client.get_run(str(champion.run_id)).info
            client.log_artifact(run.run_id, str(report))
            place = f"experiments/{run.experiment_id}/runs/{run.run_id}"
            return f"{server}/#/{place}/artifacts/{report.name}"
    return str(report)


def _pages() -> str:
    """Return the address of the MLflow server without a password; "" if no server is known."""
    server = os.environ.get(MLFLOW_PAGES, os.environ.get(OPERATORS_STORE, ""))
    return re.sub("(?<=//)[^/]*@|/$", "", server) if server.startswith("http") else ""


def signature() -> ModelSignature:
    """Return the columns of the model's input and output as an MLflow signature."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import AnyType

    inputs = [
        ColSpec(
            "string" if name in _TEXT else AnyType(),  # type: ignore[no-untyped-call]
            name,
            required=name in _REQUIRED,
        )
        for name in (*_TEXT, *_ANY_TYPE)
    ]
    outputs = [ColSpec("string" if name in _TEXT_OUTPUTS else "double", name) for name in _OUTPUTS]
    return ModelSignature(inputs=Schema([*inputs]), outputs=Schema([*outputs]))


def example(model: StepTimeModel) -> pd.DataFrame:
    """Return an example of an input, with one row that `model` can predict."""
    workload, mode = min(model.trained)
    (kind, *_) = sorted(model.measured_types) or model.instance_types
    row = {"workload": workload, "cluster": f"1x{kind}", "batch_per_device": "8"}
    return pd.DataFrame([row | mode._asdict()])


def _local_store(home: Path) -> str:
    return f"sqlite:///{home / 'mlflow.db'}"


@contextmanager
def _client(home: Path) -> Iterator[MlflowClient]:
    """Yield a client of the registry. Errors of the registry become RegistryError."""
    import mlflow
    from mlflow.utils.logging_utils import disable_logging
    from sqlalchemy.exc import SQLAlchemyError

    home.mkdir(parents=True, exist_ok=True)
    operator_uri = os.environ.get(OPERATORS_STORE)
    uri = operator_uri or _local_store(home)
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    # MLflow sets these variables. Without this removal, they would look like the operator's choice.
    os.environ.pop("MLFLOW_REGISTRY_URI", None)
    if not operator_uri:
        os.environ.pop(OPERATORS_STORE, None)
    # MLflow prints each registration, and the traceback of every error.
    disable_logging()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if not operator_uri:  # with damage, MLflow would retry for minutes
                check_registry(home)
            yield mlflow.MlflowClient(uri, uri)
        except (mlflow.MlflowException, SQLAlchemyError, sqlite3.Error, Wrong, OSError) as error:
            why = disk_trouble(error) or str(error).partition("\n")[0]
            raise RegistryError(
                f"the model registry failed, and the model in use is unchanged: {why}"
            ) from error


def log_challenger(
    home: Path,
    provider: str,
    model: StepTimeModel,
    *,
    scoreboard: pd.DataFrame,
    card: str,
    provenance: Provenance,
) -> int:
    """Register a new model version with the alias `challenger`, and return its number.

    scoreboard: errors and interval coverage in cross-validation. A row has the errors for
        one held-out group of runs. The column `split` says how the runs were grouped, such as
        by "workload".
    card: description of the version, in Markdown.

    Raises RegistryError if the registry fails.
    """
    import mlflow.pyfunc  # first, because it enables the messages that `_client` disables

    name = name_of(provider)
    with _client(home) as client, tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "model.pickle").write_bytes(dump(model))
        (folder / "scoreboard.json").write_text(scoreboard.to_json(orient="records"))
        run_name = f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}"
        experiment = _experiment(client, name, home)
        with mlflow.start_run(experiment_id=experiment, run_name=run_name):
            mlflow.set_tags(asdict(provenance))
            mlflow.log_metrics(_metrics(scoreboard))
            mlflow.log_text(card, "card.md")
            mlflow.log_text(scoreboard.to_csv(index=False), "scoreboard.csv")
            info = mlflow.pyfunc.log_model(
                name="model",
                python_model=str(Path(__file__).with_name("pyfunc_model.py")),
                artifacts={
                    "model": str(folder / "model.pickle"),
                    "scoreboard": str(folder / "scoreboard.json"),
                },
                code_paths=[str(_copy_of_models(folder))],
                pip_requirements=[f"{package}=={version(package)}" for package in REQUIREMENTS],
                signature=signature(),
                input_example=example(model),
            )
        model_version = mlflow.register_model(info.model_uri, name, tags=asdict(provenance))
        number = str(model_version.version)
        client.update_model_version(name, number, description=card)
        client.set_registered_model_alias(name, CHALLENGER, number)
        return int(number)


def promote(
    home: Path, provider: str, number: int, reason: str, *, over: int | None = None
) -> None:
    """Make the version `number` the model in use, by giving it the alias `champion`.

    over: number of the version in use until now; None if there was none.
    """
    name, text = name_of(provider), str(number)
    with _client(home) as client:
        client.set_model_version_tag(name, text, "promotion", f"promoted: {reason}")
        client.set_model_version_tag(name, text, "replaces", "" if over is None else str(over))
        client.set_registered_model_alias(name, ALIAS, text)
        if _number_of(client, name, CHALLENGER) == number:
            client.delete_registered_model_alias(name, CHALLENGER)


def refuse(home: Path, provider: str, number: int, reason: str) -> None:
    """Store the reason why version `number` was not promoted."""
    with _client(home) as client:
        name = name_of(provider)
        client.set_model_version_tag(name, str(number), "promotion", f"refused: {reason}")


def load_champion(home: Path, provider: str) -> Champion | None:
    """Return the model in use, or None if no model was ever promoted.

    Raises RegistryError if the registry or the model cannot be read.
    """
    name, store, location = name_of(provider), home / "mlflow.db", None
    if OPERATORS_STORE not in os.environ:
        if not store.exists():
            return None
        location = in_force(store, name, ALIAS)
    location = location or _download(home, name)
    if location is None:
        return None
    number, folder = location
    try:
        model = load((folder / "artifacts" / "model.pickle").read_bytes())
        scores = pd.read_json(folder / "artifacts" / "scoreboard.json", dtype=False)
    except (OSError, ValueError, KeyError) as error:
        raise RegistryError(
            f"model {name} version {number} cannot be read: {error}. If SRIFT_HOME was moved, move"
            f" it back. Otherwise, delete {store} and run `srift refresh`"
        ) from error
    return Champion(version=number, model=model, scoreboard=scores)


def _download(home: Path, name: str) -> tuple[int, Path] | None:
    """Download the model in use with MLflow, and return its version and folder.

    Returns None if no model is in use.
    """
    import mlflow

    with _client(home) as client:
        number = _number_of(client, name, ALIAS)
        if number is None:
            return None
        return number, Path(mlflow.artifacts.download_artifacts(f"models:/{name}/{number}"))


def _number_of(client: MlflowClient, name: str, alias: str) -> int | None:
    """Return the number of the model version with `alias`, or None if there is none."""
    models = client.search_registered_models(f"name = '{name}'")
    numbers = [model.aliases[alias] for model in models if alias in model.aliases]
    return int(numbers[0]) if numbers else None


def _experiment(client: MlflowClient, name: str, home: Path) -> str:
    """Return the id of the experiment `name`. Creates the experiment if it is missing."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    # Unless MLflow uses a server, its default location is the working directory.
    root = os.environ.get(OPERATORS_ARTIFACTS)
    if client.tracking_uri == _local_store(home):
        root = (home / "mlartifacts").as_uri()
    remote = client.tracking_uri.startswith("http")
    location = f"{root.rstrip('/')}/{name}" if root and not remote else None
    return str(client.create_experiment(name, artifact_location=location))


def _metrics(scoreboard: pd.DataFrame) -> dict[str, float]:
    """Return the errors in cross-validation as MLflow metrics, {name: value}.

    A name is `split/group/column`, such as `workload/vit/mean_error`.
    """
    figures = ["mean_error", "median_error", "p90_error", "coverage_90", "median_width"]
    long = scoreboard.melt(["split", "group"], figures).dropna()
    names = long["split"] + "/" + long["group"].astype(str) + "/" + long["variable"]
    plain = names.str.replace(r"[^\w/. -]", "_", regex=True)
    return dict(zip(plain, long["value"].astype(float), strict=True))


def _copy_of_models(folder: Path) -> Path:
    """Copy the code of the model to `folder`/srift_models, and return the path of the copy."""
    # The new name avoids a clash with a user's package `models`.
    target, room = folder / "srift_models", Path(models.__file__).parent
    for name in ("domain", "step_time"):
        shutil.copytree(room / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(room / "__init__.py", target)
    return target
