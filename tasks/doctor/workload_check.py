"""`srift check`: two steps of a workload on this machine, in each precision that it tolerates. Buys nothing.

It runs as on a host: the same code from an archive, the same installed requirements, without this shell's environment
and, where namespaces can be had, without a network and without sight of other processes.
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

from models.domain.suggestions import nearest_names

from ..node import agent
from ..node.record import WorkloadFile
from ..node.requirements import NotInstalled, unpack
from ..providers.local.network import detect, without_network
from ..workspace.environments import install_at
from ..workspace.settings import Settings, SettingsError
from ..workspace.sources import Source
from ..workspace.workload_data import WorkloadData
from .unnamed_imports import unnamed_imports

# Of the batch that is tried, as a part of the least global batch: what one device of several gets. node.check calls it
# a quarter.
_SHARE = 4


class CheckFailed(Exception):
    """The workload does not train as it is; what was found is shown before."""


def check_workload(settings: Settings, name: str, *, timeout_s: float) -> dict[str, Any]:
    """workload, entrypoint, batch (samples of one device), `notes`, and `precisions`: what `node.check` says of each.

    Its requirements are installed first, for which `timeout_s` does not count. Its data are read where they lie, those
    in S3 where they were fetched for local hosts; else a note says so, as one does of strategies and switches, which
    are not tried, and of packages that are here and no `requirements` name.
    Raises SettingsError where the workload is unknown or has no entrypoint, CheckFailed where its requirements cannot
    be installed, it takes too long or ends the process that runs it.
    """
    if name not in settings.workloads:
        raise SettingsError(f"unknown workload {name!r}; {nearest_names(name, settings.workloads)}")
    file, source = settings.travelling(name)
    data = settings.data(name)
    file = replace(file, data="" if data is None else _place(settings, data))
    stated = settings.workloads[name]
    batch = max(1, settings.workload(name).global_batch_least // _SHARE)
    try:
        python = install_at(settings.home, file, source) if file.requirements else sys.executable
    except NotInstalled as error:
        raise CheckFailed(str(error)) from None
    isolation = detect()
    notes = list(source.left_out)
    if not isolation.namespaces:
        notes.append(
            f"this machine's network was in reach, as it is on no local host: {isolation.why_not}"
        )
    untried = [one for one in (*stated.strategies, *stated.switches) if one not in ("ddp", "none")]
    if untried:
        notes.append(
            f"not tried here: {', '.join(untried)}; one process made its steps without them, a refresh measures them"
        )
    with tempfile.TemporaryDirectory(prefix="srift-check-") as place:
        folder, package = Path(place) / "home", Path(place) / "code" / "node"
        _lay_out(folder, package, file, source)
        question = {
            "workload": asdict(file),
            "folder": str(folder),
            "precisions": list(stated.precisions),
            "batch": batch,
        }
        command = without_network(
            isolation, [python, "-m", "node.check", str(Path(place) / "answer.json")]
        )
        answer = _asked(command, question, Path(place), timeout_s=timeout_s)
    notes += unnamed_imports(
        source, answer["files"], Path(python).parents[1] if file.requirements else None
    )
    found = {"workload": name, "entrypoint": str(stated.entrypoint), "batch": batch}
    return found | {"notes": notes, "precisions": answer["precisions"]}


def _lay_out(folder: Path, package: Path, file: WorkloadFile, source: Source) -> None:
    """As on a machine: the workload's code below `folder`, and the node package alone on Python's path."""
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
    return str(fetched if data.address is not None and fetched.is_dir() else data.source)


def _asked(
    command: Sequence[str], question: Mapping[str, Any], place: Path, *, timeout_s: float
) -> dict[str, Any]:
    answer, folder, workload = place / "answer.json", place / "home", question["workload"]
    own = {"PYTHONPATH": str(place / "code"), "TMPDIR": str(place), "CUDA_VISIBLE_DEVICES": ""}
    try:
        ended = subprocess.run(
            command,
            input=json.dumps(question).encode(),
            stdout=sys.stderr.fileno(),  # what the workload prints is no part of the answer
            cwd=folder / WorkloadFile(**workload).folder,
            env=agent.clean_environment(folder) | own | workload["env"],
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckFailed(
            f"it did not make two steps of {question['batch']} samples in {timeout_s:g} s and was ended: is something"
            " downloaded or waited for? --timeout allows more"
        ) from None
    if not answer.exists():
        raise CheckFailed(f"what ran it {_ended(ended.returncode)} before it had made two steps")
    answered: dict[str, Any] = json.loads(answer.read_text())
    return answered


def _ended(code: int) -> str:
    killed = (
        code - 128 if code > 128 else -code
    )  # a shell's way of telling of a signal, or Python's
    if killed in signal.valid_signals():
        return f"was killed ({signal.Signals(killed).name})" + (
            " - out of memory?" if killed == signal.SIGKILL else ""
        )
    return f"ended with exit code {code}"


def problems(found: Mapping[str, Any]) -> CheckFailed | None:
    """What keeps the workload from training, of `check_workload`'s answer."""
    said = {
        one["problem"]: one["precision"] for one in reversed(found["precisions"]) if one["problem"]
    }
    if not said:
        return None
    every = len(said) == 1 and all(one["problem"] for one in found["precisions"])
    lines = [
        problem if every else f"in {precision}: {problem}" for problem, precision in said.items()
    ]
    return CheckFailed(f"{found['workload']} failed here: {'; '.join(lines)}")
