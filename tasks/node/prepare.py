"""Prepare a machine for torchrun: check devices, unpack code, install requirements.

Run as `python -m node.prepare ARGUMENTS`. After the preparation, the command `python ARGUMENTS`
replaces this process. The command runs in the workloads' folder, with the workloads' environment
variables. If the workloads have requirements, the command uses the Python of their virtual
environment. This module imports only the standard library.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from .device_check import wait_for_devices
from .processes import EXIT_ITEM_FAILED, EXIT_NO_DEVICE
from .record import INSTALL, MACHINE, WorkloadFile, fail_runs, task_of_process
from .requirements import InstallationInterrupted, NotInstalled, environment_of, install, unpack


def python_of(mailbox: Path, scratch: Path, workload: WorkloadFile) -> str:
    """Unpack the code of `workload` below `scratch`, and install its requirements if necessary.

    Returns the path of the Python interpreter that can run the code. Raises NotInstalled if the
    requirements cannot be installed, and OSError if the code cannot be unpacked.
    """
    if workload.folder:
        unpack((mailbox / workload.file).read_bytes(), scratch / workload.folder)
    if not workload.requirements:
        return sys.executable
    if workload.environment:
        return f"{workload.environment}/bin/python"
    environment = environment_of(scratch / "environments", workload.requirements_digest)
    return install(workload.requirements, scratch / workload.folder, environment, workload.name)


def main() -> NoReturn:
    """Prepare the machine, then replace this process by `python` with the same arguments.

    If the preparation fails, record every run on this node as failed, and exit.
    """
    mailbox, plan, node = task_of_process()
    scratch = mailbox / f"node-{node}" / "scratch"
    if plan.expected[node].checked:
        reason = wait_for_devices(plan.expected[node], plan.join_s)
        if reason:
            fail_runs(EXIT_NO_DEVICE, reason, MACHINE)
    python, environment = sys.executable, dict(os.environ)
    try:
        # All workloads of a plan have the same folder, requirements and environment variables
        # (WorkloadFile.process_key), so the first is enough.
        for workload in plan.workloads[:1]:
            python = python_of(mailbox, scratch, workload)
            environment |= workload.env
            if workload.folder:
                os.chdir(scratch / workload.folder)
        os.execve(python, [python, *sys.argv[1:]], environment)
    except (NotInstalled, OSError) as error:
        cause = INSTALL if isinstance(error, InstallationInterrupted) else ""
        fail_runs(EXIT_ITEM_FAILED, f"the workload could not be prepared: {error}", cause)


if __name__ == "__main__":
    main()
