"""Prepare a machine for torchrun: check devices, unpack code, install requirements.

Run as `python -m node.prepare PYTHON ...`. After the preparation, this process becomes the command
`PYTHON ...`, in the workloads' folder and with the workloads' environment variables. If the
workloads have requirements, PYTHON is replaced by the Python of the virtual environment. This
module imports only the standard library.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from .device_check import DEVICES_WITHIN_S, wait_for_devices
from .processes import EXIT_ITEM_FAILED, EXIT_NO_DEVICE
from .record import INSTALL, MACHINE, WorkloadFile, fail_runs, task_of_process
from .requirements import NotInstalled, environment_of, install, installed, unpack


def python_of(mailbox: Path, scratch: Path, workload: WorkloadFile) -> str:
    """Unpack the code of `workload` below `scratch`, and return the Python that runs it.

    Raises NotInstalled if the requirements cannot be installed, or if the folder
    `workload.environment` with the installed requirements does not exist. Raises OSError if the
    code cannot be unpacked.
    """
    if workload.folder:
        unpack((mailbox / workload.file).read_bytes(), scratch / workload.folder)
    if not workload.requirements:
        return sys.executable
    if not workload.environment:
        environment = environment_of(scratch / "environments", workload.requirements_digest)
        return install(workload.requirements, scratch / workload.folder, environment, workload.name)
    found = installed(Path(workload.environment))
    if found is None:
        raise NotInstalled(
            f"the environment {workload.environment} of workload {workload.name} is gone: run"
            " `srift refresh`"
        )
    return found


def main() -> NoReturn:
    """Prepare the machine, then replace this process by the command in its arguments.

    If the preparation fails, write a failed record for every run on this node, and exit.
    """
    mailbox, plan, node = task_of_process()
    scratch = mailbox / f"node-{node}" / "scratch"
    if plan.expected[node].checked:
        waited = scratch / "waited-for-devices"  # this file exists after the first attempt
        wait_s = 0.0 if waited.exists() else DEVICES_WITHIN_S
        waited.touch()
        reason = wait_for_devices(plan.expected[node], wait_s=wait_s, most_s=plan.join_s)
        if reason:
            fail_runs(mailbox, plan, node, code=EXIT_NO_DEVICE, reason=reason, cause=MACHINE)
    needed = {item.workload for item in plan.items if node in item.nodes}
    python, environment = sys.argv[1], dict(os.environ)
    try:
        # All workloads of a plan have the same folder, requirements and environment variables
        # (WorkloadFile.process_key).
        for workload in plan.workloads:
            if workload.name in needed:
                python = python_of(mailbox, scratch, workload)
                environment |= workload.env
                if workload.folder:
                    os.chdir(scratch / workload.folder)
    except (NotInstalled, OSError) as error:
        cause = INSTALL if isinstance(error, NotInstalled) and error.passing else ""
        reason = f"the workload could not be prepared: {error}"
        fail_runs(mailbox, plan, node, code=EXIT_ITEM_FAILED, reason=reason, cause=cause)
    os.execve(python, [python, *sys.argv[2:]], environment)


if __name__ == "__main__":
    main()
