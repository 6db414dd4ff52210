"""`srift check`: two steps of a workload on this machine, in each of its precisions.

Runs as on a host: code from an archive, installed requirements, a clean environment and, if
namespaces are available, no network and no view of other processes.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..node import agent
from ..node.record import WorkloadFile
from ..node.requirements import NotInstalled, unpack
from ..providers.local.network import detect, without_network
from ..workspace.environments import install_at
from ..workspace.settings import Settings
from ..workspace.sources import Source
from ..workspace.workload_data import WorkloadData

_SHARE = 4  # a device gets a quarter of the least global batch


class CheckFailed(Exception):
    """The workload does not train here."""

    exit_code = 1


def check_workload(settings: Settings, name: str, *, timeout_s: float) -> dict[str, Any]:
    """Return workload, entrypoint, batch per device, notes, and the result of each precision.

    `timeout_s` does not include the installation of requirements. Raises SettingsError on an
    unknown workload, CheckFailed if the check cannot run to its end.
    """
    file, source = settings.travelling(name)
    data = settings.data(name)
    file = replace(file, data="" if data is None else _place(settings, data))
    stated = settings.stated(name)
    batch = max(1, stated.batches[0] // _SHARE)
    try:
        python = install_at(settings.home, file, source) if file.requirements else sys.executable
    except NotInstalled as error:
        raise CheckFailed(str(error)) from None
    isolation = detect()
    notes = [f"{link} is a link, and is not sent to machines" for link in source.left_out]
    if not isolation.namespaces:
        notes.append(f"the check could reach the network, a host cannot: {isolation.why_not}")
    untried = [one for one in (*stated.strategies, *stated.switches) if one not in ("ddp", "none")]
    if untried:
        notes.append(f"not tried with one process: {', '.join(untried)}")
    with tempfile.TemporaryDirectory(prefix="srift-check-") as place:
        folder, package = Path(place) / "home", Path(place) / "code" / "node"
        _lay_out(folder, package, file, source)
        question = {
            "workload": asdict(file),
            "folder": str(folder),
            "precisions": list(stated.precisions),
            "batch": batch,
        }
        command = [python, "-m", "node.check", str(Path(place) / "answer.json")]
        precisions = _run(without_network(isolation, command), question, Path(place), timeout_s)
    return {
        "workload": name,
        "entrypoint": str(stated.entrypoint),
        "batch": batch,
        "notes": notes,
        "precisions": precisions,
    }


def _lay_out(folder: Path, package: Path, file: WorkloadFile, source: Source) -> None:
    """Put the code below `folder`, and the node package alone on Python's path."""
    content, target = source.travels_as(source.read()), folder / file.file
    target.parent.mkdir(parents=True)
    if file.folder:
        unpack(content, folder / file.folder)
    else:
        target.write_bytes(content)
    shutil.copytree(
        Path(agent.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )


def _place(settings: Settings, data: WorkloadData) -> str:
    fetched = data.fetched_below(settings.home)
    return str(fetched if fetched.is_dir() else data.source)


def _run(
    command: Sequence[str], question: Mapping[str, Any], place: Path, timeout_s: float
) -> list[dict[str, Any]]:
    answer, folder, workload = place / "answer.json", place / "home", question["workload"]
    own = {"PYTHONPATH": str(place / "code"), "TMPDIR": str(place), "CUDA_VISIBLE_DEVICES": ""}
    try:
        ended = subprocess.run(
            command,
            input=json.dumps(question).encode(),
            stdout=sys.stderr.fileno(),  # the workload's prints are not the command's output
            cwd=folder / WorkloadFile(**workload).folder,
            env=agent.clean_environment(folder) | own | workload["env"],
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckFailed(
            f"two steps of {question['batch']} samples took more than {timeout_s:g} s;"
            " --timeout allows more"
        ) from None
    if not answer.exists():
        code = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
        memory = ", probably out of memory" if code == 128 + signal.SIGKILL else ""
        raise CheckFailed(f"its process ended with exit code {code}{memory}")
    return list(json.loads(answer.read_text()))


def problems(found: Mapping[str, Any]) -> CheckFailed | None:
    """Return what keeps the workload from training, if anything."""
    lines = [
        f"in {one['precision']}: {one['problem']}" for one in found["precisions"] if one["problem"]
    ]
    return CheckFailed(f"{found['workload']} failed here: {'; '.join(lines)}") if lines else None
