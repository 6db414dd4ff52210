"""A launch's workloads made ready on a machine: folders unpacked, requirements installed. Standard
library.

`python -m node.prepare --mailbox DIR --plan FILE --node I -- PYTHON ...` becomes that command,
under the Python of the workloads' environment, in their folder and with their variables. Where that
fails, every run of the plan that needs the machine fails: by fault of the workload, unless no index
answered or the time was up.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from .device_check import arguments, leave_with
from .processes import EXIT_ITEM_FAILED, EXIT_MAILBOX
from .record import INSTALL, WorkloadFile, plan_from_json, write_failed_records
from .requirements import NotInstalled, environment_of, install, installed, unpack


def python_of(mailbox: Path, scratch: Path, workload: WorkloadFile) -> str:
    """Return the Python that runs `workload`, whose folder is unpacked below `scratch`. Raises
    NotInstalled, OSError.
    """
    if workload.folder:
        unpacked = scratch / workload.folder
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        unpack(mailbox / workload.file, unpacked)
    if not workload.requirements:
        return sys.executable
    if not workload.environment:
        environment = environment_of(scratch / "environments", workload.requirements_digest)
        return install(workload.requirements, scratch / workload.folder, environment, workload.name)
    found = installed(Path(workload.environment))
    if found is None:
        raise NotInstalled(
            f"{workload.environment} of workload {workload.name} is gone: refresh again"
        )
    return found


def main() -> NoReturn:
    """Become the command, or leave with the reason as the last line."""
    given = arguments("node.prepare")
    plan = plan_from_json(given.plan.read_text())
    needed = {item.workload for item in plan.items if given.node in item.nodes}
    scratch = given.mailbox / f"node-{given.node}" / "scratch"
    python, environment = given.command[0], dict(os.environ)
    try:
        for workload in plan.workloads:  # of one process key: the same folder, Python, variables
            if workload.name in needed:
                python = python_of(given.mailbox, scratch, workload)
                environment |= workload.env
                if workload.folder:
                    os.chdir(scratch / workload.folder)
    except (NotInstalled, OSError) as error:
        passing = isinstance(error, NotInstalled) and error.passing
        code, reason = EXIT_ITEM_FAILED, f"the workload could not be made ready: {error}"
        try:
            cause = INSTALL if passing else ""
            write_failed_records(given.mailbox, plan, given.node, reason, cause)
        except OSError as full:
            code, reason = EXIT_MAILBOX, f"no record could be written ({full.strerror}); {reason}"
        leave_with(code, reason)
    os.execve(python, [python, *given.command[1:]], environment)


if __name__ == "__main__":
    main()
