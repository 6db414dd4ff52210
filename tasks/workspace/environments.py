"""Python environments with workloads' requirements on this machine, in SRIFT_HOME/environments.

Local hosts have no network: what they need is installed before they start, and found there. `srift check` uses it too.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ..node.record import WorkloadFile
from ..node.requirements import NotInstalled, environment_of, install, installed, unpack
from ..reporting.progress import reporter
from .settings import Settings
from .sources import Source

_UNUSED_DAYS = 30.0


def environment_at(home: Path, spec: WorkloadFile) -> Path:
    """Where the requirements of `spec` are installed for this Python, or will be."""
    return environment_of(home / "environments", spec.requirements_digest)


def install_at(home: Path, spec: WorkloadFile, source: Source) -> str:
    """The Python that has the requirements of `spec`, which are installed first where they are not. Says that they are.

    Raises NotInstalled with the reason, a full disk among them.
    """
    environment = environment_at(home, spec)
    if installed(environment) is None:
        reporter().say(f"installing the requirements of workload {spec.name} ({spec.requirements})")
    started = time.monotonic()
    # pip may write beside what it builds: it gets a copy, not the user's folder
    try:
        with tempfile.TemporaryDirectory(prefix="srift-requirements-") as folder:
            unpack(source.travels_as(source.read()), Path(folder) / "code")
            python = install(spec.requirements, Path(folder) / "code", environment, spec.name)
    except OSError as error:
        raise NotInstalled(
            f"requirements of workload {spec.name} could not be installed on this machine: {error}"
        ) from error
    if time.monotonic() - started > 1.0:
        reporter().say(f"installed within {time.monotonic() - started:.0f} s: {environment}")
    return python


def not_installable(settings: Settings) -> dict[str, str]:
    """Install what workloads with requirements need, and remove what none has needed for a month.

    Returns for each workload whose requirements cannot be installed the sentence on why.
    """
    refused, used = {}, set()
    for name, stated in settings.workloads.items():
        if stated.entrypoint is not None and stated.requirements:
            spec, source = settings.travelling(name)
            used.add(environment_at(settings.home, spec))
            try:
                install_at(settings.home, spec, source)
            except NotInstalled as error:
                refused[name] = str(error)
    for marker in (settings.home / "environments").glob("*/complete.json"):
        with suppress(OSError):
            if (
                marker.parent not in used
                and time.time() - marker.stat().st_mtime > _UNUSED_DAYS * 86400
            ):
                shutil.rmtree(marker.parent)
    return refused
