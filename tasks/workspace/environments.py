"""Install workloads' requirements into Python environments in SRIFT_HOME/environments.

Local hosts have no access to a package index, so environments are installed before hosts start.
"""

import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

from ..node.record import WorkloadFile
from ..node.requirements import NotInstalled, environment_of, install, is_ready, readable, unpack
from ..providers.local.network import detect, without_files
from ..reporting.progress import reporter
from .settings import Settings
from .sources import Source

_UNUSED_DAYS = 30.0


def environment_at(home: Path, spec: WorkloadFile) -> Path:
    """Return the folder of the Python environment for the requirements of the workload `spec`."""
    return environment_of(home / "environments", spec.requirements_digest)


def install_at(settings: Settings, spec: WorkloadFile, source: Source) -> str:
    """Install a workload's requirements if necessary.

    Returns the path of the Python interpreter of the workload's environment. pip runs without
    access to this user's files. Raises NotInstalled if the installation fails.
    """
    environment = environment_at(settings.home, spec)
    if not is_ready(environment):
        reporter().say(f"installing the requirements of workload {spec.name} ({spec.requirements})")
    # pip gets a copy of the code, because builds write into the code's folder.
    with tempfile.TemporaryDirectory(prefix="srift-requirements-") as folder:
        code, builds = Path(folder) / "code", settings.stated(spec.name).allow_builds
        unpack(source.travels_as(source.read()), code)
        confine = partial(without_files, detect(), [code, environment, *readable()])
        return install(spec.requirements, code, environment, spec.name, builds, confine)


def not_installable(settings: Settings) -> dict[str, str]:
    """Install the requirements of every workload, and return the failures as {workload: message}.

    Removes environments that no workload needs and that have not been used for 30 days.
    """
    problems, used = {}, set()
    for name, section in settings.workloads.items():
        if section.entrypoint is not None and section.requirements:
            spec, source = settings.code_to_send(name)
            used.add(environment_at(settings.home, spec))
            try:
                install_at(settings, spec, source)
            except NotInstalled as error:
                problems[name] = str(error)
    for marker in (settings.home / "environments").glob("*/complete.json"):
        age_days = (time.time() - marker.stat().st_mtime) / 86400
        if marker.parent not in used and age_days > _UNUSED_DAYS:
            shutil.rmtree(marker.parent, ignore_errors=True)
    return problems
