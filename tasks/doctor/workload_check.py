"""Run two steps of a workload on this machine, in each of the workload's precisions.

`srift check` runs the steps as on a local host. The steps have only the files that Srift sends to
machines, the installed requirements, and a few environment variables. Linux namespaces block the
network. If this machine does not allow namespaces, the steps have network access.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from models.domain.workload import COMBINED, COMPRESSED, SWITCHES

from ..node import agent
from ..node.record import WorkloadFile
from ..node.requirements import NotInstalled, unpack
from ..providers.local.network import detect, without_network
from ..workspace.environments import install_at
from ..workspace.settings import Settings
from ..workspace.sources import Source

_DIVISOR = 4  # the check's batch is the smallest global batch divided by this number


class CheckFailed(Exception):
    """The workload does not train on this machine."""

    exit_code = 1


def check_workload(settings: Settings, name: str, *, timeout_s: float) -> dict[str, Any]:
    """Run two steps of workload `name` in each of its precisions, and report the outcome.

    timeout_s: maximum seconds for the steps. Installing the requirements does not count.

    Raises:
        SettingsError: if the workload is unknown, or its code or data cannot be sent to machines.
        CheckFailed: if the requirements cannot be installed, the steps take longer than
            `timeout_s`, or the process ends without a result.
    """
    file, source = settings.code_to_send(name)
    if data := settings.data(name):
        copy = data.fetched_below(settings.home)
        file = replace(file, data=str(copy if copy.is_dir() else data.source))
    section = settings.stated(name)
    batch = max(1, section.global_batch[0] // _DIVISOR)
    try:
        python = install_at(settings, file, source) if file.requirements else sys.executable
    except NotInstalled as error:
        raise CheckFailed(str(error)) from None
    isolation = detect()
    notes = [f"{link} is a link that is not sent to machines" for link in source.left_out]
    if not isolation.namespaces:
        notes.append(
            f"the steps had network access, because namespaces are missing: {isolation.why_not}"
        )
    others = (*COMPRESSED, *COMBINED, *SWITCHES[1:])
    if untried := [name for name in (*section.strategies, *section.switches) if name in others]:
        notes.append(f"not checked: {', '.join(untried)}")
    with tempfile.TemporaryDirectory(prefix="srift-check-") as name_of_place:
        place = Path(name_of_place)
        answer, folder = place / "answer.json", place / "home"
        _lay_out(place, file, source)
        isolation.give(place, folder, folder / file.folder)
        question = {
            "workload": asdict(file),
            "precisions": section.precisions,
            "strategies": section.strategies,
            "batch": batch,
            "folder": str(folder),
        }
        # Without a limit on memory, Linux might kill another process if the workload is too large.
        command = ["prlimit", f"--data={psutil.virtual_memory().available}"]
        command += [python, "-m", "node.check", str(answer)]
        try:
            process = subprocess.run(
                without_network(isolation, command),
                input=json.dumps(question).encode(),
                stdout=sys.stderr.fileno(),  # keeps the workload's prints out of Srift's output
                cwd=folder / file.folder,
                env=agent.clean_environment(folder)
                | {
                    "PYTHONPATH": str(place / "code"),
                    "TMPDIR": str(place),
                    "CUDA_VISIBLE_DEVICES": "",
                }
                | file.env,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CheckFailed(
                f"two steps of {batch} samples took more than {timeout_s:g} s:"
                " allow more time with --timeout"
            ) from None
        if not answer.exists():
            raise CheckFailed(
                f"the workload's process ended with code {process.returncode}"
                " (-9 and 137 mean: out of memory)"
            )
        precisions = json.loads(answer.read_text())
    peak = max(
        (answer["figures"]["peak_bytes"] for answer in precisions if answer["figures"]), default=0
    )
    notes += [
        f"{host} has less memory than the {peak / 2**30:.3g} GiB of a batch of {batch}"
        for host, machine in settings.local.instance_types.items()
        if machine.memory_gib * 2**30 < peak
    ]
    return {
        "workload": name,
        "entrypoint": str(section.entrypoint),
        "batch": batch,
        "notes": notes,
        "precisions": precisions,
    }


def _lay_out(place: Path, file: WorkloadFile, source: Source) -> None:
    """Write the workload's code to `place`/home and Srift's agent to `place`/code/node.

    A training machine has the same folders.
    """
    content, target = source.travels_as(source.read()), place / "home" / file.file
    target.parent.mkdir(parents=True)
    if file.folder:
        unpack(content, place / "home" / file.folder)
    else:
        target.write_bytes(content)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(agent.__file__).parent, place / "code" / "node", ignore=ignore)


def problems(report: Mapping[str, Any]) -> CheckFailed | None:
    """Return an error that lists the failed precisions, or None if no precision failed.

    report: the result of `check_workload`.
    """
    lines = [
        f"in {answer['precision']}: {answer['problem']}"
        for answer in report["precisions"]
        if answer["problem"]
    ]
    message = f"{report['workload']} failed the check {'; '.join(lines)}"
    return CheckFailed(message) if lines else None
