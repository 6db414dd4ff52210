"""`srift check`: two steps of a workload on this machine, in each precision that it tolerates. Buys nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.domain.suggestions import nearest_names

from ..node.record import WorkloadFile
from ..workspace.settings import Settings, SettingsError
from ..workspace.workload_data import WorkloadData

# Of the batch that is tried, as a part of the least global batch: what one device of several gets.
_SHARE = 4
# Nothing of these is for the code of a workload; no host has them.
_OURS = ("AWS_", "SRIFT_", "PREFECT_", "MLFLOW_")


class CheckFailed(Exception):
    """The workload does not train as it is; what was found is shown before."""


def check_workload(settings: Settings, name: str, *, timeout_s: float) -> dict[str, Any]:
    """workload, entrypoint, batch (samples of one device), and `precisions`: what `tasks.node.check` says of each.

    It runs as on a host: from an empty folder that holds the workload's file alone, without this shell's credentials.
    Its data are read where they lie, those in S3 where they were fetched for local hosts; else a note says so.
    Raises SettingsError where the workload is unknown or has no entrypoint, CheckFailed where it takes too long or ends
    the process that runs it.
    """
    if name not in settings.workloads:
        raise SettingsError(f"unknown workload {name!r}; {nearest_names(name, settings.workloads)}")
    path, function = settings.entrypoint(name)
    data = settings.data(name)
    workload = settings.workload(name)
    file = WorkloadFile(
        name=name,
        digest=workload.digest,
        file=f"{workload.digest}.py",
        function=function,
        arguments=dict(settings.workloads[name].arguments),
        source=path.name,
        data="" if data is None else _place(settings, data),
        data_digest="" if data is None else data.digest,
    )
    batch = max(1, workload.global_batch_least // _SHARE)
    precisions = list(settings.workloads[name].precisions)
    question = {"workload": asdict(file), "precisions": precisions, "batch": batch}
    with tempfile.TemporaryDirectory(prefix="srift-check-") as folder:
        shutil.copyfile(path, Path(folder) / file.file)
        answers = _asked(Path(folder), question, timeout_s=timeout_s)
    entrypoint = str(settings.workloads[name].entrypoint)
    return {"workload": name, "entrypoint": entrypoint, "batch": batch, "precisions": answers}


def _place(settings: Settings, data: WorkloadData) -> str:
    fetched = data.fetched_below(settings.home)
    return str(fetched if data.address is not None and fetched.is_dir() else data.source)


def _asked(folder: Path, question: Mapping[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
    answer = folder / "answer.json"
    command = [sys.executable, "-m", "tasks.node.check", str(answer)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
    try:
        ended = subprocess.run(
            command,
            input=json.dumps(question).encode(),
            stdout=sys.stderr.fileno(),  # what the workload prints is no part of the answer
            cwd=folder,
            env=environment | {"HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""},
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckFailed(
            f"it did not make two steps of {question['batch']} samples in {timeout_s:g} s and was ended: is something"
            " downloaded or waited for? --timeout allows more"
        ) from None
    if not answer.exists():
        raise CheckFailed(f"what ran it ended with exit code {ended.returncode} before it had made two steps")
    answers: list[dict[str, Any]] = json.loads(answer.read_text())
    return answers


def problems(found: Mapping[str, Any]) -> CheckFailed | None:
    """What keeps the workload from training, of `check_workload`'s answer."""
    said = {one["problem"]: one["precision"] for one in reversed(found["precisions"]) if one["problem"]}
    if not said:
        return None
    every = len(said) == 1 and all(one["problem"] for one in found["precisions"])
    lines = [problem if every else f"in {precision}: {problem}" for problem, precision in said.items()]
    return CheckFailed(f"{found['workload']} would fail on every machine: {'; '.join(lines)}")
